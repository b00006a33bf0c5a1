"""The cost model of offloading: when each weight is read, copied, decoded and used, on the machine of a profile.

    machine = profile("endor-rtx4080")
    layer = PlacedLayer(weights(SHAPES["opt-66b"], "endor"), placement="storage")
    predict(machine, [layer], Way("endor", path="direct")).stages()

A stage takes a fixed time, where the profile has one, and its bytes over a rate:

- a read or a copy: the stored bytes over the link's bandwidth;
- decoding: the dense bytes over the processor's decoding rate;
- a product: the weight's bytes over its memory's bandwidth, since the memory is the limit for one token.

Where the profile has a curve of measured times for decoding or products, the time is taken from there. A weight is one
request. The model leaves three things out: products of activations among themselves, which only a layer's overhead
stands for; caches, which may hold what was just decoded; and that a read into DRAM and the CPU's own work share cores
and the bandwidth of DRAM.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from toolkit.errors import UserError, unknown
from toolkit.machines.machine import GB, Curve, Memory, Profile
from toolkit.machines.schedule import Step, schedule
from toolkit.offload.methods import find_method
from toolkit.offload.ways import DEVICES, POLICIES, Way
from toolkit.timeline import TRANSFERS, Timeline

# the size of zstd depends on the values; these are for random normal ones, pruned to 50 % (notebook endor/fig04)
ZSTD_RATIOS = {("float16", 0.5): 0.571, ("int8", 0.5): 0.611}


@dataclass(frozen=True)
class Weight:
    """A linear's weight: its bytes when dense, and as stored."""

    op: str
    dense_bytes: int
    stored_bytes: int

    def nbytes(self, form: str) -> int:
        """Bytes in the dense form or, under any other name, the stored one."""
        return self.dense_bytes if form == "dense" else self.stored_bytes


@dataclass(frozen=True)
class PlacedLayer:
    """Weights that live in one tier. `overhead_s` is the processor's time beside them (`Profile.rest_s`)."""

    weights: tuple[Weight, ...]
    placement: str
    overhead_s: float = 0.0


def weights(
    shapes: Mapping[str, tuple[int, int]], method: str, dtype: str = "float16", sparsity: float = 0.5
) -> tuple[Weight, ...]:
    """Weights of these shapes (name → outputs × inputs, as in `toolkit.models.shapes`) as a method stores them.

    Raises `UserError` for an unknown method or dtype, and for a method whose size at that dtype and sparsity depends on
    the values. Make the `Weight`s from the `nbytes` of packed matrices then.
    """
    from toolkit.formats.packed import DTYPES

    form = find_method(method).format
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return tuple(
        Weight(op, _nbytes("dense", shape, dtype, sparsity), _nbytes(form, shape, dtype, sparsity))
        for op, shape in shapes.items()
    )


def _nbytes(form: str, shape: tuple[int, int], dtype: str, sparsity: float) -> int:
    from toolkit.formats import expected_nbytes
    from toolkit.formats.packed import DTYPES

    if form == "zstd" and (dtype, sparsity) in ZSTD_RATIOS:
        return round(ZSTD_RATIOS[dtype, sparsity] * _nbytes("dense", shape, dtype, sparsity))
    return expected_nbytes(form, shape, sparsity, DTYPES[dtype])


def with_rates(machine: Profile, tier: str, **rates: Mapping[str, float | Curve]) -> Profile:
    """The same machine with more numbers by format, as `Memory` names them, of the processor of `dram` or `device`.

    A probed profile has bandwidths only; the rates of kernels on that machine are added here.
    """
    memory = _memory(machine, tier)
    merged = {name: {**getattr(memory, name), **numbers} for name, numbers in rates.items()}
    return replace(machine, **{tier: replace(memory, **merged)})


def predict(machine: Profile, layers: Iterable[PlacedLayer], way: Way, slots: int | None = None) -> Timeline:
    """The timeline of one pass through the layers, in order, for one token.

    Up to `slots` layers are under way at once, by default as many as the policy has. A layer's first read waits until
    the layer `slots` before it has been computed. Each link, and the processor of each tier, is a resource.
    Raises `UserError` if there is no slot, if the profile lacks a number that the way needs, or if a layer is placed
    in a tier that the machine does not know or that the way's processor has no memory of.
    """
    slots = POLICIES[way.policy].slots if slots is None else slots
    if slots < 1:
        raise UserError(f"slots={slots}: expected 1 or more")
    return schedule(_steps(machine, layers, way, slots))


