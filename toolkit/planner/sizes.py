"""Bytes of a model's parts as a way stores them, and the memory that `run` needs for it, or slightly more."""

import math
from dataclasses import replace

from toolkit.errors import UserError
from toolkit.formats import expected_nbytes
from toolkit.formats.packed import DTYPES
from toolkit.models.architectures import ModelShape
from toolkit.offload.by_neuron import GAP_BYTES, STAGED
from toolkit.offload.placement import Shares, fitting, needed_bytes
from toolkit.offload.ways import POLICIES
from toolkit.papers.corm.cost_model import active_weights, expert_weights
from toolkit.planner.footprint import Footprint
from toolkit.planner.ways import EXPERTS, INT8, NEURONS, RIVAL, WHOLE, PlannedWay
from toolkit.predictors.own_weights import nbytes_of as predictor_bytes
from toolkit.quantization.neuron_records import record_bytes
from toolkit.storage.buffers import buffer_bytes
from toolkit.storage.direct import BLOCK_BYTES, whole_blocks

DENSE_BITS, ELEMENT_BYTES = 16, 2  # of everything that a way leaves as it is
SCALE_BYTES = 2  # of a row of int8 weights
NORMS = 6  # of a layer, at most (Gemma 3)
OPT_VECTORS, OPT_POSITIONS = 9, 2050  # norms and biases of a layer that are as long as the hidden state; positions
MATRICES = 9  # of a layer beside routed experts, at most: attention, router, shared experts
SLOTS = POLICIES["pipelined"].slots
MORE_NEEDED = 1.05  # neurons that a token needs, over those that thresholds leave: predictors name some more


def footprint(shape: ModelShape, way: PlannedWay) -> Footprint:
    """The DRAM that a way of running a model of this shape takes.

    Raises `UserError` for experts in few bits where they are stored in 16 only.
    """
    if way.file:
        return way.file.memory
    if way.kind == RIVAL:
        return _of_rival(shape, way)
    if way.kind == EXPERTS:
        if shape.own_experts and round(way.bits) != DENSE_BITS:
            raise UserError(f"{way.name}: the experts have no separate neurons, so they are stored in 16 bits")
        return _of_experts(shape, way)
    if way.kind == NEURONS:
        return _of_neurons(shape, way)
    layer = layer_bytes(shape, way)
    units = shape.layers + math.ceil(packed_head_bytes(shape, way) / layer)  # parts of a head count as layers
    sizes = [layer] * units
    least = min(needed_bytes([], sizes, SLOTS), needed_bytes(sizes, [], SLOTS))
    return Footprint(_rest_bytes(shape, way) + _scratch_bytes(shape, way), layer, units, least)


def layers_that_stay(memory: Footprint, dram_bytes: float) -> int:
    """How many layers the runtime keeps in so many bytes, as `toolkit.offload.plan` places them."""
    staying, passing = ([nbytes] * memory.units for nbytes in (memory.unit_bytes, memory.passing_bytes))
    return fitting(staying, passing, SLOTS, dram_bytes - memory.fixed_bytes)


def layers_bytes(memory: Footprint, stay: int) -> int:
    """Bytes of so many layers that stay, and of the buffers that the others pass through."""
    return needed_bytes([memory.unit_bytes] * stay, [memory.passing_bytes] * (memory.units - stay), SLOTS)


def layer_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Bytes of a decoder layer on disk: each matrix takes whole blocks."""
    return sum(whole_blocks(_matrix_bytes(matrix, way)) for matrix in shape.matrices.values())


def expert_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Bytes of one expert on disk, with its scales."""
    bits = round(way.bits)
    if bits == DENSE_BITS:
        return expert_weights(shape) * ELEMENT_BYTES
    if way.stored.format != "dense":
        return sum(whole_blocks(_matrix_bytes(matrix, way)) for matrix in shape.ffn_matrices.values())
    return shape.ffn * record_bytes(shape.hidden, bits)


def neuron_bytes(shape: ModelShape) -> int:
    """Bytes of a neuron in memory; on disk it takes whole blocks."""
    return len(shape.ffn_matrices) * shape.hidden * ELEMENT_BYTES


def predictors_bytes(shape: ModelShape) -> int:
    """Bytes of all layers' predictors. Raises what `predictor_bytes` raises."""
    biases = 0 if shape.gated else shape.ffn * ELEMENT_BYTES
    return shape.layers * (predictor_bytes(shape.ffn, shape.hidden, shape.gated) + biases)


def packed_head_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Bytes of a head that is streamed like layers; 0 for one that stays in memory."""
    if way.head == WHOLE:
        return 0
    return _matrix_bytes((shape.vocabulary, shape.hidden), replace(way, sparsity=0.0, method=way.head_method))


def head_bytes(shape: ModelShape) -> int:
    """Bytes of a head in 16 bits."""
    return shape.vocabulary * shape.hidden * ELEMENT_BYTES


def token_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Bytes of weights that one token is multiplied with."""
    if way.file:
        return sum(way.file.types.values())
    if way.kind == RIVAL:
        return _rival_bytes(way, used_weights(shape), shape.parameters["head"] or shape.parameters["embedding"])
    if way.kind == NEURONS:
        dense = shape.parameters["attention"] * ELEMENT_BYTES + head_bytes(shape) + predictors_bytes(shape)
        return dense + round((1 - way.sparsity) * shape.parameters["ffn"] * ELEMENT_BYTES)
    if way.kind == EXPERTS:
        experts = shape.experts_per_token * shape.routed_layers
        return experts * expert_bytes(shape, way) + _rest_bytes(shape, way)
    return shape.layers * layer_bytes(shape, way) + (packed_head_bytes(shape, way) or head_bytes(shape))


