"""Shape-only twins of paper-scale layers. Time does not depend on the values of weights, so random ones are timed."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.models.architectures import ARCHITECTURES, FFN_NAMES

# model -> layer of one decoder block -> (outputs, inputs), under the names that transformers gives them
SHAPES = {
    name: ARCHITECTURES[name].matrices
    for name in (
        *("opt-1536", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-30b", "opt-66b"),
        *("tinyllama-1.1b", "llama2-7b", "llama2-70b"),
    )
}

ROWS_AT_ONCE = 64
DRAWN_ROWS = 1024  # rows after them are the same, shifted: so far apart that no codec finds them again


def twin_shapes(model: str) -> dict[str, tuple[int, int]]:
    """The layers of a model of `SHAPES`, or of a part of it: "opt-66b/8" has an eighth of each matrix's rows.

    Rows keep their length, so each costs what it does in the whole matrix. Raises `UserError` for an unknown model, or
    a divisor that does not leave whole rows.
    """
    name, slash, divisor = model.partition("/")
    if name not in SHAPES:
        raise unknown("twin model", name, SHAPES)
    fewest = min(rows for rows, _ in SHAPES[name].values())
    parts = (int(divisor) if divisor.isdecimal() else 0) if slash else 1
    if not parts or fewest % parts:
        raise UserError(f"twin model {model!r}: expected a divisor of {fewest}, its fewest rows, such as {name}/8")
    return {op: (rows // parts, columns) for op, (rows, columns) in SHAPES[name].items()}


def part_bytes(model: str, element_bytes: int) -> dict[str, int]:
    """Bytes of one layer's weights by part: "ffn" and "attention". Raises `UserError` for an unknown model."""
    sizes = {op: rows * columns * element_bytes for op, (rows, columns) in twin_shapes(model).items()}
    ffn = sum(sizes[op] for op in ffn_names(sizes) if op)
    return {"ffn": ffn, "attention": sum(sizes.values()) - ffn}


def neuron_bytes(model: str, element_bytes: int, layout: str) -> int:
    """Bytes of one read: all of a neuron's weights where they are "bundled", else a row of one matrix."""
    shapes = twin_shapes(model)
    names = [name for name in ffn_names(shapes) if name]
    row = shapes[names[-2]][1] * element_bytes
    return row * len(names) if layout == "bundled" else row


def ffn_names(ops) -> tuple[str | None, str, str]:
    """The names of gate (or None), up and down projection among the ops of a layer."""
    *gate, up, down = next(names for names in FFN_NAMES.values() if set(names) <= set(ops))
    return (gate[0] if gate else None), up, down


def random_pruned(
    shape: tuple[int, int], sparsity: float, dtype: torch.dtype = torch.float16, seed: int = 0
) -> Float[Tensor, "outputs inputs"]:
    """A random weight whose `round(sparsity · inputs)` smallest values of each row are exactly zero, and no other.

    Values are normal with a standard deviation of 0.02 (int8: 32). No kept value rounds to zero. The same arguments
    give the same weight on any number of threads. Peak memory is the weight plus a few blocks of rows.
    Raises `UserError` if the sparsity is outside [0, 1].
    """
    if not 0 <= sparsity <= 1:
        raise UserError(f"sparsity {sparsity!r} is outside [0, 1]: it is the share of zeros")
    weight = torch.empty(shape, dtype=dtype)
    zeros = round(sparsity * shape[1])
    scale, floor, ceiling = (32, 1, 127) if dtype == torch.int8 else (0.02, 1e-4, np.inf)

    def fill(start: int) -> None:
        block = weight[start : start + ROWS_AT_ONCE]
        values = np.random.default_rng([seed, start]).standard_normal(block.shape, dtype=np.float32)
        pruned = _smallest(values, zeros) if zeros else np.zeros(block.shape, dtype=bool)
        values = np.copysign(np.clip(np.abs(values) * scale, floor, ceiling), values)
        values[pruned] = 0
        block.copy_(torch.from_numpy(values))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, min(shape[0], DRAWN_ROWS), ROWS_AT_ONCE)))
    for number, start in enumerate(range(DRAWN_ROWS, shape[0], DRAWN_ROWS), 1):
        rows = weight[start : start + DRAWN_ROWS]
        rows.copy_(weight[: len(rows)].roll(number, dims=1))
    return weight


def _smallest(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of exactly `count` smallest magnitudes in each row.

    The bits of |x| have the order of |x|. Their lowest bits hold the column: every key is unique, so ties add no zeros.
    """
    columns = values.shape[1]
    keys = np.abs(values).view(np.uint32) >> columns.bit_length() << columns.bit_length()
    keys |= np.arange(columns, dtype=np.uint32)
    return keys <= np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
