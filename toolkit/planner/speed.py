"""How fast a way runs a model on this machine, predicted from rates that were measured with other models.

A token passes the layers: those in memory take their time, those on disk are read ahead, one while another is used
(`toolkit.papers.endor.cost_model`), and slow products down meanwhile. A mixture reads the experts that are not in
memory before it uses them. llama.cpp maps its file: pages outside memory are read for each token, at most at the disk's
rate. That is a limit, not a prediction, and so is the memory's rate where llama.cpp was not timed. Neurons are read
before they are used.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.machines.machine import GB, Links, Memory, Profile
from toolkit.machines.probe import probe, settings_for
from toolkit.models.architectures import ModelShape
from toolkit.offload.budget import BudgetError
from toolkit.offload.placement import LayerMap
from toolkit.offload.plan import OF_FREE
from toolkit.offload.ways import Way
from toolkit.papers.endor.cost_model import PlacedLayer, Weight, predict
from toolkit.planner import hits, sizes
from toolkit.planner.footprint import FileBytes, Footprint
from toolkit.planner.rates import BY_TORCH, DENSE, Cost, Rates, rates
from toolkit.planner.ways import BFLOAT16, EXPERTS, NEURONS, RIVAL, WHOLE, PlannedWay
from toolkit.storage.direct import whole_blocks

F16 = "llama.cpp F16"
PASSES = (2, 3)  # the time of one pass is the difference: reads go on from one token to the next
OPERATIONS = 2  # of a weight and a token


@dataclass(frozen=True)
class Speed:
    """The prediction for a way.

    seconds: a token's. first_s: until the first token after a prompt. read_bytes: from the disk, a token. dram_bytes:
    of weights and buffers. held: the share of layers, neurons or experts in memory. limit: "disk", "DRAM" or "compute",
    with a GPU also "GPU" or "copies": the largest part of a token's time. at_best: the time is a limit by bytes, not a
    prediction.
    """

    seconds: float
    first_s: float
    read_bytes: int
    dram_bytes: int
    held: float
    limit: str
    at_best: bool = False

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        return 1 / self.seconds


@dataclass(frozen=True)
class Machine:
    """A machine as a plan sees it: its profile, the rates of layers, and the bytes that weights may take."""

    profile: Profile
    rates: Rates
    dram_bytes: int


def this_machine(dram_bytes: int | None = None, fresh: bool = False) -> Machine:
    """This machine with so many bytes for weights; None takes as many as the runtime would.

    Its rates are measured once, and again if `fresh`.
    """
    found = _rates(fresh)
    links = replace(_profile().links, storage_to_dram_gb_s=found.read.gb_s)
    return Machine(replace(_profile(), links=links), found, dram_for_weights(dram_bytes))


def fitting(shape: ModelShape, racing: Iterable[PlannedWay], dram_bytes: int) -> list[PlannedWay]:
    """The ways that memory has room for. llama.cpp runs in any memory; a file that does not fit whole is left out."""
    found = []
    for way in racing:
        with suppress(UserError):  # of a way that this model does not have
            memory = sizes.footprint(shape, way)
            least = memory.all_bytes if way.kind == RIVAL else memory.needed_bytes
            found += [way] if least <= dram_bytes else []
    return found


def dram_for_weights(dram_bytes: int | None = None) -> int:
    """The bytes that weights may take; None stands for as many as the runtime would take."""
    return int(OF_FREE * memory_limits.free_bytes()) if dram_bytes is None else dram_bytes


@cache
def _profile() -> Profile:
    """This machine without its disk, whose rate is that of layers."""
    return probe(settings=replace(settings_for(memory_limits.total_bytes()), threads=()))


_rates = cache(rates)


def speed(shape: ModelShape, way: PlannedWay, machine: Machine, prompt_tokens: int) -> Speed:
    """The speed of a way.

    Raises `BudgetError` if the memory does not hold what the way needs at least; the message says how much that is.
    """
    memory = sizes.footprint(shape, way)
    if memory.needed_bytes > machine.dram_bytes:
        needed, given = ceil(memory.needed_bytes / 1e6), int(machine.dram_bytes / 1e6)
        raise BudgetError(f"{way.name}: needs {needed} MB of DRAM, {given} MB are given", memory.needed_bytes)
    kinds = {NEURONS: _neurons, EXPERTS: _experts, RIVAL: _rival}
    return kinds.get(way.kind, _layers)(shape, way, machine, memory, prompt_tokens)


def _layers(shape: ModelShape, way: PlannedWay, machine: Machine, memory: Footprint, prompt_tokens: int) -> Speed:
    stay = sizes.layers_that_stay(memory, machine.dram_bytes)
    cost = _cost(shape, way, machine)
    layer_s = cost.each_s + memory.unit_bytes / GB / cost.gb_s
    head_s = cost.once_s + (_product_s(machine, sizes.head_bytes(shape)) if way.head == WHOLE else 0.0)
    short, long = (_passes_s(machine, memory, stay, layer_s, head_s, count) for count in PASSES)
    read = (memory.units - stay) * memory.unit_bytes
    read_s = (memory.units - stay) * machine.rates.read.seconds(memory.unit_bytes)
    compute_s = memory.units * layer_s + head_s
    seconds = max(long - short, compute_s + machine.rates.slowdown * read_s)
    first_s = max(read_s, _prompt_s(shape, machine, prompt_tokens)) + head_s
    held = memory.fixed_bytes + sizes.layers_bytes(memory, stay)
    limit = _limit(machine, sizes.token_bytes(shape, way), compute_s, read, read_s)
    return Speed(seconds, first_s, read, held, stay / memory.units, limit)


def _cost(shape: ModelShape, way: PlannedWay, machine: Machine) -> Cost:
    """The measured times of the way. Models that are not built like Llama go through torch beside their products."""
    if way.file:
        return replace(machine.rates.token[DENSE, BFLOAT16], gb_s=_blocks_gb_s(way.file, machine))
    cost = machine.rates.token[way.method, way.dtype]
    if shape.gated:
        return cost
    by_torch = machine.rates.token[BY_TORCH, BFLOAT16]
    slower = {name: max(getattr(cost, name), getattr(by_torch, name)) for name in ("once_s", "each_s")}
    return replace(cost, **slower)


def _blocks_gb_s(file: FileBytes, machine: Machine) -> float:
    """The rate of products with a file's blocks."""
    seconds = sum(nbytes / machine.rates.blocks[kind] for kind, nbytes in file.types.items())
    return sum(file.types.values()) / seconds


