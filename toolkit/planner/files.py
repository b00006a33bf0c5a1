"""The ways of running a GGUF file as it is: its blocks are multiplied as they lie, by the toolkit or by llama.cpp."""

from collections import Counter
from functools import cache
from math import ceil
from pathlib import Path

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.models.gguf_header import GgufHeader, read_header
from toolkit.offload.decoder.architecture import Architecture, architecture_of
from toolkit.offload.decoder.experts import least_experts_bytes
from toolkit.offload.decoder.weights import DecoderFile
from toolkit.offload.methods import GGUF, LLAMA_CPP, PACKED
from toolkit.offload.placement import least_bytes
from toolkit.offload.ways import POLICIES
from toolkit.planner.footprint import FileBytes, Footprint
from toolkit.planner.ways import EXPERTS, RIVAL, STREAMED, PlannedWay
from toolkit.storage.buffers import buffer_bytes
from toolkit.storage.experts import LAYOUT
from toolkit.storage.gguf_store import VARIANT, GgufStore

EMBEDDING, HEAD = "token_embd.weight", "output.weight"  # names of tensors
ROUTED = "_exps."  # in the names of those that hold all experts of a block


@cache
def ways_of_file(file: Path, shape: ModelShape) -> tuple[PlannedWay, ...]:
    """The ways of a file with a model of this shape; of llama.cpp alone where the toolkit cannot run it as it is."""
    header = read_header(file)
    types, kind = _token_types(header, shape), header.quantisation
    most, whole = types.most_common(1)[0][0], Footprint(0, _whole_bytes(header), 1, 0)
    timed = next((name for name, known in LLAMA_CPP.items() if known == most), "")  # whose rate in memory is known
    rival = PlannedWay(f"llama.cpp, as it is, {kind}", RIVAL, "dense", timed, file=FileBytes(whole, types))
    try:
        memory = _memory(header, shape)
    except UserError:  # its blocks cannot be used as they lie
        return (rival,)
    way = EXPERTS if shape.experts else STREAMED
    of_file = FileBytes(memory, types)
    return PlannedWay(f"as it is, {kind}", way, "dense", f"{GGUF}{PACKED}", head=GGUF, file=of_file), rival


def _token_types(header: GgufHeader, shape: ModelShape) -> Counter[str]:
    """The bytes of the matrices that a token is multiplied with, by the type of their blocks."""
    types: Counter[str] = Counter()
    for name, tensor in header.tensors.items():
        if len(tensor.shape) > 1 and (name != EMBEDDING or HEAD not in header.tensors):
            share = shape.experts_per_token / shape.experts if ROUTED in name else 1
            types[tensor.kind] += round(share * tensor.nbytes)
    return types


def _whole_bytes(header: GgufHeader) -> int:
    """The bytes of all tensors; of an embedding that is not the head as well, hardly any page is ever needed."""
    without = {EMBEDDING} if HEAD in header.tensors else set()
    return sum(tensor.nbytes for name, tensor in header.tensors.items() if name not in without)


def _memory(header: GgufHeader, shape: ModelShape) -> Footprint:
    """The memory that a file takes: without torch, or with it where that way does not know the model."""
    if sizes := architecture_of(header):
        return _in_pieces(DecoderFile.of(header, sizes), sizes)
    return _footprint(GgufStore.open(header.file), shape)


def _in_pieces(file: DecoderFile, sizes: Architecture) -> Footprint:
    """As `toolkit.offload.decoder` shares memory out: a block passes through memory in pieces.

    The parts of a mixture are its experts; the pieces beside them count as so many of these.
    """
    pieces = [piece.nbytes for piece in file.layers]
    least = least_bytes(pieces, POLICIES["pipelined"].slots)
    if file.experts:
        one, whole = max(it.nbytes for it in file.experts), sum(len(it) * it.nbytes for it in file.experts)
        least += least_experts_bytes(file, sizes)
        return Footprint(file.vector_bytes, one, ceil((sum(pieces) + whole) / one), least)
    unit = ceil(sum(pieces[: len(pieces) - len(file.head)]) / sizes.blocks)
    return Footprint(file.vector_bytes, unit, ceil(sum(pieces) / unit), least, max(pieces))


def _footprint(store: GgufStore, shape: ModelShape) -> Footprint:
    """As `toolkit.offload` shares memory out: parts of the head count as layers, as they do there.

    Prompts make one matrix dense, and in a mixture one of an expert besides.
    """
    layers = [layer for (_, variant), layer in store.layers.items() if variant == VARIANT]
    sizes, fixed = [layer.nbytes for layer in layers], store.rest_bytes + max(layer.dense_bytes for layer in layers)
    if shape.experts:
        mixtures = [layer for (_, variant), layer in store.layers.items() if variant == LAYOUT]
        experts = [op.nbytes for layer in mixtures for op in layer.ops.values()]
        one, used = max(experts), len(mixtures) * shape.experts_per_token
        fixed += buffer_bytes(sum(sizes)) + max(layer.dense_bytes for layer in mixtures)
        return Footprint(fixed, one, len(experts), buffer_bytes(used * one))
    unit = ceil(sum(sizes[: shape.layers]) / shape.layers)
    units, slots = ceil(sum(sizes) / unit), POLICIES["pipelined"].slots
    least = least_bytes(sizes, slots)
    return Footprint(fixed, unit, units, least)
