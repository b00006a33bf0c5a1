"""`run --compare`: a packed model in all ways beside llama.cpp, as one table."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING

from toolkit.commands.pack import EVALUATED, brief_perplexity
from toolkit.commands.text import prompt_of
from toolkit.errors import UserError
from toolkit.files import replacing
from toolkit.records import line

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from toolkit.storage.store import Store

CORPUS = "wiki-slice"


def compare(options: Namespace, form: str, budgets: Mapping[str, int | None]) -> None:
    """Print the table. Raises `UserError` for a device other than the CPU, and what `token_rates` raises."""
    if options.device != "cpu":
        raise UserError(f"--device {options.device}: --compare runs on the CPU, as llama.cpp does here; leave it out")
    from toolkit.interchange.reading import load_tokenizer
    from toolkit.measure.side_by_side import Race, token_rates
    from toolkit.models import fast_dtype, load_model
    from toolkit.offload.unpacking import unpack_model
    from toolkit.storage.store import Store

    store = Store.open(options.folder)
    tokenizer = load_tokenizer(store.model_folder)
    packed, original, weights = unpack_model(store, form), None, "the original weights"
    prompt = prompt_of(options, tokenizer, packed.config)["input_ids"]
    try:
        original = load_model(str(store.model["name"]), fast_dtype())[0]
    except (KeyError, UserError) as error:
        weights = f"the packed model's weights (the original ones cannot be loaded: {line(error)})"
    race = Race(options.folder, form, prompt, options.max_new_tokens, budgets["dram_bytes"])
    table, left_out = token_rates(race, packed, original)
    _tell_planner(store, table, budgets["dram_bytes"])
    print("evaluating", file=sys.stderr)
    table["perplexity"] = _perplexities(table["way"], packed, original or packed, tokenizer)
    if options.csv:
        named = table.assign(model=store.model["name"], limit=options.dram).rename(columns={"tokens_s": "tokens_per_s"})
        with replacing(options.csv) as file:
            named.to_csv(file, index=False)
    _show(table, left_out)
    print(_notes(options, table["way"], weights))


def _tell_planner(store: "Store", table: "pd.DataFrame", dram_bytes: int | None) -> None:
    """Keep what the planner would have been off by, if it has measured this machine and knows the model."""
    from toolkit.planner.compared import remember
    from toolkit.planner.rates import are_kept
    from toolkit.planner.speed import this_machine

    if are_kept():
        with suppress(UserError):
            remember(store, table, this_machine(dram_bytes), limited=dram_bytes is not None)


def _perplexities(ways: Iterable[str], packed: "nn.Module", original: "nn.Module", tokenizer: object) -> list[float]:
    """Of the weights that each way multiplies with, decoded and multiplied by torch."""
    from toolkit.policies.methods import LLAMA_CPP
    from toolkit.text import load_tokens

    tokens = load_tokens(CORPUS, tokenizer, "evaluation")
    known: dict[str, float] = {}
    for way in ways:
        weights = LLAMA_CPP.get(way, "packed")
        if weights not in known:
            model = packed if weights == "packed" else _quantised(original, weights)
            known[weights] = float(brief_perplexity(model, tokens))
    return [known[LLAMA_CPP.get(way, "packed")] for way in ways]


def _quantised(model: "nn.Module", kind: str) -> "nn.Module":
    """A copy whose decoder weights llama.cpp's type has rounded; F16 holds them as they are."""
    from toolkit.studies.mixtures import encoders

    if kind == "F16":
        return model
    rounded = deepcopy(model)
    for linear, encode in encoders(rounded, kind):
        linear.weight.data.copy_(encode(linear.weight.data).decode())
    return rounded


def _show(table: "pd.DataFrame", reasons: list[str]) -> None:
    shown = table.assign(way=table["way"] + table["disturbed"].ge(0.5).map({True: " *", False: ""}))
    shown["range"] = [f"{low:.1f} to {high:.1f}" for low, high in zip(table["low"], table["high"], strict=True)]
    columns = {"tokens_s": "tokens/s", "read_mb": "MB read a token", "dram_mb": "MB in DRAM"}
    shown = shown[["way", "tokens_s", "range", "read_mb", "dram_mb", "perplexity", "mode"]].rename(columns=columns)
    print(shown.to_string(index=False, float_format="{:.1f}".format))
    if table["disturbed"].ge(0.5).any():
        print("* other work disturbed half of these turns or more")
    for reason in reasons:
        print(reason)


def _notes(options: Namespace, ways: Iterable[str], weights: str) -> str:
    """How the table was measured; of llama.cpp, which has these weights, only if it took part."""
    from toolkit.policies.methods import LLAMA_CPP

    text = f"{CORPUS}, {EVALUATED['windows']} windows of {EVALUATED['sequence_length']} tokens"
    told = f"{options.max_new_tokens} tokens after the prompt; median and range of the turns; perplexity: {text}."
    if LLAMA_CPP.keys().isdisjoint(ways):
        return told
    place = f", and {options.dram} for pages of its file." if options.dram else ", all in memory."
    return f"{told} llama.cpp has {weights} in its own types{place}"
