"""Runs llama.cpp in its own environment, which has nothing of this toolkit.

    python llama_cpp_driver.py FILE.gguf THREADS CONTEXT (mapped | repacked | read)

"mapped": products read the mapped file. "repacked": beside the mapped file there are copies of weights, repacked for
quicker products; it is llama.cpp's default. "read": the same without a mapping.

Each line on stdin is a request, a JSON object; each line on stdout is the answer to one. The first line on stdout,
`{"build": "..."}`, says that the model is loaded, and the instructions that llama.cpp uses. Requests:

- `{"tokens": [7]}` takes these tokens through the model in one pass. With `"drop": [first, end]` the file's pages
  between these bytes are dropped before it, so that they are read from the disk. The answer has `seconds` of the pass
  and `read_bytes`, what the process read from the disk in it. With `"probabilities": n` it also has
  `log_probabilities` of the next token, for tokens 0 to n - 1. With `"generate": n` n tokens follow the given ones,
  sampled if there is a `temperature` above 0; the answer has `first_s`, the seconds of the prompt, `seconds` of one of
  them, `read_bytes` of all, `cpu_seconds` of all, and the `tokens` themselves, or their
  `text`. With `"text": n` it has the likeliest `tokens` themselves.
- `{"pin": [[first, end], ...]}` reads these bytes of the mapped file and locks them in memory.
- `{"random": true}` turns the system's read-ahead for the mapped file off.
"""

import ctypes
import importlib.util
import json
import math
import mmap
import os
import sys
import time
import types
from collections.abc import Iterator

MADV_RANDOM, MADV_DONTNEED = 1, 4
LEAST_CONTEXT = 64
LOADS = ("mapped", "repacked", "read")


def main() -> None:
    """Load the model and answer requests until stdin ends."""
    file, threads, context, load = os.path.realpath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what llama.cpp prints must not come between the answers
    kind = ServerInProcess if importlib.util.find_spec("xllamacpp") else CFunctions
    engine = kind(file, threads, max(LEAST_CONTEXT, context + 1), load)
    answers.write(json.dumps({"build": engine.build}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, file, json.loads(line))) + "\n")
    answers.flush()
    os._exit(0)  # its threads need not be waited for


def answer(engine: "ServerInProcess | CFunctions", file: str, request: dict) -> dict:
    """The answer to a request. Raises `RuntimeError` if llama.cpp does not give it, and `OSError` of the system."""
    if "pin" in request:
        for first, end in request["pin"]:
            pin(file, first, end)
        return {}
    if "random" in request:
        advise(file, 0, os.path.getsize(file), MADV_RANDOM)
        return {}
    if "text" in request:
        return {"tokens": engine.text(request["tokens"], request["text"])}
    if request.get("drop"):
        drop_pages(file, *request["drop"])
    before, cpu_s = read_bytes(), time.process_time()
    if "generate" in request:
        reply = engine.generate(request["tokens"], request["generate"], request.get("temperature", 0.0))
    else:
        reply = engine.one_pass(request["tokens"], request.get("probabilities", 0))
    return reply | {"read_bytes": read_bytes() - before, "cpu_seconds": time.process_time() - cpu_s}


