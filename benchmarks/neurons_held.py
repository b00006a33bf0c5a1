"""A folder of neurons computed with the predicted neurons, and with all that memory holds: quality, texts and speed.

    python benchmarks/neurons_held.py BY-NEURON --limits 190MB 250MB 1GB [--prompts 20] [--tokens 40] [--turns 3]

BY-NEURON is what `pack --method neurons` wrote. At each limit and in both ways the perplexity of some windows of
Wikipedia is measured twice, and each prompt, the beginning of a later window, gets a greedy text twice. `other_texts`
counts texts that differ from those at the last limit, `other_again` those that differ the second time. Then ways and
limits take turns at the first prompt; tokens a second leave the pass of the prompt out, and are medians over the turns.
Perplexities and texts do not depend on what else the machine does. Writes results/benchmarks/neurons_held.json.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import reports
import torch
from torch import Tensor

from toolkit.memory_limits import bytes_of
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import NEURONS, Demand
from toolkit.papers.flash.generation import Clock
from toolkit.quality import load_tokens, perplexity

CORPUS = "wiki-slice"


def text_of(model: OffloadedModel, prompt: Tensor, tokens: int, **settings: object) -> Tensor:
    """A greedy text of so many tokens."""
    settings |= {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(prompt, **settings)


def quality(options: argparse.Namespace, way: str, limit: str) -> tuple[dict, list[Tensor]]:
    """Perplexities and changed texts of a freshly opened model, and its first texts."""
    settings = {"demand": Demand(neurons=way), "dram_bytes": bytes_of("--limits", limit), "verify": False}
    with OffloadedModel.open(options.folder, **settings) as model:
        tokens = evaluation(model)
        length, windows = options.length, options.windows
        prompts = tokens[windows * length :].unfold(0, 8, length)[: options.prompts]
        first, again = ([text_of(model, prompt[None], options.tokens) for prompt in prompts] for _ in range(2))
        values = [float(perplexity(model.model, tokens, length, windows)) for _ in range(2)]
        kept = [ffn.store.residency for ffn in model.strategy.ffns]
        rows, units = sum(each.rows for each in kept), sum(each.units for each in kept)
    row = {"neurons": way, "limit": limit, "room_for": rows / units}
    row |= {"perplexity": values[0], "perplexity_again": values[1]}
    return row | {"other_again": differing(first, again)}, first


def evaluation(model: OffloadedModel) -> Tensor:
    """The text that is evaluated; any tokens without a tokenizer."""
    if not (model.store.model_folder / "tokenizer.json").is_file():
        size = model.model.config.get_text_config().vocab_size
        return torch.randint(1, size, (4096,), generator=torch.Generator().manual_seed(0))
    return load_tokens(CORPUS, model.tokenizer, "evaluation")


def differing(texts: list[Tensor], others: list[Tensor]) -> int:
    """How many texts are not the same."""
    return sum(not torch.equal(*pair) for pair in zip(texts, others, strict=True))


def speeds(options: argparse.Namespace) -> pd.DataFrame:
    """A row for each turn of each way and limit."""
    rows = []
    for turn in range(options.turns):
        for limit in options.limits:
            for way in NEURONS:
                settings = {"demand": Demand(neurons=way), "dram_bytes": bytes_of("--limits", limit), "verify": False}
                with OffloadedModel.open(options.folder, **settings) as model:
                    prompt = evaluation(model)[None, :8]
                    text_of(model, prompt, 3)
                    clock = Clock(model)
                    text_of(model, prompt, options.tokens, streamer=clock)
                first, *others = clock.instants[1:]
                rate = len(others) / (others[-1] - first)
                rows.append({"neurons": way, "limit": limit, "turn": turn, "tokens_s": rate})
    return pd.DataFrame(rows)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limits", nargs="+", default=["190MB", "250MB", "1GB"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    rows, texts = [], {}
    for way in NEURONS:
        for limit in options.limits:
            row, texts[way, limit] = quality(options, way, limit)
            rows.append(row)
        for row in rows[-len(options.limits) :]:
            row["other_texts"] = differing(texts[way, row["limit"]], texts[way, options.limits[-1]])
    table = pd.DataFrame(rows).set_index(["neurons", "limit"])
    if options.turns:
        turns = speeds(options)
        table["tokens_s"] = turns.groupby(["neurons", "limit"])["tokens_s"].median()
        table["tokens_s_low"] = turns.groupby(["neurons", "limit"])["tokens_s"].min()
        table["tokens_s_high"] = turns.groupby(["neurons", "limit"])["tokens_s"].max()
    print(table.round(3).to_string())
    settings = {name: getattr(options, name) for name in ("prompts", "tokens", "windows", "length", "turns")}
    settings |= {"load_per_core": reports.load_per_core()}
    reports.save("neurons_held", {"settings": settings, "rows": table.reset_index().to_dict("records")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
