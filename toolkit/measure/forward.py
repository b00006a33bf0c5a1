"""Decoding one token after another with all weights in DRAM: SpQR's storages beside the same model's dense weights.

The decoder linears are those of a quantised model, read by the runtime from a store. Every way gets the same tokens, so
all do the same work. The first tokens are dropped, as in SpQR's thesis (section 4.3).
"""

from collections.abc import Iterator, Mapping
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import Packed, encode
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.measure.contestant import Reference
from toolkit.measure.decoding import Text
from toolkit.measure.streamed import StreamedModel
from toolkit.measure.turns import measured, take_turns
from toolkit.models import decoder_blocks
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way
from toolkit.pruning.calibration import Calibration
from toolkit.quantization.quantised import QuantisedModel, load_quantised
from toolkit.quantization.spqr import SpQR
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store

# with the variant they read and how it is run: all by the toolkit's kernels, in the same step for single tokens
METHODS = {
    "dense": ("dense", "dense_packed"),
    "spqr_packed": ("spqr", "spqr_packed"),
    "spqr_ptcsr_packed": ("spqr_ptcsr", "spqr_ptcsr_packed"),
}
TOKEN = 7
SLACK = 0.1  # of the largest logit. The products add in another order, and dense weights are rounded to 16 bits: the
# farthest logit of a token is off by 0.02, with some calibrations by 0.06; by 0.85 if the last matrix is wrong


@measured
def forward_measurements(
    model: str,
    quantiser: SpQR,
    calibration: Calibration,
    tokens: int = 128,
    dropped: int = 10,
    repetitions: int = 3,
) -> pd.DataFrame:
    """Seconds of the forward pass of each token, kept: method (of `METHODS`), repetition, token, seconds, and bytes.

    `disturbed` is that of the token's turn (`toolkit.measure.disturbance`).

    The methods take turns; each begins with an empty cache. `linear_bytes` are those of the decoder linears, which have
    so many `weights`; `weight_bytes` counts the head as well. Raises `UserError` if `tokens` are not more than
    `dropped`, or if a method's logits are not those of the dense weights.
    """
    if not 0 <= dropped < tokens:
        raise UserError(f"tokens={tokens}, dropped={dropped}: expected more tokens than are dropped")
    quantised = load_quantised(model, quantiser, calibration)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        pack_model(quantised.model, folder / "store", _variants(quantised))
        contestants = _contestants(quantised, Store.open(folder / "store"), tokens)
        spans = take_turns(contestants, repetitions, tokens - dropped, skipped=dropped)
    sizes = ["weights", "linear_bytes", "weight_bytes"]
    columns = ["method", "repetition", "token", "seconds", *sizes, "disturbed", "measured_at"]
    return spans.assign(seconds=spans["end_s"] - spans["start_s"])[columns]


def _contestants(quantised: QuantisedModel, store: Store, tokens: int) -> list[StreamedModel]:
    """The methods, all layers in DRAM. A token is a single span."""
    text = Text([torch.tensor([[TOKEN]])] * tokens, Reference("dense weights", near=SLACK))
    head_bytes = quantised.model.get_output_embeddings().weight.nbytes
    weights = sum(of.rows * of.columns for of in quantised.statistics)
    where, contestants = LayerMap(0, len(decoder_blocks(quantised.model)), 0), []
    for method, (variant, name) in METHODS.items():
        nbytes = sum(layer.nbytes for layer in store.layers_of(variant))
        labels = {"method": method, "weights": weights, "linear_bytes": nbytes, "weight_bytes": nbytes + head_bytes}
        way = Way(name, policy="pipelined", device="cpu")
        contestants.append(StreamedModel(store, way, text, labels, staged=False, placement=where))
    return contestants


def _variants(quantised: QuantisedModel) -> Mapping[str, object]:
    """How each variant's matrices are packed, in the order in which the model has them."""

    def quantised_matrices(form: type[SpQRMatrix], following: Iterator, weight: Tensor) -> Packed:
        return form.from_quantised(next(following), weight.dtype)

    def matrices() -> Iterator:
        for layer in range(len(quantised.folders)):
            yield from quantised.matrices(layer).values()

    forms = (SpQRMatrix, SpQRTransposed)
    packs = {form.name: partial(quantised_matrices, form, matrices()) for form in forms}
    return {"dense": partial(encode, "dense"), **packs}
