"""`plan --try N`: pack the first ways of a plan, run each within the limit, and print what each reached."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.compare import DISTURBED
from toolkit.commands.pack import add_parser, brief_perplexity, pack
from toolkit.errors import UserError
from toolkit.progress import tell
from toolkit.records import line

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from toolkit.planner.plan import Recommendation
    from toolkit.planner.target import Target
    from toolkit.planner.ways import PlannedWay

PROMPT, TOKENS, REPETITIONS = 8, 12, 3
HEADING = ("way", "predicted", "tokens/s", "range", "first s", "MB read", "MB held", "perplexity", "×")
ROW = "{:<34}{:>10}{:>10}{:>16}{:>9}{:>9}{:>9}{:>12}{:>7}"


def check_trial(target: "Target", gguf: Path | None) -> None:
    """Raise `UserError` for a model whose weights are not at hand, or a rival's file that cannot be read."""
    from toolkit.models.gguf_header import read_header

    if not target.loadable:
        raise UserError(f"--try: no weights of {target.name} are at hand; name a folder, a file or an id")
    if gguf:
        read_header(gguf)


def trial(found: "Recommendation", options: Namespace) -> None:
    """Try the first ways of a plan that `pack` and `run` do, and llama.cpp with `--gguf FILE`.

    Each is packed into a scratch folder, which is removed afterwards. A way that fails has a line that says why.
    Raises `UserError` without a way to try.
    """
    ways = list(_chosen(found))[: options.tries]
    if not ways:
        raise UserError(f"--try: `pack` and `run` do none of the ways that fit {found.target.name}")
    tell(f"evaluating {found.target.name} as it is")
    before, _ = _in_memory(found.target.name, options.text)
    print(f"\ntried within {found.dram_bytes / 1e6:.0f} MB; {found.target.name} as it is: perplexity {before:.2f}\n")
    print(ROW.format(*HEADING), flush=True)
    disturbed = []
    for way, predicted in ways:
        tell(f"{way.name}: packing by `pack {found.target.name} {way.pack}`")
        try:
            tried = _try(found, way, options.text)
            disturbed.append(_print_row(way.name, f"{predicted:.3g}", *tried, before))
        except UserError as error:
            print(f"{way.name}: {line(error)}", flush=True)
    if options.gguf:
        try:
            disturbed.append(_print_row(*_try_gguf(options.gguf, found.dram_bytes, options.text), before))
        except UserError as error:
            print(f"{options.gguf}: {line(error)}", flush=True)
    if any(disturbed):
        print(DISTURBED)


def _chosen(found: "Recommendation") -> Iterator[tuple["PlannedWay", float]]:
    """The ways to try: those that the plan names, then those within the loss; each with its predicted tokens/s."""
    known = {way.name: way for way in found.target.ways}
    named = found.table["way"].isin([choice.way for choice in found.choices])
    order = found.table.assign(named=named).sort_values(["named", "within"], ascending=False, kind="stable")
    for row in order.itertuples():
        if row.runs_here and not row.gpu and known[row.way].pack:
            yield known[row.way], row.tokens_s


def _try(found: "Recommendation", way: "PlannedWay", corpus: str) -> tuple["pd.Series", float, float]:
    """The speed of a way, the bytes that it held, and its perplexity."""
    from toolkit import paths
    from toolkit.files import make_folder, scratch_folder
    from toolkit.measure.packed_model import PackedModel
    from toolkit.measure.summary import text_speed
    from toolkit.offload.model import OffloadedModel
    from toolkit.planner.stand_ins import run_as
    from toolkit.quality import load_tokens

    with scratch_folder(make_folder(paths.cache_dir() / "tried")) as scratch:
        words = ["pack", found.target.name, *shlex.split(way.pack), "--no-evaluate", "--out", str(scratch / "packed")]
        with redirect_stdout(sys.stderr):  # the table alone is on stdout
            pack(_pack_options(words))
        run, limit = run_as(way), {"dram_bytes": found.dram_bytes, "verify": False}
        tell(f"{way.name}: evaluating")
        with OffloadedModel.open(scratch / "packed", run and run.method, **limit) as model:
            tokens = load_tokens(corpus, model.tokenizer, "evaluation")
            perplexity = float(brief_perplexity(model.model, tokens))
        tell(f"{way.name}: {REPETITIONS} turns of {TOKENS} tokens")
        ours = PackedModel(way.name, scratch / "packed", _text(tokens), {"way": way.name}, run, **limit)
        return text_speed(ours, REPETITIONS), ours.held_bytes, perplexity


def _pack_options(words: Sequence[str]) -> Namespace:
    """The options of a `pack` command."""
    parser = ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(words)


def _try_gguf(file: Path, dram_bytes: int, corpus: str) -> tuple[str, str, "pd.Series", float, float]:
    """The same of a file in llama.cpp, whose pages have the limit."""
    from toolkit.measure.llama_cpp import LlamaCpp
    from toolkit.measure.summary import text_speed
    from toolkit.models.gguf_header import read_header

    name = f"llama.cpp {read_header(file).quantisation}"
    tell(f"{name}: evaluating {file}")
    perplexity, tokens = _in_memory(str(file), corpus)
    text = _text(tokens)
    tell(f"{name}: {REPETITIONS} turns of {TOKENS} tokens")
    settings = {"memory_bytes": dram_bytes, "gguf": file}
    with closing(LlamaCpp(name, None, file.parent, text, {"way": name}, **settings)) as rival:
        return name, "–", text_speed(rival, REPETITIONS), rival.held_bytes, perplexity


def _text(tokens: "torch.Tensor"):
    """A prompt and single tokens of a text, as passes of a turn."""
    from toolkit.measure.contestant import Text
    from toolkit.measure.summary import NOT_COUNTED

    prompt, later = tokens[:PROMPT], tokens[PROMPT : PROMPT + NOT_COUNTED - 1 + TOKENS]
    return Text([prompt[None], *later.view(-1, 1, 1)])


def _in_memory(name: str, corpus: str) -> tuple[float, "torch.Tensor"]:
    """The perplexity of a model in memory, which is let go afterwards, and the text that it was measured on."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.quality import load_tokens

    model, tokenizer = load_model(name, fast_dtype())
    tokens = load_tokens(corpus, tokenizer, "evaluation")
    return float(brief_perplexity(model, tokens)), tokens


def _print_row(name: str, predicted: str, speed: "pd.Series", held: float, perplexity: float, before: float) -> bool:
    """Print a row; return whether other work disturbed it."""
    from toolkit.measure.disturbance import STAR, is_disturbed

    spread = f"{speed.tokens_per_s_low:.3g} to {speed.tokens_per_s_high:.3g}"
    disturbed = is_disturbed(speed)
    numbers = f"{speed.tokens_per_s:.3g}{STAR * disturbed}", spread, f"{speed.first_s:.2g}", f"{speed.read_mb:,.0f}"
    quality = f"{held / 1e6:,.0f}", f"{perplexity:.2f}", f"{perplexity / before:.2f}"
    print(ROW.format(name, predicted, *numbers, *quality), flush=True)
    return disturbed
