"""Tokens a second of a whole model in DRAM, what a token's time goes to, and llama.cpp beside it.

    python benchmarks/decode_step.py [--folder DIR] [--beside 1] [--tokens 24] [--turns 3] [--ways "spqr_packed" ...]

The model is a twin of TinyLlama-1.1B (22 layers, hidden 2048, FFN 5632) with random bfloat16 weights, half of them
zero, and a head of 49,152 tokens; SpQR's matrices are random codes with 1 % of outliers. Each turn generates greedily
after a short prompt, one way after the other; all layers stay in memory. llama.cpp loads its file into memory, in the
order that its products like best. `products` are the spans of the decoder's linears; packed ways compute a token by one
program, whose span has norms, attention and the head in it, so that the head is taken off. `head` is the output head
alone, measured by itself; `rest of the step` is what else the model's forward pass takes; `generate` is what
transformers does between two passes. The limit is the bytes of all weights that a token reads over the rate of reads
(`torch.sum`).
`--beside` starts as many busy processes first. The models are kept in `--folder`, 13 GB. Goals: 8 ms or less beside the
weights' products, Endor's packed products 1.25 times llama.cpp's F16, and SpQR's 1.2 times its Q3_K. Writes
results/benchmarks/decode_step.json.
"""

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import reports
import torch

from toolkit import paths
from toolkit.errors import UserError
from toolkit.formats import QUANTISED, Packed
from toolkit.formats.scaled import Scaled
from toolkit.formats.twins import random_spqr
from toolkit.machines.memory import read_gb_s
from toolkit.measure.contestant import Text
from toolkit.measure.llama_cpp import LlamaCpp, missing
from toolkit.models.twins import twin_model
from toolkit.offload.methods import LLAMA_CPP
from toolkit.offload.model import OffloadedModel
from toolkit.storage.packing import Linears, pack_model

LAYERS, VOCABULARY = 22, 49_152
PROMPT = torch.tensor([[7, 100, 55, 9, 31, 500, 2, 64]])
WAYS = {
    "dense": ("store", "dense"),
    "dense_packed": ("store", "dense_packed"),
    "endor_packed": ("store", "endor_packed"),
    "int8 endor_packed": ("int8", "endor_packed"),
    "int8 dense_packed": ("int8", "dense_packed"),
    "spqr_packed": ("spqr", "spqr_packed"),
    "spqr_ptcsr_packed": ("spqr", "spqr_ptcsr_packed"),
}
RIVALS = ("llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_0", "llama.cpp Q4_K", "llama.cpp Q3_K")
GOAL_MS = 8.0
GOALS = {("endor_packed", "llama.cpp F16"): 1.25, ("spqr_packed", "llama.cpp Q3_K"): 1.2}
READ_BYTES = 1 << 29


class Clock:
    """A streamer that notes when each token comes, and a forward pass that notes when it began and ended."""

    def __init__(self, forward, now_s):
        self.instants, self.passes, self.forward, self.now_s = [], [], forward, now_s

    def put(self, _) -> None:
        """A token, or at first the prompt."""
        self.instants.append(self.now_s())

    def end(self) -> None:
        """Nothing more comes."""

    def timed(self):
        """The forward pass."""

        @functools.wraps(self.forward)
        def timed(*arguments, **named):
            begun = self.now_s()
            found = self.forward(*arguments, **named)
            self.passes.append((begun, self.now_s()))
            return found

        return timed


def twin() -> torch.nn.Module:
    """The model in memory."""
    return twin_model("tinyllama-1.1b", LAYERS, torch.bfloat16, vocabulary=VOCABULARY)


def prepare(folder: Path) -> None:
    """Write the packed models that are not there yet."""
    seeds = itertools.count()
    packs = {
        "store": ("dense", "endor"),
        "int8": {"endor": partial(Scaled.encode, "endor"), "dense": partial(Scaled.encode, "dense")},
        "spqr": {name: partial(random_form, form, seeds) for name, form in QUANTISED.items()},
    }
    for name, variants in packs.items():
        if not (folder / name).exists():
            pack_model(twin(), folder / name, Linears(variants), "twin")
    for name in RIVALS if not missing() else ():
        if not (folder / f"{LLAMA_CPP[name]}.gguf").exists():
            LlamaCpp(name, twin().float(), folder, load="read").close()  # bfloat16 would round each layer


