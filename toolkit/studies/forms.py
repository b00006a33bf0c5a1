"""The forms that decoder linears can be stored in, and a model's bytes in each of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats import encode
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.progress import progress
from toolkit.quantization.gptq import GPTQ
from toolkit.quantization.hqq import Groupwise
from toolkit.quantization.rtn import RoundToNearest
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity.layerwise import StoredMatrix, WeightChange
from toolkit.studies import mixtures

HALF_BITS = 16


Encoder = Callable[[Tensor], StoredMatrix]


def _half(form: str, weight: Tensor) -> StoredMatrix:
    return encode(form, weight.half())


def _int8(form: str, weight: Tensor) -> StoredMatrix:
    return Scaled.encode(form, weight.half())


# how a decoder linear is stored; int8 has a scale a row, the others of few bits a scale and a zero point a group
FORMS: dict[str, Encoder] = {
    "fp16": partial(_half, "dense"),
    "fp16, endor": partial(_half, "endor"),
    "fp16, 2:4": partial(_half, "two_four"),
    "int8": partial(_int8, "dense"),
    "int8, endor": partial(_int8, "endor"),
    "int8, 2:4": partial(_int8, "two_four"),
    "int4, hqq": partial(Groupwise.encode, bits=4),
    "int3, hqq": partial(Groupwise.encode, bits=3),
    "int2, hqq": partial(Groupwise.encode, bits=2),
    "int4, rtn": RoundToNearest(4),
    "int3, rtn": RoundToNearest(3),
    "int2, rtn": RoundToNearest(2),
    "int3, rtn 16": RoundToNearest(3, 16),
    "int3, rtn 128": RoundToNearest(3, 128),
}
SPQR = {  # by the share of outliers; groups of 16 but where a number says otherwise
    "int3, spqr 0 %": SpQR(0.0),
    "int3, spqr 0.5 %": SpQR(0.005),
    "int3, spqr 1 %": SpQR(0.01),
    "int3, spqr 2 %": SpQR(0.02),
    "int3, spqr 4 %": SpQR(0.04),
    "int3, spqr 1 % plain": SpQR(0.01, damping=0.01, reorder=False, search=False),
    "int3, spqr 1 % groups 32": SpQR(0.01, group=32),
    "int3, spqr 1 % groups 64": SpQR(0.01, group=64),
}
# how a dense model's decoder linears are quantised with calibration; groups of 64 but where a number says otherwise
CALIBRATED: dict[str, WeightChange] = {
    "int4, gptq": GPTQ(4),
    "int3, gptq": GPTQ(3),
    "int2, gptq": GPTQ(2),
    "int3, gptq 16": GPTQ(3, 16),
    "int3, gptq 128": GPTQ(3, 128),
    "int4, gptq act_order": GPTQ(4, reorder=True),
    "int3, gptq act_order": GPTQ(3, reorder=True),
    **SPQR,
}
# types of llama.cpp, which has rules for each matrix
MIXED = {mixtures.form_of(kind): kind for kind in mixtures.MIXTURES if kind not in mixtures.ONLY_WEIGHTED}
# the same with an importance matrix, which is calibrated
WEIGHTED = {mixtures.form_of(kind, True): kind for kind in mixtures.MIXTURES if kind != "Q8_0"}
HEAD_TOO = ", head too"  # a form with this ending is also that of the output head
VALUE_BITS = {"fp16, endor": 16, "int8, endor": 8}  # forms whose bitmap the entropy limit is about


@torch.no_grad()
def store(model: nn.Module, form: str, weights: mixtures.Importance | None = None) -> int:
    """Give every decoder linear the weight that its stored form decodes to, in place; return the bytes of all forms.

    `form` is a name in `FORMS`, in `MIXED`, or in `WEIGHTED` with an importance matrix. Raises `UserError` for an
    unknown form, and what its encoder raises.
    """
    encoders = list(_encoders(model, form, weights))
    nbytes = 0
    with progress(f"storing as {form}", len(encoders), "matrices") as bar:
        for linear, encoder in encoders:
            matrix = encoder(linear.weight.detach())
            linear.weight.copy_(matrix.decode())
            nbytes += matrix.nbytes
            bar.update()
    return nbytes


def _encoders(model: nn.Module, form: str, weights: mixtures.Importance | None) -> Iterator[tuple[nn.Linear, Encoder]]:
    if form in MIXED:
        return mixtures.encoders(model, MIXED[form])
    if form in WEIGHTED:
        return mixtures.encoders(model, WEIGHTED[form], weights)
    if form not in FORMS:
        raise unknown("form", form, FORMS | MIXED | WEIGHTED)
    return ((linear, FORMS[form]) for linear in linears(model))


def store_head(model: nn.Module, form: str, gram: Float[Tensor, "columns columns"] | None = None) -> int:
    """Give the output head the weight that a form in `FORMS` or `SPQR` decodes to, in place; return the form's bytes.

    `gram` is XᵀX of the head's inputs, which the latter need.
    """
    weight = model.get_output_embeddings().weight.detach()
    matrix = SPQR[form](weight.float(), gram) if form in SPQR else FORMS[form](weight)
    weight.copy_(matrix.decode())
    return matrix.nbytes


@contextmanager
def own_head(model: nn.Module) -> Iterator[None]:
    """Inside the block the output head is a copy of its own, which may change."""
    head = model.get_output_embeddings()
    kept = head.weight
    head.weight = nn.Parameter(kept.detach().clone(), requires_grad=False)
    try:
        yield
    finally:
        head.weight = kept


def size_of(weights: Sequence[Tensor], nbytes: int, form: str) -> dict[str, float | str]:
    """The size of weights that a form stores in so many bytes.

    Keys: zeros (share of the weights), bits_per_weight, ratio (over 16 bits), entropy_bits (NaN for forms without a
    bitmap).
    """
    elements = sum(weight.numel() for weight in weights)
    share = (elements - sum(int((weight != 0).sum()) for weight in weights)) / elements
    bits = 8 * nbytes / elements
    limit = entropy_bits(share, VALUE_BITS[form]) if form in VALUE_BITS else np.nan
    return {"zeros": share, "bits_per_weight": bits, "ratio": bits / HALF_BITS, "entropy_bits": limit}


def linears(model: nn.Module) -> list[nn.Linear]:
    """All decoder linears of a model."""
    return [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]


def entropy_bits(sparsity: float, value_bits: int) -> float:
    """Bits a weight that no bitmap can go below where zeros fall at random: H(s) + (1 − s) · value_bits.

    H is the binary entropy: a code for the positions that is as short as can be, instead of one bit each.
    """
    if not 0 <= sparsity <= 1:
        raise UserError(f"sparsity {sparsity!r} is out of range; expected a share of zeros in [0, 1]")
    shares = [share for share in (sparsity, 1 - sparsity) if share > 0]
    return float(-sum(share * np.log2(share) for share in shares) + (1 - sparsity) * value_bits)
