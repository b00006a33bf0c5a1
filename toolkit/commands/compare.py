"""`run --compare`: a packed model in all ways beside llama.cpp, as one table."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.pack import EVALUATED, brief_perplexity
from toolkit.commands.text import prompt_of
from toolkit.errors import UserError
from toolkit.files import write_csv
from toolkit.progress import tell
from toolkit.records import line

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

CORPUS = "wiki-slice"
DISTURBED = "* other work disturbed half of these turns or more"


def compare(options: Namespace, form: str, budgets: Mapping[str, int | None]) -> None:
    """Print the table. Raises what `token_rates` raises."""
    tell("looking at the folder and for llama.cpp")
    from toolkit.interchange.reading import load_tokenizer
    from toolkit.measure.side_by_side import planned_rivals, token_rates
    from toolkit.models import fast_dtype, load_model
    from toolkit.offload.model import unpack_model
    from toolkit.storage.store import Store

    store, dram_bytes = Store.open(options.folder), budgets["dram_bytes"]
    name = str(store.model.get("name"))
    own = options.gguf or _packed_gguf(name)
    rivals, reasons = planned_rivals(options.folder, dram_bytes, own)
    for reason in reasons:
        tell(f"not raced: {reason}")
    tell("reading the packed model")
    tokenizer, packed = load_tokenizer(store.model_folder), unpack_model(store, form)
    prompt = prompt_of(options, tokenizer, packed.config)["input_ids"]
    written, weights = None, "the original weights"
    if None in rivals.values():
        tell(f"reading the original, {name}, for llama.cpp's files")
        try:
            written = load_model(name, fast_dtype())[0]
        except UserError as error:
            weights = f"the packed model's weights (the original ones cannot be loaded: {line(error)})"
    asked = (prompt, options.max_new_tokens, dram_bytes)
    table, left_out = token_rates(options.folder, form, packed, *asked, rivals, written, tell)
    files = {way: name if file == _packed_gguf(name) else str(file) for way, file in rivals.items() if file}
    known = _Perplexities(tokenizer, packed, written, name)
    table["perplexity"] = [known.of(way, files.get(way)) for way in table["way"]]
    if options.csv:
        write_csv(options.csv, table.assign(model=name, limit=options.dram))
    _show(table, [*reasons, *left_out])
    print(f"{name} as it was before it was packed: perplexity {known.of_model(name):.1f}")
    print(_notes(options, table["way"], weights, files))


def _packed_gguf(name: str) -> Path | None:
    """The GGUF file of the model that was packed, by its name, if it was one and is still there."""
    from toolkit.models import MODELS
    from toolkit.models.loading import gguf_file, parts_of

    if name in MODELS and parts_of(name):
        return None
    file = gguf_file(name)
    return file if file and file.is_file() else None


class _Perplexities:
    """Perplexities of the weights that ways multiply with, decoded and multiplied by torch; each is measured once."""

    def __init__(self, tokenizer: object, packed: "nn.Module", original: "nn.Module | None", name: str):
        from toolkit.quality import load_tokens

        self._tokens, self._known = load_tokens(CORPUS, tokenizer, "evaluation"), dict[str, float]()
        self._packed, self._original, self._name = packed, original, name

    def of(self, way: str, file: str | None) -> float:
        """The perplexity of a way; `file` names the model of llama.cpp's file, if it is not one that was written."""
        from toolkit.policies.methods import LLAMA_CPP

        if file is not None:
            return self.of_model(file)
        kind = LLAMA_CPP.get(way)
        if kind is None:
            return self._once("the packed weights", lambda: self._packed)
        if kind == "F16" and self._original:
            return self.of_model(self._name)
        return self._once(f"the weights in {kind}", lambda: _quantised(self._original or self._packed, kind))

    def of_model(self, name: str) -> float:
        """The perplexity of a model by name; NaN if it cannot be loaded."""
        from toolkit.models import load_model

        def loaded() -> "nn.Module":
            known = self._original if name == self._name else None
            return known or load_model(name, self._packed.dtype)[0]  # large models stay in 16 bits

        try:
            return self._once(name, loaded)
        except UserError as error:
            tell(f"{name} is not evaluated: {line(error)}")
            return float("nan")

    def _once(self, name: str, model: "Callable[[], nn.Module]") -> float:
        if name not in self._known:
            tell(f"evaluating {name}")
            self._known[name] = float(brief_perplexity(model(), self._tokens))
        return self._known[name]


def _quantised(model: "nn.Module", kind: str) -> "nn.Module":
    """A copy whose decoder weights llama.cpp's type has rounded; F16 holds them as they are."""
    from toolkit.studies.forms import store
    from toolkit.studies.mixtures import form_of

    if kind == "F16":
        return model
    rounded = deepcopy(model)
    store(rounded, form_of(kind))
    return rounded


def _show(table: "pd.DataFrame", reasons: list[str]) -> None:
    from toolkit.measure.disturbance import disturbed_rows, starred

    shown = table.assign(way=starred(table, "way"))
    ends = zip(table["tokens_per_s_low"], table["tokens_per_s_high"], strict=True)
    shown["range"] = [f"{low:.1f} to {high:.1f}" for low, high in ends]
    columns = {"tokens_per_s": "tokens/s", "read_mb": "MB read a token", "dram_mb": "MB in DRAM"}
    order = ["way", "tokens_per_s", "range", "read_mb", "dram_mb", "perplexity", "mode"]
    print(shown[order].rename(columns=columns).to_string(index=False, float_format="{:.1f}".format, na_rep="–"))
    if disturbed_rows(table).any():
        print(DISTURBED)
    for reason in reasons:
        print(reason)


def _notes(options: Namespace, ways: Iterable[str], weights: str, files: Mapping[str, str]) -> str:
    """How the table was measured; of llama.cpp, which has these weights and files, only if it took part."""
    text = f"{CORPUS}, {EVALUATED['windows']} windows of {EVALUATED['sequence_length']} tokens"
    note = f"{options.max_new_tokens} tokens after the prompt; median and range of the turns; perplexity: {text}."
    rivals = [way for way in ways if way.startswith("llama.cpp")]
    if not rivals:
        return note
    place = f", and {options.dram} for pages of its file." if options.dram else ", all in memory."
    written = [f"{weights} in its own types"] if set(rivals) - files.keys() else []
    has = written + [f"{name} as {way.removeprefix('llama.cpp ')}" for way, name in files.items() if way in rivals]
    return f"{note} llama.cpp has {' and '.join(has)}{place}"
