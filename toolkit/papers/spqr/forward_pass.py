"""SpQR figure 4.3: whole forward passes, measured here and modelled on the thesis' GPUs, and twins beside llama.cpp.

    tokens = forward_measurements("smollm2-135m", SpQR(), Calibration())           # a real model, all in memory
    twin = ModelTwin("tinyllama-1.1b", layers=22)
    turns = twin_measurements(twin, ["dense", "spqr"], ["llama.cpp Q3_K"], places=["dram", "storage"])

All ways of a real model get the same tokens, so all do the same work. A twin's weights are random, so only time is
measured. In `dram` all layers stay in memory, and llama.cpp has loaded its file in the order that its products like
best. In `storage` every layer is read for each token, the next one while this one is used, and llama.cpp maps its file,
whose layers' pages are dropped before each token. The head stays in memory.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import QUANTISED, Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.measure.contestant import Contestant, Reference, Text
from toolkit.measure.race import TOKEN, contestants
from toolkit.measure.summary import by_turn
from toolkit.measure.turns import measured, take_turns
from toolkit.models.shapes import twin_shapes
from toolkit.models.twins import twin_model
from toolkit.offload.methods import PACKED, RIVALS
from toolkit.offload.ways import Placed, Way
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.changed import ChangedModel, load_changed

DENSE, CSR, PTCSR = "dense", "spqr_packed", "spqr_ptcsr_packed"
FORWARD = {DENSE: "dense_packed", CSR: CSR, PTCSR: PTCSR}  # all by the toolkit's kernels, in the same step
# of the largest logit. The products add in another order, and dense weights are rounded to 16 bits: the farthest logit
# of a token is off by 0.02, with some calibrations by 0.06; by 0.85 if the last matrix is wrong
TOLERANCE = 0.1
PLAIN = "plain"
TWINS = {  # each way of a twin, with the store that it reads and the form of its weights there
    "dense": (PLAIN, "dense"),
    "endor": (PLAIN, "endor"),
    "int8": ("int8", "dense"),
    "spqr": (PLAIN, "spqr"),
    "spqr_ptcsr": (PLAIN, "spqr_ptcsr"),
}
STREAMED_TOKENS = 4  # in a turn, after one that fills the buffers


@measured
def forward_measurements(
    model: str,
    quantiser: SpQR,
    calibration: Calibration,
    tokens: int = 128,
    dropped: int = 10,
    repetitions: int = 3,
) -> pd.DataFrame:
    """Seconds of the forward pass of each token, kept: method (of `FORWARD`), repetition, token, seconds, and bytes.

    The decoder linears are those of a quantised model, all of them in memory. The methods take turns; each begins with
    an empty cache, and its first tokens are dropped, as in SpQR's thesis (section 4.3). `linear_bytes` are those of the
    decoder linears, which have so many `weights`; `weight_bytes` counts the head as well; `disturbed` is that of the
    token's turn. Raises `UserError` if `tokens` are not more than `dropped`, or if a method's logits are not those of
    the dense weights.
    """
    if not 0 <= dropped < tokens:
        raise UserError(f"tokens={tokens}, dropped={dropped}: expected more tokens than are dropped")
    quantised = load_changed(model, quantiser, calibration)
    text = Text([TOKEN] * tokens, Reference("dense weights", tolerance=TOLERANCE))
    ways, packs = [_way(name, "dram") for name in FORWARD.values()], _quantised_forms(quantised)
    with (
        scratch_folder(make_folder(paths.cache_dir())) as folder,
        contestants(quantised.model, ways, folder, [text], packs, staged=False) as racing,
    ):
        spans = take_turns(racing, repetitions, tokens - dropped, skipped=dropped)
    names = {name: method for method, name in FORWARD.items()}
    sizes = {"weights": sum(of.rows * of.columns for of in quantised.statistics), "linear_bytes": spans["layer_bytes"]}
    sizes["weight_bytes"] = spans["layer_bytes"] + quantised.model.get_output_embeddings().weight.nbytes
    table = spans.assign(method=spans["method"].map(names), **sizes)
    return table[["method", "repetition", "token", "seconds", *sizes, "disturbed", "measured_at"]]


def _way(method: str, place: str) -> Placed:
    return Way(method, policy="sequential" if method in RIVALS else "pipelined", device="cpu"), place


def _quantised_forms(quantised: ChangedModel) -> dict[str, object]:
    """How each form's matrices are packed, in the order in which the model has them."""

    def packed(form: type[SpQRMatrix]) -> Callable[[Tensor], Packed]:
        layers = range(len(quantised.folders))
        matrices = (matrix for layer in layers for matrix in quantised.matrices(layer).values())
        return lambda weight: form.from_quantised(next(matrices), weight.dtype)

    return {"dense": partial(encode, "dense"), **{name: packed(form) for name, form in QUANTISED.items()}}


