"""FFNs stored by neuron, so that some neurons of a layer can be read (LLM in a flash, section 3.2).

A neuron has a gate row (if the FFN has a gate), an up row and a down column. The variant "bundled" of a store holds
them side by side: one range a neuron, which starts on a block and ends with one. "split" is what that is compared with:
a matrix each, the down projection transposed, so two or three shorter ranges a neuron.

    write_bundles(folder, model, "smollm2-135m")
    layer = Store.open(folder).layer(0, "bundled")
    with open_reader("threads", store, "bundled") as reader:
        read_neurons(reader, layer, neurons, rows, aligned_buffer(buffer_bytes(layer, most_neurons)))
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import unknown
from toolkit.formats.dense import Dense
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers.base import Reader
from toolkit.storage.runs import Layer, Part
from toolkit.storage.writing import Op, write_store

LAYOUTS = ("bundled", "split")


def write_bundles(folder: Path, model: nn.Module, name: str, layouts: Iterable[str] = ("bundled",)) -> None:
    """Write the FFNs of a model, without their biases, into a new folder: a store with a variant for each layout.

    Raises `UserError` for an unknown layout or FFN, and as `write_store` does.
    """
    layouts = tuple(layouts)
    for layout in layouts:
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
    ffns = decoder_ffns(model)
    nbytes = sum(len(layouts) * len(parts(ffn)) * ffn.down.weight.nbytes for ffn in ffns)
    write_store(folder, bundle_ops(ffns, layouts), model={"name": name}, expected_bytes=nbytes)


def parts(ffn: FFN) -> dict[str, Float[Tensor, "neurons hidden"]]:
    """The matrices of an FFN with a row for each neuron, in the order of a bundle."""
    gate = {"gate": ffn.gate.weight.detach()} if ffn.gate else {}
    return gate | {"up": ffn.up.weight.detach(), "down": ffn.down.weight.detach().T}


def neuron_part(layer: Layer, neurons: Int64[np.ndarray, " neurons"]) -> Part:
    """The weights of some neurons as a part of a layer: neurons that follow each other are one range in each matrix.

    Raises `UserError` for a neuron that the layer does not have.
    """
    spans = _spans(neurons)
    return Part({f"{op}:{first}": run.rows(first, end) for op, run in layer.ops.items() for first, end in spans})


def buffer_bytes(layer: Layer, neurons: int) -> int:
    """Bytes that `read_neurons` needs for so many neurons, however they lie."""
    rows = (run.shape[1] * run.dtype.itemsize for run in layer.ops.values())
    # a row that is no whole number of blocks may begin and end within a block
    return neurons * sum(
        -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES * (nbytes % BLOCK_BYTES > 0) for nbytes in rows
    )


def read_neurons(
    reader: Reader,
    layer: Layer,
    neurons: Int64[np.ndarray, " neurons"],
    rows: Float[Tensor, "neurons width"],
    buffer: UInt8[np.ndarray, " bytes"],
) -> None:
    """Read the bundles of some neurons, each once, into `rows`, through an aligned buffer.

    Raises what `neuron_part` and `Reader.read` raise; `rows` are undefined then.
    """
    part = neuron_part(layer, neurons)
    reader.read(part.ranges, buffer)
    found, spans = part.view(buffer), _spans(neurons)
    left, width = 0, rows.shape[1] // len(layer.ops)
    for op in layer.ops:
        top = 0
        for first, end in spans:
            rows[top : top + end - first, left : left + width] = found[f"{op}:{first}"].values[:, :width]
            top += end - first
        left += width


def bundle_ops(ffns: list[FFN], layouts: Iterable[str]) -> Iterator[Op]:
    """The FFNs as ops of a store, layer by layer."""
    for layer, ffn in enumerate(ffns):
        for layout in layouts:
            matrices = parts(ffn)
            if layout == "bundled":
                matrices = {"bundle": _whole_blocks(torch.cat([*matrices.values()], dim=1))}
            for name, matrix in matrices.items():
                yield Op(layer, f"ffn.{name}", layout, Dense.encode(matrix.contiguous()))


def _whole_blocks(bundles: Float[Tensor, "neurons width"]) -> Float[Tensor, "neurons padded"]:
    """Zeros behind each bundle, up to a block's end: a direct read is of whole blocks anyway."""
    block = BLOCK_BYTES // bundles.element_size()
    return functional.pad(bundles, (0, -bundles.shape[1] % block))


def _spans(neurons: Int64[np.ndarray, " neurons"]) -> list[tuple[int, int]]:
    """The first neuron of each run of neurons that follow each other, and the one behind its last."""
    breaks = np.flatnonzero(np.diff(neurons) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(neurons, breaks) if len(run)]
