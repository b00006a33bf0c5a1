"""The next token's probabilities of small GGUF files: the toolkit's beside those of llama.cpp on the same files.

    python benchmarks/gguf_logits.py [--cases "llama, yarn" gemma3]
    python benchmarks/gguf_logits.py --texts smollm2-135m qwen2.5-coder-1.5b [--tokens 60]
    python benchmarks/gguf_logits.py --precision smollm2-135m qwen2.5-coder-0.5b

The files are those of `gguf_files.py`, with random weights in F32. After 40 tokens the largest difference of a natural
logarithm of a probability is a row's `difference`; llama.cpp rounds what it multiplies and caches to F16, which
explains some hundredths. `unscaled` is the difference that the same model has without its scaling of rotary
embeddings or of queries: what forgetting it would cost. Rows with `ignored` say what llama.cpp leaves out by design.
Status 0 if all other rows are below 0.05, 1 if not, 77 without llama.cpp. It is no timing: other work does no harm.
Writes results/benchmarks/gguf_logits.json.

With `--texts`, real files run as they are: each token of llama.cpp's greedy text is compared with the likeliest one of
`OffloadedModel` after the same tokens. `equal` is the share of equal ones, `parts_at` the token at which the toolkit's
own greedy text parts from llama.cpp's. Where tokens differ, `apart` is the largest distance of the toolkit's logits of
the two, in standard deviations of all logits: both round vectors to 8 bits, and the likeliest tokens tie within that.
Status 1 if one is beyond 0.2. Writes results/benchmarks/gguf_texts.json.

With `--precision`, three ways of computing with a real file are compared with F32: its weights dequantised and all
arithmetic in float32. `kl` is the mean Kullback-Leibler divergence from F32's next-token distribution, in nats, after
8, 16, ... 96 tokens of a text; `largest` is the largest difference of a logit from F32's among the 100 likeliest
tokens, both sets less their mean; `equal` is the share of equal likeliest tokens. Rows with bfloat16 are what models
from a billion weights on get: their cache for the decoder, all activations for torch. Writes
results/benchmarks/gguf_precision.json.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import reports
import torch
import transformers
from gguf_files import CASES, THETA, WORDS, Case, write
from torch import nn

import toolkit
from toolkit import downloads
from toolkit.errors import UserError
from toolkit.hub import NO_CODE
from toolkit.measure import llama_cpp
from toolkit.measure.contestant import Text
from toolkit.models import gguf_header
from toolkit.models.cached_pass import CACHE, cached_pass
from toolkit.models.gguf import read
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_kept_tokenizer
from toolkit.offload.model import OffloadedModel
from toolkit.progress import progress

GOAL = 0.05
SKIPPED = 77
TIED = 0.2  # standard deviations of the logits
LENGTHS = range(8, 97, 8)  # tokens
TEXT = (
    "The library of Alexandria was one of the largest of the ancient world. It held rolls of papyrus on mathematics, "
    "astronomy, medicine and poetry, and scholars came from far away to read them. def quicksort(xs): return xs if "
    "len(xs) < 2 else quicksort([x for x in xs[1:] if x < xs[0]]) + [xs[0]] + quicksort([x for x in xs if x > xs[0]])"
    " # Once upon a time there was a small house at the edge of a wood, and nobody knew who had built it."
)
PROMPTS = ("def quicksort(xs):", "The library of Alexandria was", "Once upon a time there")
TOKENS = [number * 37 % WORDS for number in range(40)]
PLAIN = {"rope_type": "default", "rope_theta": THETA}


@torch.no_grad()
def log_probabilities(model: nn.Module) -> torch.Tensor:
    """Log-probabilities of the token after `TOKENS`, fp32 [vocabulary]."""
    return model(torch.tensor([TOKENS])).logits[0, -1].float().log_softmax(0)


def unscaled(case: Case) -> nn.Module | None:
    """The model with the same weights and without the scaling of its case; None for a case without one."""
    if case.fields.get("query_pre_attn_scalar") not in (None, case.fields.get("head_dim")):
        return replace(case, fields=dict(case.fields) | {"query_pre_attn_scalar": case.fields["head_dim"]}).model()
    rope = case.fields.get("rope_parameters", {})
    if rope.get("full_attention", rope).get("rope_type", "default") == "default":
        return None
    plain = PLAIN if "full_attention" not in rope else rope | {"full_attention": PLAIN | {"rope_theta": 1e6}}
    return replace(case, fields=dict(case.fields) | {"rope_parameters": plain}).model()


def opened(file: Path) -> nn.Module:
    """The model of a file, without the copy that `load_model` keeps."""
    found, _ = read(read_header(file), torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(found.config, dtype=torch.float32, **NO_CODE).eval()
    model.load_state_dict(found.state_dict(), assign=True)
    return model


def row(case: Case, folder: Path) -> dict[str, object]:
    """The result of a case."""
    file = folder / "model.gguf"
    write(case.model(), case, file)
    model = opened(file)
    ours = log_probabilities(model)
    found = {"architecture": case.architecture, "model": case.model_type, "ignored": case.ignored}
    try:
        rival = llama_cpp.LlamaCpp("llama.cpp", model, folder, load="read", gguf=file)
    except UserError as error:
        return found | {"fault": str(error)[-200:]}
    theirs = rival.log_probabilities(TOKENS, WORDS)
    rival.close()
    found["difference"] = float((ours - theirs).abs().max())
    if (plain := unscaled(case)) is not None:
        found["unscaled"] = float((log_probabilities(plain) - theirs).abs().max())
    return found


@torch.no_grad()
def texts(name: str, count: int, folder: Path) -> Iterator[dict[str, object]]:
    """The results of a model's file, one a prompt."""
    file = downloads.fetch(name)
    with OffloadedModel.open(file) as opened:
        for prompt in PROMPTS:
            ids = opened.tokenizer(prompt)["input_ids"]
            room = Text([torch.zeros(1, len(ids) + count, dtype=torch.int64)])
            rival = llama_cpp.LlamaCpp("llama.cpp", None, folder, room, load="read", gguf=file)
            theirs = rival.likeliest(ids, count)
            rival.close()
            settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            ours = opened.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
            logits = torch.stack(list(followed(opened.model, ids, theirs)))
            equal = logits.argmax(1) == torch.tensor(theirs)
            apart = (logits.max(1).values - logits.gather(1, torch.tensor(theirs)[:, None])[:, 0]) / logits.std(1)
            same = [mine == other for mine, other in zip(ours, theirs, strict=True)]
            yield {
                "model": name,
                "prompt": prompt,
                "equal": float(equal.float().mean()),
                "parts_at": None if all(same) else same.index(False),
                "apart": float(apart[~equal].max()) if bool((~equal).any()) else 0.0,
            }