def _passes_s(machine: Machine, memory: Footprint, stay: int, layer_s: float, head_s: float, count: int) -> float:
    """Seconds of so many tokens, one after the other."""
    read = machine.rates.read
    links = Links(storage_to_dram_gb_s=read.gb_s, storage_to_dram_fixed_s=read.fixed_s)
    nbytes = memory.unit_bytes
    cpu = Memory("cpu", machine.dram_bytes, 1.0, matvec_gb_s={"dense": nbytes / GB / layer_s})
    planned = replace(machine.profile, links=links, dram=cpu)
    weight = (Weight("layer", nbytes, nbytes),)
    layers = [PlacedLayer(weight, tier) for tier in LayerMap(0, stay, memory.units - stay, spread=True).tiers]
    layers[-1] = replace(layers[-1], overhead_s=head_s)
    return predict(planned, layers * count, Way("dense", policy="pipelined", device="cpu")).total_s


def _neurons(shape: ModelShape, way: PlannedWay, machine: Machine, memory: Footprint, prompt_tokens: int) -> Speed:
    """Attention as a dense layer of as many bytes. A layer's neurons are foretold, read, and multiplied with."""
    held, read_share = hits.window_of(way.sparsity, memory.held_share(machine.dram_bytes))
    rates, loaded, block = machine.rates, read_share * shape.ffn, whole_blocks(memory.unit_bytes)
    multiplied = sizes.predictors_bytes(shape) / shape.layers + held * shape.ffn * memory.unit_bytes
    dense_bytes = shape.parameters["attention"] * sizes.ELEMENT_BYTES + sizes.head_bytes(shape)
    compute_s = _cost(shape, way, machine).seconds(shape.layers, dense_bytes)
    compute_s += shape.layers * rates.neuron.seconds(loaded, multiplied)
    read_s = shape.layers * rates.neuron_read.seconds(loaded, loaded * block) if loaded else 0.0
    all_s = memory.units * block / GB / rates.read.gb_s  # of a prompt that needs nearly every neuron
    first_s = all_s + _prompt_s(shape, machine, prompt_tokens)
    dram = round(memory.fixed_bytes + held * memory.units * memory.unit_bytes)
    read = round(shape.layers * loaded * block)
    limit = _limit(machine, dense_bytes + shape.layers * multiplied, compute_s, read, read_s)
    return Speed(compute_s + read_s, first_s, read, dram, held, limit)


