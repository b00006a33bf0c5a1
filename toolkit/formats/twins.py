"""Quantised weights of random contents. Latency does not depend on them, and quantising a whole model takes long."""

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.spqr import SpQRMatrix
from toolkit.kernels import csr
from toolkit.kernels.neurons import records
from toolkit.kernels.spqr.layout import second_order_bytes, tiles
from toolkit.kernels.spqr.shared import SECOND_ORDER, TILE
from toolkit.quantization import neuron_records

# fp16, in the order of `toolkit.kernels.spqr.layout`: scales from 0.002 to 0.009, zero points from 2.5 to 4.25
STATISTICS = (0.001, 0.25, -2.0, -10.0)
TEMPLATE = 8  # neurons that are quantised for the scales of all
OUTLIER = 0.1  # the standard deviation of what outliers add


def random_spqr(
    form: type[SpQRMatrix], shape: tuple[int, int], dtype: torch.dtype, outliers: float = 0.01, seed: int = 0
) -> SpQRMatrix:
    """A matrix whose every weight has a random code and with probability `outliers` an outlier, its columns in order.

    Both forms of one seed have the same weights. Raises `UserError` unless both sizes are multiples of 16, and for a
    share of outliers that is not from 0 to 1.
    """
    if shape[0] % TILE or shape[1] % TILE or not 0 <= outliers <= 1:
        raise UserError(f"shape {shape}, outliers {outliers}: expected multiples of {TILE}, and a share from 0 to 1")
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << SECOND_ORDER, (*tiles(shape), TILE), np.uint64)
    statistics = torch.tensor(STATISTICS, dtype=torch.float16).expand(*tiles(shape), -1)
    words |= second_order_bytes(statistics).astype(np.uint64) << np.uint64(SECOND_ORDER)
    places = _places(rng, shape[0] * shape[1], outliers)
    values = torch.from_numpy(OUTLIER * rng.standard_normal(len(places), np.float32)).half()
    rows, columns = (torch.from_numpy(each) for each in np.divmod(places, shape[1]))
    placed = csr.encode(form.storage, shape, rows, columns, values)
    return form(shape, dtype, torch.from_numpy(words.view(np.int64)), placed.offsets, placed.col_vals)


def random_records(neurons: int, hidden: int, bits: int, seed: int = 0) -> UInt8[Tensor, "neurons stride"]:
    """Quantised neurons whose every code is random; scales and zero points are those of a few random neurons.

    Raises `UserError` as `neuron_records.encode` does.
    """
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(3, min(neurons, TEMPLATE), hidden, generator=generator) * hidden**-0.5
    gate, up, down = few
    template = neuron_records.encode(gate, up, down, bits)
    made = template[torch.arange(neurons) % len(template)]
    nbytes, start = records.section_bytes(hidden, bits), records.codes_start(hidden, bits)
    rng = np.random.default_rng(seed)
    for section in range(records.SECTIONS):
        codes = made[:, section * nbytes + start : (section + 1) * nbytes]
        codes.copy_(torch.from_numpy(rng.integers(0, 256, tuple(codes.shape), np.uint8)))
    return made


def _places(rng: np.random.Generator, count: int, share: float) -> np.ndarray:
    """Each of 0 to count - 1 with this probability, rising: distances between neighbours have a geometric law."""
    if not share:
        return np.empty(0, np.int64)
    enough = int(count * share + 10 * (count * share) ** 0.5 + 10)
    found = rng.geometric(share, enough).cumsum() - 1
    return found[found < count]
