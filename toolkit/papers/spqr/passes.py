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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import QUANTISED, Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.machines.machine import GB, Profile
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.decoding import Text
from toolkit.measure.llama_cpp import missing
from toolkit.measure.race import TOKEN, contestants
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shapes import twin_shapes
from toolkit.models.twins import twin_model
from toolkit.papers.spqr.speedups import DENSE_BITS, MINE, product_s
from toolkit.policies.methods import LLAMA_CPP, PACKED, RIVALS
from toolkit.policies.ways import Placed, Way
from toolkit.pruning.calibration import Calibration
from toolkit.quantization.quantised import QuantisedModel, load_quantised
from toolkit.quantization.spqr import SpQR

RIVAL = "llama.cpp Q3_K"  # the other program's type of the fewest bits
DENSE, CSR, PTCSR = "dense", "spqr_packed", "spqr_ptcsr_packed"
FORWARD = {DENSE: "dense_packed", CSR: CSR, PTCSR: PTCSR}  # all by the toolkit's kernels, in the same step
SLACK = 0.1  # of the largest logit. The products add in another order, and dense weights are rounded to 16 bits: the
# farthest logit of a token is off by 0.02, with some calibrations by 0.06; by 0.85 if the last matrix is wrong
PLAIN = "plain"
TWINS = {  # each way of a twin, with the store that it reads and the form of its weights there
    "dense": (PLAIN, "dense"),
    "endor": (PLAIN, "endor"),
    "int8": ("int8", "dense"),
    "spqr": (PLAIN, "spqr"),
    "spqr_ptcsr": (PLAIN, "spqr_ptcsr"),
}
PLACES = ("dram", "storage")
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
    quantised = load_quantised(model, quantiser, calibration)
    text = Text([TOKEN] * tokens, Reference("dense weights", near=SLACK))
    ways, packs = [_way(name, "dram") for name in FORWARD.values()], _quantised_forms(quantised)
    with (
        scratch_folder(make_folder(paths.cache_dir())) as folder,
        contestants(quantised.model, ways, folder, [text], packs, staged=False) as racing,
    ):
        spans = take_turns(racing, repetitions, tokens - dropped, skipped=dropped)
    names = {name: method for method, name in FORWARD.items()}
    sizes = {"weights": sum(of.rows * of.columns for of in quantised.statistics), "linear_bytes": spans["layer_bytes"]}
    sizes["weight_bytes"] = spans["layer_bytes"] + quantised.model.get_output_embeddings().weight.nbytes
    table = spans.assign(method=spans["method"].map(names), seconds=spans["end_s"] - spans["start_s"], **sizes)
    return table[["method", "repetition", "token", "seconds", *sizes, "disturbed", "measured_at"]]


def _way(method: str, place: str) -> Placed:
    return Way(method, policy="sequential" if method in RIVALS else "pipelined", device="cpu"), place


def _quantised_forms(quantised: QuantisedModel) -> Mapping[str, object]:
    """How each form's matrices are packed, in the order in which the model has them."""

    def packed(form: type[SpQRMatrix], following: Iterator, weight: Tensor) -> Packed:
        return form.from_quantised(next(following), weight.dtype)

    def matrices() -> Iterator:
        for layer in range(len(quantised.folders)):
            yield from quantised.matrices(layer).values()

    forms = {name: partial(packed, form, matrices()) for name, form in QUANTISED.items()}
    return {"dense": partial(encode, "dense"), **forms}


@dataclass(frozen=True)
class ModelTwin:
    """A Llama decoder of random weights: a model of `toolkit.models.shapes`, so many layers, and a vocabulary.

    `sparsity` is that of the dense weights and of what Endor packs; `outliers` the share that SpQR has. With `alike`
    the layers share their dense weights, so that a model larger than the memory can be written, piece by piece.
    """

    model: str = "tinyllama-1.1b"
    layers: int = 22
    vocabulary: int = 32_000
    sparsity: float = 0.5
    outliers: float = 0.01
    alike: bool = False