class CFunctions:
    """llama.cpp through its C functions, as the package llama-cpp-python declares them."""

    def __init__(self, file: str, threads: int, context: int, load: str):
        self._llama = llama = _declarations()
        llama.llama_backend_init()
        model, settings = llama.llama_model_default_params(), llama.llama_context_default_params()
        model.load_mode = llama.LLAMA_LOAD_MODE_NONE if load == "read" else llama.LLAMA_LOAD_MODE_MMAP
        model.use_extra_bufts, model.n_gpu_layers = load != "mapped", 0
        settings.n_ctx = settings.n_batch = context
        settings.n_threads = settings.n_threads_batch = threads
        self._model = llama.llama_model_load_from_file(file.encode(), model)
        self._context = self._model and llama.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot run {file}")
        self._words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.build = llama.llama_print_system_info().decode()

    def one_pass(self, tokens: list[int], count: int) -> dict:
        """Take a text through the model."""
        self._forget()
        begun_s = time.perf_counter()
        self._decode(tokens)
        seconds = time.perf_counter() - begun_s
        if not count:
            return {"seconds": seconds}
        logits = self._llama.llama_get_logits_ith(self._context, -1)[: self._words]
        largest = max(logits)
        total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
        return {"seconds": seconds, "log_probabilities": [logit - total for logit in logits[:count]]}

    def generate(self, tokens: list[int], count: int, temperature: float) -> dict:
        """Seconds of the prompt, and seconds a token."""
        first_s, seconds, chosen = self._continue(tokens, count, temperature)
        return {"first_s": first_s, "seconds": seconds / count, "tokens": chosen}

    def text(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after these."""
        return self._continue(tokens, count, 0.0)[2]

    def _continue(self, tokens: list[int], count: int, temperature: float) -> tuple[float, float, list[int]]:
        """Seconds of the prompt, seconds of `count` passes, the token before each."""
        llama = self._llama
        sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if temperature > 0:
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_temp(temperature))
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_dist(llama.LLAMA_DEFAULT_SEED))
        else:
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_greedy())
        self._forget()
        begun_s = time.perf_counter()
        self._decode(tokens)
        continued_s, chosen = time.perf_counter(), []
        for _ in range(count):
            chosen.append(llama.llama_sampler_sample(sampler, self._context, -1))
            self._decode(chosen[-1:])
        ended_s = time.perf_counter()
        llama.llama_sampler_free(sampler)
        return continued_s - begun_s, ended_s - continued_s, chosen

    def _forget(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def _decode(self, tokens: list[int]) -> None:
        array = (self._llama.llama_token * len(tokens))(*tokens)
        if status := self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama.cpp's llama_decode gave {status}")
        self._llama.llama_synchronize(self._context)


def _declarations() -> types.ModuleType:
    """The package's module of C functions alone: the package itself imports NumPy, which would count as memory."""
    package = types.ModuleType("llama_cpp")
    package.__path__ = list(importlib.util.find_spec("llama_cpp").submodule_search_locations)
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


class ServerInProcess:
    """llama.cpp's server in this process, which is what the package xllamacpp has."""

    def __init__(self, file: str, threads: int, context: int, load: str):
        import xllamacpp

        params, modes = xllamacpp.CommonParams(), xllamacpp.llama_load_mode
        params.model.path = file
        params.load_mode = modes.LLAMA_LOAD_MODE_NONE if load == "read" else modes.LLAMA_LOAD_MODE_MMAP
        params.no_extra_bufts = load == "mapped"
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel, params.n_ctx = 1, context
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.fit_params = params.warmup = False
        self.server, self.build = xllamacpp.Server(params), xllamacpp.get_system_info()

    def one_pass(self, tokens: list[int], count: int) -> dict:
        """Take a text through the model."""
        begun_s = time.perf_counter()
        completion = self._complete(tokens, 1, n_probs=count)
        reply = {"seconds": time.perf_counter() - begun_s}
        if count:
            ranked = completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            by_token = {entry["id"]: entry["logprob"] for entry in ranked}
            reply["log_probabilities"] = [by_token[token] for token in range(count)]
        return reply

    def generate(self, tokens: list[int], count: int, temperature: float) -> dict:
        """Seconds of the prompt, and seconds a token, by llama.cpp's own clock."""
        completion = self._complete(tokens, count, temperature=temperature)
        timings = completion.get("timings", {})
        if timings.get("predicted_n") != count:
            raise RuntimeError(f"llama.cpp answered {completion}")
        times = {"first_s": timings["prompt_ms"] / 1e3, "seconds": timings["predicted_per_token_ms"] / 1e3}
        return times | {"text": completion["choices"][0].get("text", "")}

    def text(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after these."""
        completion = self._complete(tokens, count, n_probs=1)
        chosen = [entry["id"] for entry in completion["choices"][0]["logprobs"]["content"]]
        if len(chosen) != count:
            raise RuntimeError(f"llama.cpp answered {completion}")
        return chosen

    def _complete(self, tokens: list[int], count: int, **more: float) -> dict:
        """Raises `RuntimeError` if llama.cpp does not answer the request."""
        task = {"prompt": tokens, "n_predict": count, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        completion = self.server.handle_completions(task | more)
        if "choices" not in completion:
            raise RuntimeError(f"llama.cpp answered {completion}")
        return completion


def pin(file: str, first: int, end: int) -> None:
    """Read a part of a mapped file, and keep it in memory until the process ends."""
    for begin, length in mapped_parts(file, first, end):
        _call("mlock", file, begin, length)


def advise(file: str, first: int, end: int, advice: int) -> None:
    """Tell the system how a part of a mapped file will be used."""
    for begin, length in mapped_parts(file, first, end):
        _call("madvise", file, begin, length, advice)


def drop_pages(file: str, first: int, end: int) -> None:
    """Remove a part of a file from this process's memory and from the page cache, which keeps pages that are mapped.

    Pages that lie only partly in it stay.
    """
    first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    advise(file, first, end, MADV_DONTNEED)
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, first, max(0, end - first), os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def mapped_parts(file: str, first: int, end: int) -> Iterator[tuple[int, int]]:
    """The address and the length of each mapping of these bytes of a file, from the beginning of a page."""
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    with open("/proc/self/maps") as maps:
        places = [line.split()[:3] for line in maps if line.rstrip().endswith(file)]
    for addresses, _, offset in places:
        start, stop = (int(address, 16) for address in addresses.split("-"))
        shift = start - int(offset, 16)  # from a place in the file to its address
        begin = max(start, first + shift)
        if begin < min(stop, end + shift):
            yield begin, min(stop, end + shift) - begin


def _call(function: str, file: str, begin: int, length: int, *more: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(ctypes.c_void_p(begin), ctypes.c_size_t(length), *more):
        error = ctypes.get_errno()
        raise OSError(error, f"{function} of {length} bytes of {file}: {os.strerror(error)}")


def read_bytes() -> int:
    """The bytes that this process has had read from disks so far."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))


if __name__ == "__main__":
    main()
