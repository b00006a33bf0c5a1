"""FFNs stored by neuron, so that some neurons of a layer can be read (LLM in a flash, section 3.2).

A neuron has a gate row (if the FFN has a gate), an up row and a down column. The variant "bundled" of a store holds
them side by side: one range per neuron, of whole blocks. The variant "split" is its rival: one matrix each, the down
projection transposed, so two or three shorter ranges per neuron.

    write_store(folder, bundle_ops(decoder_ffns(model), ["bundled"]))
    layer = Store.open(folder).layer(0, "bundled")
    with open_reader(None, store, "bundled") as reader:
        read_neurons(reader, layer, neurons, rows, aligned_buffer(buffer_bytes(layer, most_neurons)))

Reads go straight into `rows` where weights are whole blocks and `rows` are aligned, as a `NeuronStore`'s are; otherwise
through the buffer. Reads are planned in arrays: no Python object is made for a neuron.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.formats.dense import Dense
from toolkit.models.ffn import FFN
from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import BLOCK_BYTES, whole_blocks
from toolkit.storage.readers.base import Reader
from toolkit.storage.runs import Layer, OpRun
from toolkit.storage.shards import Piece
from toolkit.storage.writing import Op

LAYOUTS = ("bundled", "split")
BITS = {2: torch.int16, 4: torch.int32}  # NumPy knows no bf16


def parts(ffn: FFN) -> dict[str, Float[Tensor, "neurons hidden"]]:
    """The matrices of an FFN with a row for each neuron, in the order of a bundle."""
    gate = {"gate": ffn.gate.weight.detach()} if ffn.gate else {}
    return gate | {"up": ffn.up.weight.detach(), "down": ffn.down.weight.detach().T}


def bundle_ops(ffns: Iterable[FFN], layouts: Iterable[str], first: int = 0) -> Iterator[Op]:
    """FFNs, without their biases, as ops of a store, layer by layer from number `first` on, in each layout."""
    for layer, ffn in enumerate(ffns, first):
        for layout in layouts:
            matrices = parts(ffn)
            if layout == "bundled":
                matrices = {"bundle": _whole_blocks(torch.cat([*matrices.values()], dim=1))}
            for name, matrix in matrices.items():
                yield Op(layer, f"ffn.{name}", layout, Dense.encode(matrix.contiguous()))


def buffer_bytes(layer: Layer, neurons: int, gap_bytes: int = 0) -> int:
    """Bytes that `read_neurons` needs for so many neurons, however they lie."""
    return sum(min(neurons * (_blocks(run) + gap_bytes), run.nbytes + BLOCK_BYTES) for run in layer.ops.values())


def read_neurons(
    reader: Reader,
    layer: Layer,
    neurons: Int64[np.ndarray, " neurons"],
    rows: Float[Tensor, "neurons width"],
    buffer: UInt8[np.ndarray, " bytes"],
    gap_bytes: int = 0,
) -> None:
    """Read the weights of some neurons, in rising order and each once, into `rows`.

    `buffer` is aligned and has `buffer_bytes`. Reads through it continue over gaps of up to `gap_bytes` between
    neurons: a short gap costs the disk less than one more request (`Storage.gap_bytes`). Raises `UserError` for neurons
    that the layer does not have, or a layer of packed weights, and what `Reader.read` raises; `rows` are undefined
    then.
    """
    _check(layer, neurons)
    if not len(neurons):
        return
    if (target := _aligned_bytes(layer, rows)) is not None:
        reader.read([straight_chunks(layer, neurons)], target)
        return
    chunks, places = buffered_chunks(layer, neurons, gap_bytes)
    reader.read([chunks], buffer)
    bits, left, width = BITS[rows.element_size()], 0, rows.shape[1] // len(layer.ops)
    for op in layer.ops:
        _gather(buffer, places[op], rows.view(bits).numpy()[:, left : left + width])
        left += width


def straight_chunks(layer: Layer, neurons: Int64[np.ndarray, " neurons"]) -> Chunks:
    """Reads that put row after row of a matrix: the weights of a neuron side by side, in the order of the ops."""
    sizes = np.array([_row_bytes(run) for run in layer.ops.values()])
    firsts = np.array([_first_byte(run) for run in layer.ops.values()])
    offsets = firsts + neurons[:, None] * sizes
    lefts = np.cumsum(sizes) - sizes
    places = np.arange(len(neurons))[:, None] * sizes.sum() + lefts
    sizes = np.broadcast_to(sizes, offsets.shape)
    return Chunks(layer.shard, offsets.ravel(), sizes.ravel(), places.ravel()).joined()


def buffered_chunks(
    layer: Layer, neurons: Int64[np.ndarray, " neurons"], gap_bytes: int = 0
) -> tuple[Chunks, dict[str, Int64[np.ndarray, " neurons"]]]:
    """Reads of the blocks around each neuron's weights, and where in the buffer each neuron's begin, by op.

    Blocks that overlap, follow each other or leave a gap of up to `gap_bytes` are one read.
    """
    found, places, filled = [], {}, 0
    for name, run in layer.ops.items():
        starts = _first_byte(run) + neurons * _row_bytes(run)
        low = starts // BLOCK_BYTES * BLOCK_BYTES
        high = -(-(starts + _row_bytes(run)) // BLOCK_BYTES) * BLOCK_BYTES
        opens = np.concatenate([[True], low[1:] - high[:-1] > gap_bytes])[: len(neurons)]
        offsets, sizes = low[opens], high[np.roll(opens, -1)] - low[opens]
        begins = filled + np.cumsum(sizes) - sizes
        owner = np.cumsum(opens) - 1
        places[name] = begins[owner] + starts - offsets[owner]
        found.append((offsets, sizes, begins))
        filled += int(sizes.sum())
    return Chunks(layer.shard, *map(np.concatenate, zip(*found, strict=True))), places


def adjoining(run: OpRun, first: int, last: int) -> OpRun:
    """The neurons from `first` up to, not including, `last` of a run of bundles, as a run. It has no checksum."""
    shape, row = (last - first, run.shape[1]), _row_bytes(run)
    place = {"offset": _first_byte(run) + first * row, "nbytes": shape[0] * row}
    return replace(run, **place, sha256="", shape=shape, pieces={"values": Piece(run.dtype, shape, 0)})


def _aligned_bytes(layer: Layer, rows: Float[Tensor, "neurons width"]) -> UInt8[np.ndarray, " bytes"] | None:
    """The memory of `rows`, if reads can fill it directly; None where blocks do not fit rows."""
    runs = layer.ops.values()
    places = [number for run in runs for number in (_row_bytes(run), _first_byte(run))]
    fits = sum(map(_row_bytes, runs)) == rows.shape[1] * rows.element_size() and rows.is_contiguous()
    if not fits or any(number % BLOCK_BYTES for number in [*places, rows.data_ptr()]):
        return None
    return rows.view(torch.uint8).view(-1).numpy()


def _gather(buffer: np.ndarray, places: Int64[np.ndarray, " neurons"], into: np.ndarray) -> None:
    """Copy a row of `into` from each place of the buffer."""
    values = buffer[: buffer.nbytes // into.itemsize * into.itemsize].view(into.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(values, into.shape[1])
    into[:] = windows[places // into.itemsize]


def _check(layer: Layer, neurons: Int64[np.ndarray, " neurons"]) -> None:
    if (np.diff(neurons) < 1).any():
        raise UserError("neurons to read: expected rising numbers, each once")
    for run in layer.ops.values():
        if run.format != Dense.name:
            raise UserError(f"{run.label} is {run.format}: expected bundles, which `bundle_ops` makes")
        if len(neurons) and not 0 <= neurons[0] <= neurons[-1] < run.shape[0]:
            raise UserError(f"neurons {neurons[0]} to {neurons[-1]}: {run.label} has 0 to {run.shape[0] - 1}")


def _row_bytes(run: OpRun) -> int:
    return run.shape[1] * run.dtype.itemsize


def _first_byte(run: OpRun) -> int:
    return run.offset + run.pieces["values"].offset


def _blocks(run: OpRun) -> int:
    """Bytes of the blocks around a row; one that is no whole number of blocks may begin and end within a block."""
    row = _row_bytes(run)
    return whole_blocks(row) + BLOCK_BYTES * (row % BLOCK_BYTES > 0)


def _whole_blocks(bundles: Float[Tensor, "neurons width"]) -> Float[Tensor, "neurons padded"]:
    """Pad each bundle with zeros to whole blocks, since direct reads are of whole blocks anyway."""
    block = BLOCK_BYTES // bundles.element_size()
    return functional.pad(bundles, (0, -bundles.shape[1] % block))