def followed(model: nn.Module, ids: Sequence[int], text: Sequence[int]) -> Iterator[torch.Tensor]:
    """The logits of each token of a text, which is fed one token after the other."""
    cache, fed = None, ids
    for token in text:
        found = cached_pass(model, torch.tensor([fed]), cache)
        yield found.logits[0, -1].float()
        cache, fed = found[CACHE], [token]


@torch.no_grad()
def precision(name: str, folder: Path) -> Iterator[dict[str, object]]:
    """The results of a model's file, one a way."""
    file = downloads.fetch(name)
    header = read_header(file)
    ids = read_kept_tokenizer(header)(TEXT)["input_ids"][: max(LENGTHS)]
    exact = opened(file)(torch.tensor([ids])).logits[0].log_softmax(1)[[length - 1 for length in LENGTHS]]
    for way, (compute, large) in WAYS.items():
        with mock.patch.object(gguf_header, "LARGE", large):
            given = compute(file, ids, folder, exact.shape[1])
        likeliest = exact.topk(100, dim=1).indices
        ours, theirs = (each.gather(1, likeliest) for each in (given, exact))
        apart = (ours - ours.mean(1, keepdim=True)) - (theirs - theirs.mean(1, keepdim=True))
        yield {
            "model": name,
            "way": way,
            "kl": float((exact.exp() * (exact - given)).sum(1).mean()),
            "largest": float(apart.abs().max()),
            "equal": float((given.argmax(1) == exact.argmax(1)).float().mean()),
        }


