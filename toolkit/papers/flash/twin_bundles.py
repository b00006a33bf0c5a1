"""A shape-only twin of a model on disk, by neuron: what `toolkit.papers.flash.replay` reads.

    store = twin_bundles("opt-6.7b", layers=4)
    store.layer(0, "bundled"), store.layer(0, "split"), store.layer(0, "attention")

Weights are random fp16 values: latency does not depend on them. Each layer has the same ones with its neurons in
another order, so no layer can stand in for another. Embeddings, norms and biases are left out.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from toolkit.cache import kept_folder
from toolkit.errors import UserError
from toolkit.formats.dense import Dense
from toolkit.models.ffn import FFN
from toolkit.models.plain import linear
from toolkit.models.shapes import SHAPES, ffn_names, part_bytes, random_pruned, twin_shapes
from toolkit.storage.bundles import LAYOUTS, bundle_ops
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

ATTENTION = "attention"  # the variant of the matrices that are no FFN's
DTYPE = torch.float16


def twin_bundles(model: str, layers: int) -> Store:
    """The store of a model of `SHAPES` with so many layers, from the cache: FFNs in both layouts, attention dense.

    Raises `UserError` for an unknown model or a part of one, rows that are no whole blocks, or a disk too small.
    """
    if model not in SHAPES:
        raise UserError(f"twin model {model!r}: expected a whole model, one of {', '.join(SHAPES)}")
    if neuron_shape(model)[1] * DTYPE.itemsize % BLOCK_BYTES:
        raise UserError(
            f"twin model {model!r}: its rows are no whole blocks of {BLOCK_BYTES} bytes; choose a wider one"
        )
    return Store.open(_written(model, layers) / "store")


def neuron_shape(model: str) -> tuple[int, int, bool]:
    """Neurons of a layer, hidden size, and whether there is a gate. Raises `UserError` for an unknown model."""
    shapes = twin_shapes(model)
    gate, up, _ = ffn_names(shapes)
    return (*shapes[up], gate is not None)


@kept_folder("twin_bundles")
def _written(folder: Path, model: str, layers: int) -> None:
    sizes = part_bytes(model, DTYPE.itemsize)
    expected = layers * (len(LAYOUTS) * sizes["ffn"] + sizes[ATTENTION])
    write_store(folder / "store", _ops(model, layers), model={"name": model}, expected_bytes=expected)


def _ops(model: str, layers: int) -> Iterator[Op]:
    weights = {op: random_pruned(shape, 0, DTYPE, seed) for seed, (op, shape) in enumerate(twin_shapes(model).items())}
    names = ffn_names(weights)
    ffns = (_ffn(*(weights.get(name) for name in names), shift=layer) for layer in range(layers))
    for op in bundle_ops(ffns, LAYOUTS):
        yield op
    for layer in range(layers):
        for op in sorted(weights.keys() - set(names)):
            yield Op(layer, op, ATTENTION, Dense.encode(weights[op].roll(layer, 0)))


def _ffn(gate: Tensor | None, up: Tensor, down: Tensor, shift: int) -> FFN:
    """The FFN with its neurons moved on by `shift`."""
    return FFN.of(
        linear(up.roll(shift, 0)),
        linear(down.roll(shift, 1)),
        linear(gate.roll(shift, 0)) if gate is not None else None,
    )