def random_form(form: type, seeds: Iterator[int], weight: torch.Tensor) -> Packed:
    """Another random matrix for each weight, of its shape and type."""
    return random_spqr(form, tuple(weight.shape), weight.dtype, seed=next(seeds))


def measure(ours: OffloadedModel, tokens: int) -> tuple[dict[str, float], list[int]]:
    """One turn: milliseconds a token and what they go to, the bytes of products, and the tokens."""
    clock = Clock(ours.model.forward, ours.recorder.now_s)
    ours.model.forward = clock.timed()
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    found = ours.generate(PROMPT, streamer=clock, **settings)[0, PROMPT.shape[1] :].tolist()
    ours.model.forward = clock.forward
    # the prompt is first, then a token for each pass; the first single token may compile something
    gaps = [after - before for before, after in zip(clock.instants[2:], clock.instants[3:], strict=False)]
    passes = [products_of(ours, *ends) for ends in clock.passes[2:]]
    row = {"token": statistics.median(gaps), "products": statistics.median(seconds for seconds, _ in passes)}
    row["step"] = statistics.median(ended - begun for begun, ended in clock.passes[2:])
    row = {name: 1e3 * seconds for name, seconds in row.items()}
    return row | {"bytes": passes[-1][1]}, found


def products_of(ours: OffloadedModel, begun_s: float, ended_s: float) -> tuple[float, int]:
    """Seconds and bytes of the products in a pass."""
    stages = ("compute", "decode")
    spans = [span for span in ours.timeline.spans if span.stage in stages and begun_s <= span.start_s < ended_s]
    return sum(span.seconds for span in spans), sum(span.nbytes for span in spans)


def head_ms(model: torch.nn.Module, packed: bool, repetitions: int = 9) -> float:
    """Milliseconds of the output head, as the way at hand multiplies it."""
    weight, x = model.lm_head.weight, torch.randn(model.config.hidden_size)
    if packed:
        from toolkit.kernels import dense

        run = partial(dense.matvec, weight, x)
    else:
        run = partial(torch.nn.functional.linear, x.to(weight.dtype)[None, None], weight)
    found = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(found)


