"""Tokens a second of a full model from disk with a packed draft, beside the same model without one, at one limit.

    python benchmarks/draft.py DENSE SPQR --dram 2GB [--drafted 4 8 16 0] [--tokens 48] [--turns 1]

DENSE and SPQR are folders that `pack` wrote of one model: any that `run FOLDER --draft FOLDER2` takes. For each of six
prompts of text and code every way makes a greedy text; ways take turns. 0 drafts while a further token is worth its
time. Tokens a second leave the prompt's pass out, which `first_s` is. `limit` is what the bytes allow: the stored bytes
that a pass reads over the disk's rate, for the tokens that a pass gave. `same` says at how many places the text is that
without a draft; `close` counts tokens that are within rounding of another one. Goal: 3 times the speed without a draft.
Writes results/benchmarks/draft.json.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import pandas as pd
import reports
import torch

from toolkit.memory_limits import bytes_of
from toolkit.offload.model import OffloadedModel
from toolkit.papers.flash.generation import Clock

PROMPTS = (
    "def quicksort(xs):",
    "import numpy as np\n\n\ndef softmax(x):",
    "class Stack:\n    def __init__(self):",
    "The library of Alexandria was",
    "In 1969, the first human being",
    "The theory of relativity says that",
)
GOAL = 3.0


def generated(model: OffloadedModel, prompt: torch.Tensor, tokens: int, **draft: object) -> tuple[dict, torch.Tensor]:
    """A greedy text, and what it took."""
    clock, begun_s = Clock(model), model.recorder.now_s()
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(prompt, streamer=clock, repetition_penalty=1.0, **settings, **draft)
    first, *others = clock.instants[1:]
    reads = [span for span in model.timeline.spans if span.stage == "read" and span.start_s >= begun_s]
    row = {
        "first_s": first - clock.instants[0],
        "tokens_s": len(others) / (others[-1] - first),
        "gb_a_token": sum(span.nbytes for span in reads) / 1e9 / tokens,
        "read_gb_s": sum(span.nbytes for span in reads) / max(1e-9, sum(span.seconds for span in reads)) / 1e9,
    }
    if draft:
        counts = model.speculation
        row |= {name: getattr(counts, name) for name in ("tokens_a_pass", "acceptance", "close")}
        row |= {"draft_ms": 1e3 * counts.draft_s / max(1, counts.drafted)}
        row |= {"check_ms": 1e3 * counts.check_s / counts.passes}
    return row, text


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """A row a text: its way, prompt and turn, and what it took."""
    rows, plain, limit = [], {}, {"dram_bytes": bytes_of("--dram", options.dram), "verify": False}
    prompts = PROMPTS[: options.prompts]
    with OffloadedModel.open(options.folder, options.method, **limit) as model:
        ids = [encoded(model, prompt, number) for number, prompt in enumerate(prompts)]
        generated(model, ids[0], 3)
        for number, prompt in enumerate(ids):
            row, plain[number] = generated(model, prompt, options.tokens)
            rows.append(row | {"way": "without", "prompt": number, "turn": 0, "same": 1.0})
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(OffloadedModel.open(options.draft, options.draft_method, **limit))
        model = stack.enter_context(OffloadedModel.open(options.folder, options.method, beside=draft, verify=False))
        print(f"{model.budgets['dram'].used_bytes / 1e6:.0f} MB held; {model.mode} reads")
        generated(model, ids[0], 6, draft=draft)
        for turn in range(options.turns):
            for number, prompt in enumerate(ids):
                for count in options.drafted:
                    row, text = generated(model, prompt, options.tokens, draft=draft, draft_tokens=count or None)
                    same = float((text == plain[number]).double()[0, prompt.shape[1] :].mean())
                    rows.append(
                        row | {"way": f"draft {count or 'adaptive'}", "prompt": number, "turn": turn, "same": same}
                    )
                    print(".", end="", flush=True)
    return pd.DataFrame(rows)


def encoded(model: OffloadedModel, prompt: str, number: int) -> torch.Tensor:
    """The prompt's tokens; without a tokenizer any."""
    if not (model.store.model_folder / "tokenizer.json").is_file():
        return torch.arange(1, 9)[None] + 8 * number  # 0 pads
    return model.tokenizer(prompt, return_tensors="pt")["input_ids"]


def main() -> int:
    """Measure, print and save; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--dram", help="limit of both together (default: what is free)")
    parser.add_argument("--method", help="of the full model (default: decoded)")
    parser.add_argument("--draft-method", default="spqr_packed")
    parser.add_argument("--drafted", type=int, nargs="+", default=[4, 8, 16, 0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    texts = measure(options)
    means = texts.groupby("way", sort=False).mean(numeric_only=True).drop(columns=["prompt", "turn"])
    means["limit"] = means["read_gb_s"] / means["gb_a_token"].where(means["gb_a_token"] > 0)
    means["speedup"] = means["tokens_s"] / means.loc["without", "tokens_s"]
    print("\n" + means.round(2).to_string())
    settings = {"dram": options.dram, "tokens": options.tokens, "load_per_core": reports.load_per_core()}
    reports.save("draft", {"settings": settings, "rows": texts.to_dict("records")})
    best = means["speedup"].max()
    print(f"with a draft {best:.2f} times as fast (goal {GOAL:.0f} or more)")
    return int(best < GOAL)


if __name__ == "__main__":
    sys.exit(main())
