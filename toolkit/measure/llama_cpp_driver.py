"""Runs llama.cpp in its own environment, which has `xllamacpp` and nothing of this toolkit.

    python llama_cpp_driver.py FILE.gguf THREADS CONTEXT [loaded | repacked]

Each line on stdin is a request, a JSON object; each line on stdout is the answer to one. `{"tokens": [7]}` takes these
tokens through the model in one pass. With `"drop": [first, end]` the file's pages between these bytes are dropped
before it, so that they are read from the disk. The answer has `seconds` of the pass and `read_bytes`, what the process
read from the disk in it. With `"probabilities": n` it also has `log_probabilities` of the next token, for tokens 0 to
n - 1. With `"generate": n` n tokens follow the given ones, sampled if there is a `temperature` above 0; the answer has
`seconds` of one of them, and `read_bytes` of all. With `"text": n` it has the likeliest `tokens` themselves. The first
line on stdout is `{}`: the model is loaded.
"""

import ctypes
import json
import mmap
import os
import sys
import time

MADV_DONTNEED = 4
LOADED, REPACKED = "loaded", "repacked"
LEAST_CONTEXT = 64


def main() -> None:
    """Load the model and answer requests until stdin ends."""
    file, threads, context = os.path.realpath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what llama.cpp prints must not come between the answers
    server = open_server(file, threads, context, LOADED not in sys.argv[4:], REPACKED in sys.argv[4:])
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(server, file, json.loads(line))) + "\n")
    answers.flush()
    os._exit(0)  # its threads need not be waited for


def open_server(file: str, threads: int, context: int, mapped: bool, repacked: bool = False):
    """llama.cpp with the model mapped, without the repacked copies of weights that it would keep; or else loaded.

    It is mapped and has those copies, too, if it is `repacked`, which is llama.cpp's default. Prompt and generated text
    together may have `context` tokens.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if mapped else modes.LLAMA_LOAD_MODE_NONE
    params.no_extra_bufts = mapped and not repacked
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = 1, max(LEAST_CONTEXT, context + 1)
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.fit_params = params.warmup = False
    return xllamacpp.Server(params)


def answer(server, file: str, request: dict) -> dict:
    """One pass through the model. Raises `RuntimeError` if llama.cpp does not give it."""
    if "generate" in request:
        before = read_bytes()
        seconds = generate(server, request["tokens"], request["generate"], request.get("temperature", 0.0))
        return {"seconds": seconds, "read_bytes": read_bytes() - before}
    if "text" in request:
        return {"tokens": text(server, request["tokens"], request["text"])}
    if request.get("drop"):
        drop_pages(file, *request["drop"])
    count = request.get("probabilities", 0)
    task = {"prompt": request["tokens"], "n_predict": 1, "temperature": 0.0, "n_probs": count, "cache_prompt": False}
    before, begun_s = read_bytes(), time.perf_counter()
    completion = server.handle_completions(task | {"ignore_eos": True})
    seconds = time.perf_counter() - begun_s
    if "choices" not in completion:
        raise RuntimeError(f"llama.cpp answered {completion}")
    reply = {"seconds": seconds, "read_bytes": read_bytes() - before}
    if count:
        ranked = completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        by_token = {entry["id"]: entry["logprob"] for entry in ranked}
        reply["log_probabilities"] = [by_token[token] for token in range(count)]
    return reply


def generate(server, tokens: list[int], count: int, temperature: float) -> float:
    """Seconds a token by llama.cpp's own clock. Raises `RuntimeError` if llama.cpp does not give as many."""
    task = {"prompt": tokens, "n_predict": count, "temperature": temperature, "cache_prompt": False, "ignore_eos": True}
    completion = server.handle_completions(task)
    if completion.get("timings", {}).get("predicted_n") != count:
        raise RuntimeError(f"llama.cpp answered {completion}")
    return completion["timings"]["predicted_per_token_ms"] / 1e3


def text(server, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens after these. Raises `RuntimeError` if llama.cpp does not give as many."""
    task = {"prompt": tokens, "n_predict": count, "temperature": 0.0, "n_probs": 1, "cache_prompt": False}
    completion = server.handle_completions(task | {"ignore_eos": True})
    found = (
        [entry["id"] for entry in completion["choices"][0]["logprobs"]["content"]] if "choices" in completion else []
    )
    if len(found) != count:
        raise RuntimeError(f"llama.cpp answered {completion}")
    return found


def drop_pages(file: str, first: int, end: int) -> None:
    """Remove a part of a file from this process's memory and from the page cache, which keeps pages that are mapped.

    Pages that lie only partly in it stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    with open("/proc/self/maps") as maps:
        places = [line.split()[:3] for line in maps if line.rstrip().endswith(file)]
    for addresses, _, offset in places:
        start, stop = (int(address, 16) for address in addresses.split("-"))
        shift = start - int(offset, 16)  # from a place in the file to its address
        begin, length = max(start, first + shift), min(stop, end + shift) - max(start, first + shift)
        if length > 0 and libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise of {file} failed")
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, first, max(0, end - first), os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_bytes() -> int:
    """The bytes that this process has had read from disks so far."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))


if __name__ == "__main__":
    main()