def _experts(shape: ModelShape, way: PlannedWay, machine: Machine, memory: Footprint, prompt_tokens: int) -> Speed:
    held = memory.held_share(machine.dram_bytes)
    used = shape.experts_per_token * shape.routed_layers
    missed = 0.0 if held == 1 else used * (1 - hits.expert_hits(shape, held))
    read_s = missed * machine.rates.read.seconds(memory.unit_bytes)
    compute_s = _compute_of_experts_s(shape, way, machine)
    first_s = max(
        memory.units * (1 - held) * machine.rates.read.seconds(memory.unit_bytes),
        _prompt_s(shape, machine, prompt_tokens),
    )
    dram = round(memory.fixed_bytes + held * memory.units * memory.unit_bytes)
    read = round(missed * memory.unit_bytes)
    limit = _limit(machine, sizes.token_bytes(shape, way), compute_s, read, read_s)
    return Speed(read_s + compute_s, first_s, read, dram, held, limit, at_best=not way.runs_here)


def _compute_of_experts_s(shape: ModelShape, way: PlannedWay, machine: Machine) -> float:
    """Attention and shared experts as a dense layer of as many bytes; experts at the rate of their own kernel."""
    parts, routed = shape.parameters, shape.routed_layers
    if way.file:
        cost, nbytes = machine.rates.expert[sizes.DENSE_BITS], sizes.token_bytes(shape, way)
        return _cost(shape, way, machine).seconds(shape.layers, nbytes) + routed * cost.seconds(
            shape.experts_per_token, 0
        )
    shared = routed * shape.shared_experts * sizes.expert_weights(shape)
    dense = parts["attention"] + parts["ffn"] + parts["router"] + shared
    nbytes = dense * sizes.ELEMENT_BYTES + sizes.head_bytes(shape)
    used = shape.experts_per_token
    cost = machine.rates.expert.get(round(way.bits))
    if cost is None:  # no kernel multiplies with such experts: as matrices of layers in the format
        packed = machine.rates.token[way.method, way.dtype]
        cost = replace(machine.rates.expert[sizes.DENSE_BITS], gb_s=packed.gb_s)
    experts_s = routed * cost.seconds(used, used * sizes.expert_bytes(shape, way))
    return machine.rates.token[DENSE, BFLOAT16].seconds(shape.layers, nbytes) + experts_s


def _rival(shape: ModelShape, way: PlannedWay, machine: Machine, memory: Footprint, prompt_tokens: int) -> Speed:
    held, used = min(1.0, machine.dram_bytes / memory.unit_bytes), sizes.token_bytes(shape, way)
    read = round(used * hits.unmapped_share(shape, held))
    cost = machine.rates.rival.get(way.method if way.file else way.name)
    read_s = read / GB / machine.rates.read.gb_s
    compute_s = used / GB / machine.profile.dram.bandwidth_gb_s
    if cost and way.file:
        compute_s = cost.seconds(shape.layers, used)
    elif cost:
        head = sizes.head_bytes(shape)  # in F16, in every type
        compute_s = cost.seconds(shape.layers, used - head) + head / GB / machine.rates.rival[F16].gb_s
    all_s = memory.unit_bytes * (1 - held) / GB / machine.rates.read.gb_s
    first_s = max(all_s, _prompt_s(shape, machine, prompt_tokens))
    dram, limit = round(held * memory.unit_bytes), _limit(machine, used, compute_s, read, read_s)
    return Speed(max(read_s, compute_s), first_s, read, dram, held, limit, at_best=held < 1 or not cost)


def _product_s(machine: Machine, nbytes: float) -> float:
    """Seconds of a product with a dense matrix, at the rate of the products of layers."""
    return nbytes / GB / machine.rates.token[DENSE, BFLOAT16].gb_s


def _prompt_s(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Seconds that the products of a prompt take at the processor's rate of large products."""
    rate = max(machine.profile.dram.tflop_s.values()) * 1e12
    return OPERATIONS * tokens * sizes.used_weights(shape) / rate


def _limit(machine: Machine, nbytes: float, compute_s: float, read: float, read_s: float) -> str:
    """The limit of a token of so many bytes: reads, the bandwidth of memory, or the work on the bytes there.

    Bytes from the disk pass through memory as well. So memory does not limit a token most of whose bytes are read,
    whatever the rates say: then they were measured beside other work.
    """
    if read_s > compute_s:
        return "disk"
    if nbytes / GB / machine.profile.dram.bandwidth_gb_s <= compute_s / 2:
        return "compute"
    return "disk" if read > nbytes / 2 else "DRAM"