def by_decoder(file: Path, ids: Sequence[int], folder: Path, words: int) -> torch.Tensor:
    """Log-probabilities after each length, by the decoder without torch."""
    with toolkit.open(file) as opened:
        logits = torch.from_numpy(opened.scores(ids))
    return logits[[length - 1 for length in LENGTHS]].log_softmax(1)


def by_torch(file: Path, ids: Sequence[int], folder: Path, words: int) -> torch.Tensor:
    """The same by transformers' modules, single tokens by the toolkit's step."""
    with OffloadedModel.open(file) as opened:
        logits = torch.stack([*followed(opened.model, ids[:1], [*ids[1:], 0])])
    return logits[[length - 1 for length in LENGTHS]].log_softmax(1)


def by_llama_cpp(file: Path, ids: Sequence[int], folder: Path, words: int) -> torch.Tensor:
    """The same by llama.cpp."""
    room = Text([torch.zeros(1, len(ids) + 1, dtype=torch.int64)])
    rival = llama_cpp.LlamaCpp("llama.cpp", None, folder, room, load="read", gguf=file)
    found = torch.stack([rival.log_probabilities(ids[:length], words) for length in LENGTHS])
    rival.close()
    return found


WAYS = {  # with the number of weights from which on a model is computed in bfloat16
    "decoder, float32": (by_decoder, math.inf),
    "decoder, bfloat16": (by_decoder, 0),
    "torch, float32": (by_torch, math.inf),
    "torch, bfloat16": (by_torch, 0),
    "llama.cpp": (by_llama_cpp, 0),
}


def compare_precision(names: Sequence[str]) -> int:
    """Print a table of the ways; 0."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [found for name in names for found in precision(name, Path(folder))]
    print(pd.DataFrame(rows).to_markdown(index=False, floatfmt=".2g"))
    reports.save("gguf_precision", {"build": llama_cpp.which(), "lengths": list(LENGTHS), "rows": rows})
    return 0


def compare_texts(names: Sequence[str], count: int) -> int:
    """Print a table of the real files; 0 if tokens differ only where logits tie."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [found for name in names for found in texts(name, count, Path(folder))]
    table = pd.DataFrame(rows)
    print(table.astype(object).where(table.notna(), "").to_markdown(index=False, floatfmt=".3f"))
    reports.save("gguf_texts", {"tokens": count, "rows": rows})
    return int(not (table["apart"] < TIED).all())


def main() -> int:
    """Compare; 0 if all differences are below the goal, 1 if not, 77 without llama.cpp."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--texts", nargs="+", metavar="MODEL", help="models by name whose greedy texts are compared")
    parser.add_argument("--precision", nargs="+", metavar="MODEL", help="models by name that are compared with F32")
    parser.add_argument("--tokens", type=int, default=60, help="of each text (default: 60)")
    options = parser.parse_args()
    cases = options.cases
    if why := llama_cpp.missing():
        print(f"skipped: {why}")
        return SKIPPED
    if options.precision:
        return compare_precision(options.precision)
    if options.texts:
        return compare_texts(options.texts, options.tokens)
    rows = []
    with tempfile.TemporaryDirectory() as folder, progress("files", len(cases), "files") as bar:
        for name in cases:
            rows.append({"case": name, **row(CASES[name], Path(folder))})
            bar.update()
    table = pd.DataFrame(rows)
    print(table.astype(object).where(table.notna(), "").to_markdown(index=False, floatfmt=".4f"))
    reports.save("gguf_logits", {"goal": GOAL, "tokens": len(TOKENS), "rows": rows})
    return int(not (table["difference"][table["ignored"] == ""] < GOAL).all())


if __name__ == "__main__":
    sys.exit(main())
