"""Quantised weights of random contents. Latency does not depend on them, and quantising a whole model takes long."""

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.formats.ggml import TYPES, BlockMatrix
from toolkit.formats.spqr import SpQRMatrix
from toolkit.kernels import csr
from toolkit.kernels.blocks import PLAIN
from toolkit.kernels.neurons import records
from toolkit.kernels.spqr.layout import second_order_bytes, tiles
from toolkit.kernels.spqr.shared import SECOND_ORDER, TILE
from toolkit.quantization import neuron_records

# fp16, in the order of `toolkit.kernels.spqr.layout`: scales from 0.002 to 0.009, zero points from 2.5 to 4.25
STATISTICS = (0.001, 0.25, -2.0, -10.0)
TEMPLATE = 8  # neurons that are quantised for the scales of all
OUTLIER = 0.1  # the standard deviation of what outliers add
# Where the blocks of ggml have their fp16 numbers, and what these are for weights of mean 0 and deviation 1, where all
# other bytes are random: a scale, and for some types a minimum. MXFP4 has the exponent alone, one byte, and NVFP4 four
# scales of a byte. IQ1_M has the bits of its scale in the upper halves of four bytes.
HALVES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1 / 4.612},
    "Q4_1": {0: 1 / 4.61, 2: -7.5 / 4.61},
    "Q5_0": {0: 1 / 9.22},
    "Q5_1": {0: 1 / 9.23, 2: -15.5 / 9.23},
    "Q8_0": {0: 1 / 73.8},
    "Q2_K": {80: 1 / 13.87, 82: 1.5 / 13.87},
    "Q3_K": {108: 1 / 43.2},
    "Q4_K": {0: 1 / 259, 2: 7.5 / 259},
    "Q5_K": {0: 1 / 529, 2: 15.5 / 529},
    "Q6_K": {208: 1 / 1363},
    "IQ1_S": {0: 1 / 7.2},
    "IQ2_XXS": {0: 1 / 53.3},
    "IQ2_XS": {0: 1 / 55.8},
    "IQ2_S": {0: 1 / 56.6},
    "IQ3_XXS": {0: 1 / 143},
    "IQ3_S": {0: 1 / 140},
    "IQ4_NL": {0: 1 / 67.3},
    "IQ4_XS": {0: 1 / 1244},
    "TQ1_0": {52: 1 / 0.817},
    "TQ2_0": {64: 1 / 1.12},
}
IQ1_M_SCALE, IQ1_M_UNIT = (49, 51, 53, 55), 1 / 7.2
MXFP4_UNIT = 2.935  # the deviation of its sixteen numbers; an exponent of 127 multiplies them by 1
NVFP4_SCALES, NVFP4_UNIT = 4, 0.0171 / 3  # the deviation where the scales' bytes are 1; they are linear up to 8
SPREAD = 0.3  # scales differ by up to this share


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
    template = neuron_records.encode(gate, up, down, bits, neuron_records.min_max)
    made = template[torch.arange(neurons) % len(template)]
    nbytes, start = records.section_bytes(hidden, bits), records.codes_start(hidden, bits)
    rng = np.random.default_rng(seed)
    for section in range(records.SECTIONS):
        codes = made[:, section * nbytes + start : (section + 1) * nbytes]
        codes.copy_(torch.from_numpy(rng.integers(0, 256, tuple(codes.shape), np.uint8)))
    return made


def random_blocks(name: str, rows: int, columns: int, seed: int = 0, deviation: float = 0.02) -> BlockMatrix:
    """A matrix of random blocks of ggml's type `name`: valid, finite, with weights of about this deviation, mean 0.

    Gigabytes take seconds. Raises `UserError` for an unknown type, and `ValueError` for columns that fill no whole
    blocks.
    """
    if name not in TYPES:
        raise unknown("block type", name, TYPES)
    layout, rng = TYPES[name].layout, np.random.default_rng(seed)
    if name in PLAIN:
        numbers = torch.from_numpy(rng.standard_normal((rows, columns), np.float32) * np.float32(deviation))
        data = numbers.to(getattr(torch, PLAIN[name])).view(torch.uint8)
    else:
        count = rows * layout.row_bytes(columns)
        data = rng.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]
        _set_scales(name, data.reshape(-1, layout.nbytes), deviation, rng)
        data = torch.from_numpy(data).view(rows, layout.row_bytes(columns))
    return TYPES[name]((rows, columns), data)


def _set_scales(name: str, data: UInt8[np.ndarray, "blocks bytes"], deviation: float, rng: np.random.Generator) -> None:
    """Overwrite the scales of random blocks."""
    factors = deviation * rng.uniform(1 - SPREAD, 1 + SPREAD, len(data)).astype(np.float32)
    for place, unit in HALVES.get(name, {}).items():
        data[:, place : place + 2] = (factors * unit).astype(np.float16)[:, None].view(np.uint8)
    if name == "IQ1_M":
        bits = (factors * IQ1_M_UNIT).astype(np.float16).view(np.uint16)
        for number, place in enumerate(IQ1_M_SCALE):
            data[:, place] = data[:, place] & 15 | (bits >> 4 * number & 15) << 4
    elif name == "MXFP4":
        data[:, 0] = 127 + round(np.log2(deviation / MXFP4_UNIT))
    elif name == "NVFP4":
        data[:, :NVFP4_SCALES] = np.clip(round(deviation / NVFP4_UNIT), 1, 8)


def _places(rng: np.random.Generator, count: int, share: float) -> np.ndarray:
    """Each of 0 to count - 1 with this probability, rising: distances between neighbours have a geometric law."""
    if not share:
        return np.empty(0, np.int64)
    enough = int(count * share + 10 * (count * share) ** 0.5 + 10)
    found = rng.geometric(share, enough).cumsum() - 1
    return found[found < count]
