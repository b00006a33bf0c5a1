"""The price of keys and values in 8 bits, by how long the text is: perplexity with `q8_0` over that with 16 bits.

    python benchmarks/kv_types.py qwen2.5-coder-0.5b [--texts 4] [--tokens 8192] [--corpora wiki-slice python-sources]

Texts follow one another in a corpus's text for evaluation. Each is computed with both types of cache, on the same
kernels. A row holds the tokens of a range of places in their texts: `ratio` is the perplexity over that with 16 bits,
`ratio_low` and `ratio_high` one standard error of the paired differences, by text. Other work does no harm.
Writes results/benchmarks/kv_types.json.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import reports
from scipy.special import log_softmax

import toolkit as tk
from toolkit.quality.corpora import load_tokens
from toolkit.quality.likelihood import paired_difference

TYPES = ("bf16", "q8_0")
PLACES = (0, 512, 2048, 8192, 32768)  # ends of the ranges
AT_ONCE = 256  # tokens whose logits are in memory


def surprise(opened, tokens: list[int]) -> np.ndarray:
    """The negative logarithm of the probability of each token after the first, nats."""
    opened.decoder.cut(0)
    found = []
    for first in range(0, len(tokens) - 1, AT_ONCE):
        some = tokens[first : first + AT_ONCE + 1]
        logits = opened.decoder.scores(some[:-1])
        found.append(-log_softmax(logits, axis=1)[np.arange(len(logits)), some[1:]])
    return np.concatenate(found)


def texts_of(corpus: str, tokenizer, count: int, tokens: int) -> list[list[int]]:
    """The first texts of a corpus, of so many tokens each; fewer if it is shorter."""
    ids = load_tokens(corpus, tokenizer, "evaluation").tolist()
    return [ids[first : first + tokens] for first in range(0, min(len(ids), count * tokens) - tokens + 1, tokens)]


def rows(corpus: str, losses: dict[str, list[np.ndarray]]) -> Iterator[dict[str, object]]:
    """A row for each range of places that the texts reach."""
    for first, end in pairwise(PLACES):
        parts = [[each[first:end].mean() for each in losses[kind]] for kind in TYPES if len(losses[kind][0]) > first]
        if parts:
            mean, error = paired_difference(parts[1], parts[0])
            row = {
                "corpus": corpus,
                "places": f"{first}-{min(end, len(losses[TYPES[0]][0]) + 1)}",
                "texts": len(parts[0]),
            }
            yield row | {"perplexity": np.exp(np.mean(parts[0]))} | tk.studies.ratio_range(mean, error, "ratio")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name that has a GGUF file, or a GGUF file")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a text")
    parser.add_argument("--corpora", nargs="+", default=["wiki-slice", "python-sources"])
    options = parser.parse_args()
    file, table = Path(tk.models.gguf_file(options.model)), []
    for corpus in options.corpora:
        losses = dict[str, list[np.ndarray]]()
        for kind in TYPES:
            with tk.open(file, context=options.tokens, kv_type=kind) as opened:
                texts = texts_of(corpus, opened.tokenizer, options.texts, options.tokens)
                losses[kind] = [surprise(opened, text) for text in texts]
        table += rows(corpus, losses)
    print(pd.DataFrame(table).to_string(index=False, float_format="{:.4f}".format))
    reports.save("kv_types", {"settings": vars(options), "rows": table})


if __name__ == "__main__":
    main()
