"""The speed of prompts beside llama.cpp's, what their time goes to, and what the CPU allows.

    python benchmarks/prompts.py                                 # two models, 128, 512 and 2,000 tokens, all in memory
    python benchmarks/prompts.py --models FILE.gguf --tokens 512 --turns 9 --threads 1
    python benchmarks/prompts.py --parts --threads 1             # CPU seconds of each kind of step, in place of a race

A turn computes a prompt of random tokens once in each way: the toolkit's decoder, in passes as `run` makes them, and
llama.cpp, which was compiled for this CPU if `toolkit.measure.llama_cpp_build` did it. Ways take turns; the best turn
counts, since other work only slows. CPU seconds are those of all threads. The limits are multiplications a second: of
`vpdpbusd` on registers, and of torch's products in float32 and bfloat16; with the blocks' weights and a prompt's tokens
they give the least seconds. Writes results/benchmarks/prompts.json.
"""

import argparse
import collections
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import reports
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

import toolkit as tk
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import Program, over_rows
from toolkit.measure import llama_cpp
from toolkit.measure.child import Child
from toolkit.models.gguf_header import LAYERS, read_header
from toolkit.offload.budget import Budget
from toolkit.offload.decoder import decoder as decoders
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.decoder import Decoder
from toolkit.offload.generation import PASS

MODELS, TOKENS, LOADS = ("qwen2.5-coder-1.5b", "smollm2-135m"), (128, 512, 2000), ("mapped", "repacked")
OURS, MUCH, ROOM = "this toolkit", 1 << 40, 8
CHAINS, STEPS, WORK = 12, 1 << 20, 64  # independent sums, steps of each, products of a step
SHAPE = (512, 1536, 8960)  # vectors, columns and rows of torch's products


@intrinsic
def multiply_registers(typing_context, steps):
    """Products of registers with 8 bits, in so many steps; their sum, so that nothing is left out."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(simd.I32, 16)
        given = simd.in_all_lanes(builder, builder.trunc(arguments[0], simd.I32), 16)
        sums = [cgutils.alloca_once_value(builder, simd.constant(kind, number)) for number in range(CHAINS)]
        with cgutils.for_range(builder, arguments[0], intp=simd.I64):
            for place in sums:
                found = simd.call(builder, "x86.avx512.vpdpbusd.512", kind, builder.load(place), given, given)
                builder.store(found, place)
        total = builder.load(sums[0])
        for place in sums[1:]:
            total = builder.xor(total, builder.load(place))
        return builder.extract_element(total, simd.I32(0))

    return types.int32(types.int64), generate


@compiled
def multiply_again(steps, out, first, last):
    """The same by each thread."""
    for row in range(first, last):
        out[row] = multiply_registers(steps)


def limits(repetitions: int) -> dict[str, float]:
    """Multiplications a second of all threads, by the way to multiply."""
    threads, out = torch.get_num_threads(), np.zeros(torch.get_num_threads(), np.int32)
    vectors, columns, rows = SHAPE
    runs: dict[str, Callable] = {}
    work: dict[str, float] = {}
    if simd.host_has("avx512vnni"):
        runs["int8, vpdpbusd"] = lambda: over_rows(multiply_again, threads, 1 << 30, STEPS, out)
        work["int8, vpdpbusd"] = threads * STEPS * CHAINS * WORK
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(vectors, columns).to(dtype), torch.randn(rows, columns).to(dtype)
        name = f"torch, {str(dtype).removeprefix('torch.')}"
        runs[name], work[name] = lambda x=x, weight=weight: x @ weight.T, vectors * columns * rows
    best = reports.minima(runs, repetitions, 0.01)
    return {name: work[name] / seconds for name, seconds in best.items()}


def block_weights(file: Path) -> int:
    """The weights of all blocks' matrices: each is multiplied once for each token."""
    tensors = read_header(file).tensors.items()
    return sum(int(np.prod(each.shape)) for name, each in tensors if name.startswith(LAYERS) and len(each.shape) > 1)


def opened(file: Path, tokens: int) -> Decoder:
    """The decoder of a file, all in memory."""
    header = read_header(file)
    return Decoder.open(header, architecture_of(header), Budget("DRAM", MUCH), tokens)