@contextlib.contextmanager
def busy(count: int):
    """So many processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Prepare, time, print and save; 1 if a goal is missed."""
    options = _options()
    prepare(options.folder)
    if options.prepare:
        return 0
    names = options.ways or [*WAYS, *RIVALS]
    read = max(read_gb_s(READ_BYTES, 7))
    with contextlib.ExitStack() as stack:
        ours = {}
        for name in names:
            if name in WAYS:
                place, method = WAYS[name]
                ours[name] = stack.enter_context(OffloadedModel.open(options.folder / place, method, verify=False))
        rivals = opened_rivals(stack, [name for name in names if name in RIVALS], options.folder, options.tokens)
        rows, tokens = {name: [] for name in ours}, {}
        rival_ms = {name: [] for name in rivals}
        for each in ours.values():
            measure(each, 6)
        with busy(options.beside):
            for _ in range(options.turns):
                for name, each in ours.items():
                    row, tokens[name] = measure(each, options.tokens)
                    rows[name].append(row)
                for name, rival in rivals.items():
                    rival_ms[name].append(1e3 * rival.generated(PROMPT[0].tolist(), options.tokens))
            heads = {name: head_ms(each.model, name != "dense") for name, each in ours.items()}
        head_bytes = {name: each.model.lm_head.weight.nbytes for name, each in ours.items()}
    table = [
        _row(
            name,
            found,
            heads[name],
            head_bytes[name],
            read,
            tokens[name] == tokens["dense"] if "dense" in tokens else None,
        )
        for name, found in rows.items()
    ]
    head_bytes = next(iter(head_bytes.values()), 0)
    table += [_rival_row(name, found, rivals[name].nbytes + head_bytes, read) for name, found in rival_ms.items()]
    settings = {"turns": options.turns, "tokens": options.tokens, "beside": options.beside, "read_gb_s": read}
    settings |= {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    settings |= {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    print(_markdown(table, settings))
    reports.save("decode_step", {"settings": settings, "rows": table})
    return _judged(table)


def opened_rivals(stack: contextlib.ExitStack, names: list[str], folder: Path, tokens: int) -> Mapping[str, LlamaCpp]:
    """llama.cpp with each type and room for so many tokens, after its first ones. Nothing where it cannot run."""
    if names and (reason := missing()):
        print(f"llama.cpp takes no part: {reason}")
        return {}
    closing = contextlib.closing
    text = Text([PROMPT, *[PROMPT[:, :1]] * tokens])
    found = {name: stack.enter_context(closing(LlamaCpp(name, None, folder, text, load="read"))) for name in names}
    for rival in found.values():
        rival.generated(PROMPT[0].tolist(), 2)
    return found


def _rival_row(name: str, found_ms: list[float], moved: int, read: float) -> dict:
    token = statistics.median(found_ms)
    return {
        "way": name,
        "token_ms": token,
        "tokens_per_s": 1e3 / token,
        "gb": moved / 1e9,
        "limit_ms": moved / read / 1e6,
    }


def _row(name: str, found: list[dict], head: float, head_bytes: int, read: float, same: bool | None) -> dict:
    mean = {part: statistics.median(row[part] for row in found) for part in found[0]}
    products = mean["products"] if name == "dense" else mean["products"] - head
    moved = mean["bytes"] + head_bytes
    return {
        "way": name,
        "token_ms": mean["token"],
        "tokens_per_s": 1e3 / mean["token"],
        "products_ms": products,
        "head_ms": head,
        "rest_of_step_ms": mean["step"] - products - head,
        "generate_ms": mean["token"] - mean["step"],
        "gb": moved / 1e9,
        "limit_ms": moved / read / 1e6,
        "tokens_as_dense": same,
    }


def _judged(table: list[dict]) -> int:
    found = {row["way"]: row for row in table}
    missed = 0
    if packed := found.get("endor_packed"):
        beside = packed["rest_of_step_ms"] + packed["generate_ms"]
        print(f"\nbeside products and head: {beside:.1f} ms (goal {GOAL_MS:.0f} or less)")
        missed += beside > GOAL_MS
    for (ours, rival), goal in GOALS.items():
        if {ours, rival} <= found.keys():
            ratio = found[rival]["token_ms"] / found[ours]["token_ms"]
            print(f"{ours} against {rival}: {ratio:.2f} (goal {goal} or more)")
            missed += ratio < goal
    return int(missed > 0)


def _markdown(table: list[dict], settings: dict) -> str:
    columns = {
        "tokens/s": ("tokens_per_s", ".1f"),
        "ms a token": ("token_ms", ".1f"),
        "products": ("products_ms", ".1f"),
        "head": ("head_ms", ".1f"),
        "rest of the step": ("rest_of_step_ms", ".1f"),
        "generate": ("generate_ms", ".1f"),
        "GB a token": ("gb", ".2f"),
        "limit, ms": ("limit_ms", ".1f"),
        "tokens as dense": ("tokens_as_dense", ""),
    }
    lines = [", ".join(f"{name} {value}" for name, value in settings.items()), ""]
    lines += [f"| way | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row in table:
        cells = (format(row[key], kind) if row.get(key) is not None else "–" for key, kind in columns.values())
        lines.append(f"| {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=paths.cache_dir() / "decode_step")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beside", type=int, default=0, help="busy processes")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, *RIVALS], help="default: all")
    parser.add_argument("--prepare", action="store_true", help="only write the models")
    options = parser.parse_args()
    if options.tokens < 6:
        raise UserError(f"--tokens {options.tokens}: expected 6 or more")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