def twin_measurements(
    twin: ModelTwin,
    ways: Sequence[str],
    rivals: Sequence[str] = (),
    places: Sequence[str] = ("dram",),
    tokens: int = 16,
    repetitions: int = 3,
    fresh: bool = False,
) -> pd.DataFrame:
    """Seconds a token of each way and of llama.cpp, kept.

    Columns: way, place, repetition, seconds (the mean of a turn's tokens, of which there are `STREAMED_TOKENS` in
    `storage`), read_bytes (for a token, in `storage`), layer_bytes, weights, head_bytes, mode, disturbed, measured_at.
    `layer_bytes` are those of the decoder linears, `weights` their number, `head_bytes` those of the head, which has 16
    bits everywhere. llama.cpp is left out where it cannot run. Raises `UserError` for unknown names, fewer than 4
    tokens or 1 repetition, or a way that gives other logits from the disk than from memory.
    """
    for names, known in ((ways, TWINS), (rivals, LLAMA_CPP), (places, PLACES)):
        for name in names:
            if name not in known:
                raise unknown("way", name, known)
    if tokens < 4 or repetitions < 1:
        raise UserError(f"tokens={tokens}, repetitions={repetitions}: expected 4 or more, and 1 or more")
    rivals = [] if not rivals or missing() else list(rivals)
    return _twin_turns(twin, list(ways), rivals, list(places), tokens, repetitions, fresh=fresh)


@measured
def _twin_turns(
    twin: ModelTwin, ways: Sequence[str], rivals: Sequence[str], places: Sequence[str], tokens: int, repetitions: int
) -> pd.DataFrame:
    model = twin_model(twin.model, twin.layers, torch.bfloat16, twin.sparsity, 0, twin.vocabulary, twin.alike)
    weights = twin.layers * sum(rows * columns for rows, columns in twin_shapes(twin.model).values())
    references, tables = {name: Reference("the same weights in the other place") for name in ways}, []
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        for place in places:
            counts = (STREAMED_TOKENS, 1) if place == "storage" else (tokens - 2, 2)
            text = Text([TOKEN] * sum(counts), Reference("the turn before"))
            with ExitStack() as stack:
                racing: list[Contestant] = []
                for number, store in enumerate(dict.fromkeys(TWINS[name][0] for name in ways)):
                    forms = {TWINS[name][1]: name for name in ways if TWINS[name][0] == store}
                    raced = [_way(f"{form}{PACKED}", place) for form in forms]
                    raced += [_way(name, place) for name in rivals] if not number else []
                    packs = {form: _packed(twin, store, form) for form in forms}
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


def _packed(twin: ModelTwin, store: str, form: str) -> object:
    """How a matrix of a twin is packed in a form."""
    if store != PLAIN:
        return partial(Scaled.encode, form)
    if form not in QUANTISED:
        return partial(encode, form)
    seeds = itertools.count()

    def random_form(weight: Tensor) -> Packed:
        return random_spqr(QUANTISED[form], tuple(weight.shape), weight.dtype, twin.outliers, next(seeds))

    return random_form


def measured_passes(tokens: pd.DataFrame, model: str) -> pd.DataFrame:
    """A row a method, from `forward_measurements`: seconds (median), mean_s and seconds_low of a pass, over all tokens.

    speedup is the dense median over this one, of the same repetition (`summary`). byte_limit is the dense bytes over
    this one's; gb_s the bytes over the median. bits_per_weight and dense_bits are those of the decoder linears, here
    and in the dense model: 16, or 32 on a CPU that is quicker in float32, where a ratio over dense is one over 32 bits.
    """
    turns = tokens.groupby(["method", "repetition"], sort=False)
    turns = turns[["seconds", "disturbed"]].median().join(turns[["weight_bytes"]].first()).reset_index()
    table = summary(turns, ["method"], (), {"speedup": {"method": DENSE}}).drop(columns="seconds").set_index("method")
    seconds = tokens.groupby("method", sort=False)["seconds"]
    table = table.assign(seconds_low=seconds.min(), mean_s=seconds.mean(), seconds=seconds.median())
    bits = pd.Series(stored_bits(tokens))
    table = table.assign(bits_per_weight=bits.reindex(table.index), dense_bits=bits[DENSE])
    return _finished(table.reset_index(), "seconds").assign(profile=MINE, model=model, evidence="measured")