def _matrix_bytes(matrix: tuple[int, int], way: PlannedWay) -> int:
    form, rows = way.stored.format, matrix[0]
    scales = SCALE_BYTES * rows if way.dtype == INT8 else 0
    return expected_nbytes(form, matrix, way.sparsity, DTYPES[way.dtype]) + scales


def _scratch_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Scratch bytes in which prompts decode the largest matrix; of int8, also its integers unless stored dense."""
    largest = max(rows * columns for rows, columns in shape.matrices.values())
    widths = [ELEMENT_BYTES] if way.dtype == INT8 or way.stored.format != "dense" else []
    widths += [1] if way.dtype == INT8 and way.stored.format != "dense" else []
    return largest * sum(widths)


def _rest_bytes(shape: ModelShape, way: PlannedWay) -> int:
    """Bytes of all that stays in memory beside layers, or beside the weights of neurons or of routed experts.

    An embedding that is not the head as well stays on disk.
    """
    parts = shape.parameters
    held, matrices = parts["head"] or parts["embedding"] if way.head == WHOLE else 0, 1
    if way.kind == NEURONS:
        held, matrices = held + parts["attention"], matrices + MATRICES * shape.layers
    if shape.experts:
        on_disk = parts["embedding"] if parts["head"] else 0
        routed = shape.routed_layers * shape.experts * expert_weights(shape)
        held = sum(parts.values()) - parts["other"] - routed - on_disk
        matrices += MATRICES * shape.layers
    attention = shape.attention.values() if shape.experts else ()  # where experts are packed, it is, too
    saved = shape.layers * sum(math.prod(matrix) * ELEMENT_BYTES - _matrix_bytes(matrix, way) for matrix in attention)
    return held * ELEMENT_BYTES - saved + matrices * BLOCK_BYTES + _vector_bytes(shape)


def _vector_bytes(shape: ModelShape) -> int:
    """Bytes of norms, biases, learned positions and all else that is no matrix of a layer.

    A shape alone has none of them: the largest number of any model is assumed then.
    """
    if shape.others:
        return shape.other * ELEMENT_BYTES + shape.others * BLOCK_BYTES
    hidden, ffn = (whole_blocks(size * ELEMENT_BYTES) for size in (shape.hidden, shape.ffn))
    if shape.family != "opt":
        return (NORMS * shape.layers + 2) * hidden
    positions = OPT_POSITIONS * shape.hidden * ELEMENT_BYTES
    return shape.layers * (OPT_VECTORS * hidden + ffn) + 2 * hidden + whole_blocks(positions)


def _of_experts(shape: ModelShape, way: PlannedWay) -> Footprint:
    one, layers = expert_bytes(shape, way), shape.routed_layers
    shared = shape.shared_experts * expert_weights(shape) * ELEMENT_BYTES
    least = buffer_bytes(layers * shape.experts_per_token * one)
    return Footprint(_rest_bytes(shape, way) + shared, one, layers * shape.experts, least)


def _of_neurons(shape: ModelShape, way: PlannedWay) -> Footprint:
    """As `toolkit.offload.by_neuron` shares memory out."""
    one, neurons = neuron_bytes(shape), [shape.ffn] * shape.layers
    on_disk, most = whole_blocks(one), min(STAGED, shape.ffn)
    buffer = buffer_bytes(min(most * (on_disk + GAP_BYTES), shape.ffn * on_disk + BLOCK_BYTES))
    edges = BLOCK_BYTES * (shape.layers + 1)
    need = min(shape.ffn, round(MORE_NEEDED * (1 - way.sparsity) * shape.ffn) + 1)
    least = buffer_bytes(one * Shares.least([need] * shape.layers, neurons, most) + edges) - edges
    return Footprint(_rest_bytes(shape, way) + predictors_bytes(shape) + buffer + edges, one, sum(neurons), least)


def _of_rival(shape: ModelShape, way: PlannedWay) -> Footprint:
    """llama.cpp maps its file, so any memory is enough; pages that do not fit are read for each token."""
    parts = shape.parameters
    nbytes = _rival_bytes(way, sum(parts.values()), parts["embedding"] + parts["head"])
    return Footprint(0, nbytes, 1, 0)


def _rival_bytes(way: PlannedWay, weights: int, ends: int) -> int:
    """The bytes of so many weights; embedding and head, the `ends`, have 16 bits (`toolkit.interchange.gguf`)."""
    return round((weights - ends) * way.bits / 8) + ends * ELEMENT_BYTES


def used_weights(shape: ModelShape) -> int:
    """Weights that one token is multiplied with."""
    if shape.experts:
        return active_weights(shape)
    parts = shape.parameters
    return parts["attention"] + parts["ffn"] + (parts["head"] or parts["embedding"])