@dataclass(frozen=True)
class ModelTwin:
    """A Llama decoder of random weights: a model of `toolkit.models.shapes`, so many layers, and a vocabulary.

    Half of the dense weights, and of those that Endor packs, are zeros. With `alike` the layers share their dense
    weights, so that a model larger than the memory can be written, piece by piece.
    """

    model: str = "tinyllama-1.1b"
    layers: int = 22
    vocabulary: int = 32_000
    alike: bool = False


@measured
def twin_measurements(
    twin: ModelTwin,
    ways: Sequence[str],
    rivals: Sequence[str] = (),
    places: Sequence[str] = ("dram",),
    tokens: int = 16,
    repetitions: int = 3,
) -> pd.DataFrame:
    """Seconds a token of each way (keys of `TWINS`) and of llama.cpp, kept.

    Columns: way, place, repetition, seconds (the mean of a turn's tokens, of which there are `STREAMED_TOKENS` in
    `storage`), read_bytes (for a token, in `storage`), layer_bytes, weights, head_bytes, mode, disturbed, measured_at.
    `layer_bytes` are those of the decoder linears, `weights` their number, `head_bytes` those of the head, which has 16
    bits everywhere. Raises `UserError` for a way that gives other logits from the disk than from memory.
    """
    model = twin_model(twin.model, twin.layers, torch.bfloat16, 0.5, 0, twin.vocabulary, twin.alike)
    weights = twin.layers * sum(rows * columns for rows, columns in twin_shapes(twin.model).values())
    references, tables = {name: Reference("the same weights in the other place") for name in ways}, []
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        for place in places:
            counts = (STREAMED_TOKENS, 1) if place == "storage" else (tokens - 2, 2)
            text = Text([TOKEN] * sum(counts))
            with ExitStack() as stack:
                racing: list[Contestant] = []
                for number, store in enumerate(dict.fromkeys(TWINS[name][0] for name in ways)):
                    forms = {TWINS[name][1]: name for name in ways if TWINS[name][0] == store}
                    raced = [_way(f"{form}{PACKED}", place) for form in forms]
                    raced += [_way(name, place) for name in rivals] if not number else []
                    packs = {form: _packed(store, form) for form in forms}
                    (folder / store).mkdir(exist_ok=True)
                    entered = contestants(model, raced, folder / store, [text], packs, staged=False)
                    for contestant in stack.enter_context(entered):
                        method = contestant.labels["method"]
                        name = forms.get(str(method).removesuffix(PACKED), method)
                        contestant.labels = {**contestant.labels, "way": name, "place": place}
                        if name in references:  # nobody else has the same weights
                            contestant.reference = references[name]
                        racing.append(contestant)
                spans = take_turns(racing, repetitions, *counts, warm_up=1, stay_open=True)
            turns = by_turn(spans, ["way", "place", "layer_bytes"])
            read = turns["read_bytes"].where(turns["read_bytes"] > 0, turns["stored_bytes"])  # ours are single spans
            tables.append(turns.assign(read_bytes=read))
    columns = ["way", "place", "repetition", "seconds", "read_bytes", "layer_bytes", "mode", "disturbed", "measured_at"]
    table = pd.concat(tables, ignore_index=True)[columns]
    return table.assign(weights=weights, head_bytes=model.lm_head.weight.nbytes)


def _packed(store: str, form: str) -> object:
    """How a matrix of a twin is packed in a form."""
    if store != PLAIN:
        return partial(Scaled.encode, form)
    if form not in QUANTISED:
        return partial(encode, form)
    seeds = itertools.count()
    return lambda weight: random_spqr(QUANTISED[form], tuple(weight.shape), weight.dtype, seed=next(seeds))