def stored_bits(tokens: pd.DataFrame) -> dict[str, float]:
    """Bits a weight of the decoder linears, by method, from `forward_measurements`."""
    first = tokens.groupby("method", sort=False)[["linear_bytes", "weights"]].first()
    return (8 * first["linear_bytes"] / first["weights"]).to_dict()


def modelled_passes(
    bits: Mapping[str, float], model: str, machines: Mapping[str, Profile], dense_on: str
) -> pd.DataFrame:
    """A row a machine and method, with seconds_low: the products of all weights and of the head, one after the other.

    `bits` a weight of the decoder linears, by method; dense weights and the head have 16. Nothing else takes time: no
    attention, no norms. The dense model is asked for on the machine `dense_on` alone, since the other one cannot hold
    it.
    """
    shape = ARCHITECTURES[model]
    sizes = [rows * columns for rows, columns in twin_shapes(model).values()]
    head = shape.parameters["head"]
    bits = {method: DENSE_BITS if method == DENSE else weight_bits for method, weight_bits in bits.items()}
    tables = []
    for name, machine in machines.items():
        layer_s = [sum(product_s(machine, size, each) for size in sizes) for each in bits.values()]
        table = pd.DataFrame({"method": list(bits), "seconds_low": layer_s}).assign(profile=name)
        table["seconds_low"] = shape.layers * table["seconds_low"] + product_s(machine, head, DENSE_BITS)
        table = table.assign(bits_per_weight=bits.values(), dense_bits=DENSE_BITS)
        table["weight_bytes"] = [(shape.layers * sum(sizes) * each + head * DENSE_BITS) / 8 for each in bits.values()]
        table["speedup"] = table.loc[table["method"] == DENSE, "seconds_low"].item() / table["seconds_low"]
        table = _finished(table, "seconds_low")
        tables.append(table if name == dense_on else table[table["method"] != DENSE])
    return pd.concat(tables, ignore_index=True).assign(model=model, evidence="modelled")


def _finished(table: pd.DataFrame, seconds: str) -> pd.DataFrame:
    dense = table.loc[table["method"] == DENSE, "weight_bytes"].item()
    return table.assign(byte_limit=dense / table["weight_bytes"], gb_s=table["weight_bytes"] / table[seconds] / GB)


def twin_passes(turns: pd.DataFrame, twin: ModelTwin) -> pd.DataFrame:
    """A row a way and place, from `twin_measurements`: seconds of a token, with its range over the turns.

    bits_per_weight are those of the decoder linears; gb_s the bytes of linears and head over the seconds, or from the
    disk those that were read (`read_bytes`): the head stays in memory, ours and llama.cpp's. `over_rival` is the
    seconds of `RIVAL` over this way's in the same turn: the median, NaN where it did not run.
    """
    table = summary(turns, ["place", "way"], over={"over_rival": {"way": RIVAL}})
    table = table.drop(columns=["over_rival_low", "over_rival_high"]).rename(columns={"way": "method"})
    table["bits_per_weight"] = 8 * table["layer_bytes"] / table["weights"]
    table["read_bytes"] = table["read_bytes"].where(table["place"] == "storage")
    moved = table["read_bytes"].fillna(table["layer_bytes"] + table["head_bytes"])
    table["gb_s"] = moved / GB / table["seconds"]
    return table.assign(profile=MINE, model=twin.model, layers=twin.layers, evidence="measured")
