"""The memory and the time of a process that runs a model, part by part, beside weights.

    python benchmarks/process_parts.py PLACE [--dram 350MB] [--prompt-tokens 480] [--runs 2] [--torch]

PLACE is a folder that `pack` wrote, or a GGUF file. The parts are made one after the other in a fresh process, as `run`
makes them: a file of `toolkit.offload.decoder` without torch, or with it under `--torch`. From `opening` on, the
weights and buffers of the budget are left out. `peak` is the largest amount while the part was made, looked at 500
times a second. The last of the runs counts: the first one compiles kernels.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import reports

from toolkit.memory_limits import bytes_of
from toolkit.models.gguf_header import read_header
from toolkit.offload.decoder.architecture import architecture_of

BEGIN = """if True:
    import contextlib, json, os, sys, time
    from toolkit import memory_limits

    parts, place, dram_bytes, tokens = [], sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory_limits.Peak.PERIOD_S = 0.002
    memory_limits.return_large_blocks()

    def part(name, make, held=lambda: 0):
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        with memory_limits.Peak() as peak:
            make()
            peak.look()
        memory_limits.trim()
        left = held()
        parts.append(
            {
                "part": name,
                "anonymous_mb": (memory_limits.anonymous_bytes() - left) / 1e6,
                "peak_mb": (peak.nbytes - left) / 1e6,
                "cpu_s": time.process_time() - cpu_s,
                "wall_s": time.perf_counter() - begun_s,
            }
        )

    def imported(*names):
        return lambda: [__import__(name) for name in names]

    kept = []
    part("Python", lambda: None)
    part("NumPy", imported("numpy"))
"""
WITH_TORCH = (
    BEGIN
    + """
    part("torch", imported("torch"))
    from toolkit import hub

    lean = hub.lean()
    part("Numba, transformers", lean.__enter__)
    part("the toolkit", imported("toolkit.offload.model", "toolkit.interchange.reading", "toolkit.commands.text"))
    lean.__exit__(None, None, None)
    from toolkit.errors import UserError
    from toolkit.interchange.reading import load_tokenizer
    from toolkit.offload.model import OffloadedModel

    def tokenizer():
        with contextlib.suppress(UserError):  # random twins have none
            kept.append(load_tokenizer(place if os.path.isfile(place) else os.path.join(place, "model")))

    def opening():
        kept.append(OffloadedModel.open(place, dram_bytes=dram_bytes, verify=False))

    def used():
        return kept[-1].budgets["dram"].used_bytes

    part("tokenizer", tokenizer)
    part("opening", opening, used)
    import torch

    words = kept[-1].model.config.get_text_config().vocab_size

    def text(given, new):
        ids = torch.randint(5, min(words, 1000), (1, given), generator=torch.Generator().manual_seed(0))
        kinds = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return lambda: kept[-1].generate(ids, attention_mask=torch.ones_like(ids), **kinds)

    part("a first token", text(5, 1), used)
    part("four tokens", text(5, 4), used)
    part(f"a prompt of {tokens} tokens", text(tokens, 4), used)
    print(json.dumps(parts))
"""
)
WITHOUT_TORCH = (
    BEGIN
    + """
    from pathlib import Path

    from toolkit import hub

    with hub.standing_in({"scipy": None}):
        part("Numba", imported("numba"))
    part("the toolkit", imported("toolkit.offload.decoder.decoder", "toolkit.commands.text"))
    from toolkit.models.gguf_header import read_header
    from toolkit.models.gguf_tokenizer import read_kept_tokenizer
    from toolkit.offload.budget import Budget
    from toolkit.offload.decoder.architecture import architecture_of
    from toolkit.offload.decoder.decoder import Decoder

    header = read_header(Path(place))
    sizes, budget = architecture_of(header), Budget("DRAM", dram_bytes)
    ids = [5 + at * 37 % min(sizes.words - 5, 1000) for at in range(tokens)]

    def used():
        return budget.used_bytes

    def text(given, new):
        def run():
            kept[-1].cut(0)
            token = int(kept[-1].prefill(ids[:given]).argmax())
            for _ in range(new - 1):
                token = int(kept[-1].step(token).argmax())
        return run

    part("tokenizer", lambda: kept.append(read_kept_tokenizer(header)))
    part("opening", lambda: kept.append(Decoder.open(header, sizes, budget, tokens + 4)), used)
    part("a first token", text(5, 1), used)
    part("four tokens", text(5, 4), used)
    part(f"a prompt of {tokens} tokens", text(tokens, 4), used)
    print(json.dumps(parts))
"""
)


def main() -> None:
    """Measure, print a table and write it to results/benchmarks/."""
    options = _options()
    child = WITH_TORCH if options.torch or not _is_plain(options.place) else WITHOUT_TORCH
    command = [sys.executable, "-P", "-c", child, options.place, options.dram, options.prompt_tokens]
    for _ in range(options.runs):
        load = reports.load_per_core()
        done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    table = pd.DataFrame(json.loads(done.stdout.splitlines()[-1]))
    table.insert(1, "added_mb", table["anonymous_mb"].diff().fillna(table["anonymous_mb"]))
    print(table.to_string(index=False, float_format="{:.2f}".format))
    print(f"load a core when it began: {load:.1f}")
    reports.save("process_parts", {"load_per_core": load, "results": table.to_dict("records")})


def _is_plain(place: Path) -> bool:
    return place.is_file() and architecture_of(read_header(place)) is not None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    parser.add_argument("--dram", type=lambda text: bytes_of("--dram", text), default=350_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=480)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="the way with torch, whatever the file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