def prompt_of(decoder: Decoder, tokens: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(0).integers(0, decoder.words, tokens).tolist()


def computed(decoder: Decoder, prompt: list[int]) -> tuple[float, float]:
    """Seconds of a prompt, and of all cores."""
    decoder.cut(0)
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    for first in range(0, len(prompt), PASS):
        decoder.prefill(prompt[first : first + PASS])
    return time.perf_counter() - begun_s, time.process_time() - cpu_s


def race(file: Path, name: str, tokens: int, options: argparse.Namespace) -> Iterator[dict]:
    """A row for each way and turn."""
    with ExitStack() as stack:
        decoder = stack.enter_context(opened(file, tokens))
        prompt = prompt_of(decoder, tokens)
        rivals = {}
        for load in options.loads if not llama_cpp.missing() else ():
            rivals[load] = Child(f"llama.cpp {load}", llama_cpp.command(file, tokens + ROOM, load))
            stack.callback(rivals[load].close)
            rivals[load].answer()
        for turn in range(options.turns + 1):
            found = {OURS: computed(decoder, prompt)}
            for load, child in rivals.items():
                reply = child.ask(tokens=prompt)
                found[f"llama.cpp {load}"] = reply["seconds"], reply["cpu_seconds"]
            for way, (seconds, cpu_s) in found.items() if turn else ():  # the first turn warms up
                row = {"model": name, "tokens": tokens, "way": way, "turn": turn}
                yield row | {"tokens_s": tokens / seconds, "cpu_ms_token": 1e3 * cpu_s / tokens}


def parts(file: Path, name: str, tokens: int, turns: int) -> Iterator[dict]:
    """A row for each function that computes a part of a prompt: its seconds of all cores, in the best turn."""
    seconds: dict[str, float] = collections.Counter()

    class Timed(Program):
        """Runs and times each stage by itself."""

        def __init__(self, stages):
            super().__init__(stages)
            self._each = [Program([stage]) for stage in self.stages]

        def run(self) -> None:
            for program in self._each:
                begun_s = time.process_time()
                program.run()
                seconds[program.tasks[-1].function.__name__] += time.process_time() - begun_s

    usual, best = decoders.Program, {"all": float("inf")}
    try:
        decoders.Program = Timed
        with opened(file, tokens) as decoder:
            prompt = prompt_of(decoder, tokens)
            for _ in range(turns + 1):
                seconds.clear()
                _, every = computed(decoder, prompt)
                if every < best["all"]:
                    best = {"all": every, "between them": every - sum(seconds.values())} | seconds
    finally:
        decoders.Program = usual
    for part, spent in sorted(best.items(), key=lambda item: -item[1]):
        yield {"model": name, "tokens": tokens, "part": part, "seconds": spent, "share": spent / best["all"]}


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The best turn of each way, and its speed over llama.cpp's best."""
    keys = ["model", "tokens", "way"]
    best = rows.groupby(keys, sort=False).agg(tokens_s=("tokens_s", "max"), cpu_ms_token=("cpu_ms_token", "min"))
    best = best.reset_index()
    rivals = best[best["way"] != OURS].groupby(keys[:2])["tokens_s"].max().rename("rival")
    best = best.join(rivals, on=keys[:2])
    best["over_its_best"] = (best["tokens_s"] / best.pop("rival")).where(best["way"] == OURS)
    return best


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or GGUF files")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=[*llama_cpp.LOADS])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", action="store_true", help="the parts of the toolkit's time, without llama.cpp")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    allowed, rows = limits(options.turns), []
    for way, rate in allowed.items():
        print(f"{way:16} {rate / 1e9:7.0f} G multiplications/s")
    for name in options.models:
        file = Path(tk.models.gguf_file(name))
        for tokens in options.tokens:
            least = {way: block_weights(file) * tokens / rate for way, rate in allowed.items()}
            print(f"{name}, {tokens} tokens: " + ", ".join(f"{way} {least_s:.2f} s" for way, least_s in least.items()))
            found = [
                *(parts(file, name, tokens, options.turns) if options.parts else race(file, name, tokens, options))
            ]
            rows += found
            shown = pd.DataFrame(found)
            print((shown if options.parts else summary(shown)).to_string(index=False, float_format="%.3f"), flush=True)
    print(f"{options.threads} threads; load a core {reports.load_per_core():.1f}; {llama_cpp.which()}")
    reports.save("prompts", {"settings": vars(options), "limits": allowed, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