def _steps(machine: Profile, layers: Iterable[PlacedLayer], way: Way, slots: int) -> Iterator[Step]:
    """The steps of all layers. A weight's steps follow each other; without overlaps, all share one resource."""
    last_steps: list[Step] = []  # of layers that are transferred
    known: dict[PlacedLayer, list[list[Step]]] = {}  # most layers are alike
    for number, layer in enumerate(layers):
        if layer not in known:
            known[layer] = _parts(machine, layer, way)
        parts = known[layer]
        transferred = any(step.stage in TRANSFERS for steps in parts for step in steps)
        slot = (last_steps[-slots],) if transferred and len(last_steps) >= slots else ()
        for steps in parts:
            after = slot
            for step in steps:
                resource = step.resource if POLICIES[way.policy].overlaps else "everything"
                step = replace(step, resource=resource, layer=number, after=after)
                yield step
                after = (step,)
        if transferred:
            last_steps.append(step)


def _parts(machine: Profile, layer: PlacedLayer, way: Way) -> list[list[Step]]:
    """The steps of each weight of a layer, and then those of its overhead."""
    parts = [list(_passage(machine, weight, layer.placement, way)) for weight in layer.weights]
    if layer.overhead_s:
        target = DEVICES[way.device]
        parts.append([Step("other", "rest", target, target, layer.overhead_s)])
    return parts


def _passage(machine: Profile, weight: Weight, placement: str, way: Way) -> Iterator[Step]:
    """The steps from where a weight lives to its product. Device memory holds it dense, unless it is used packed."""
    method, target = way.stored, DEVICES[way.device]
    form = "dense" if placement == "device" and method.decoded_in else method.format
    decoder = method.decoded_in and ("dram" if target == "dram" else method.decoded_in)
    for tier, following in pairwise([*_tiers(machine, placement, target, way.path), None]):
        if tier == decoder and form != "dense":
            yield _decode(machine, tier, form, weight)
            form = "dense"
        if following and not (machine.unified and tier == "dram"):
            yield _transfer(machine, tier, following, weight.op, weight.nbytes(form))
    nbytes = weight.nbytes(form)
    yield Step("compute", weight.op, target, target, _memory(machine, target).matvec_s(form, nbytes), nbytes)


def _tiers(machine: Profile, placement: str, target: str, path: str) -> list[str]:
    """The tiers that a weight passes, from the one it lives in to the one it is used in."""
    if placement not in machine.tiers:
        raise unknown("placement", placement, machine.tiers)
    tiers = machine.tiers[machine.tiers.index(placement) : machine.tiers.index(target) + 1]
    if not tiers:
        raise UserError(f"a layer in {placement!r} with a way that computes in {target!r}: place it in dram or storage")
    return [tier for tier in tiers if not (path == "direct" and placement == "storage" and tier == "dram")]


def _transfer(machine: Profile, source: str, target: str, op: str, nbytes: int) -> Step:
    bandwidth_gb_s = getattr(machine.links, f"{source}_to_{target}_gb_s")
    if bandwidth_gb_s is None:
        raise UserError(f"{machine.id} gives no bandwidth from {source} to {target}: choose another path or machine")
    fixed_s = getattr(machine.links, f"{source}_to_{target}_fixed_s")
    stage = "read" if source == "storage" else "copy"
    return Step(stage, op, source, stage, fixed_s + nbytes / GB / bandwidth_gb_s, nbytes)


def _decode(machine: Profile, tier: str, form: str, weight: Weight) -> Step:
    memory = _memory(machine, tier)
    if form not in {**memory.decode_gb_s, **memory.decode_curves}:
        raise UserError(f"{machine.id} gives no rate of decoding {form} in {tier}: add it by with_rates()")
    seconds = memory.decode_s(form, weight.dense_bytes)
    return Step("decode", weight.op, tier, tier, seconds, weight.dense_bytes)


def _memory(machine: Profile, tier: str) -> Memory:
    memory = getattr(machine, tier)
    if memory is None:
        raise UserError(f"{machine.id} has no {tier}: expected a machine with one, or a way without it")
    return memory
