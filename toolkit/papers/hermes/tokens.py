"""The cost model of a GPU beside near-data DIMMs, or beside the memory of other systems (HERMES, section V).

    machine, serving = profile("hermes-rtx4090"), Serving("llama2-70b")
    generate(machine, serving, SYSTEMS["hermes"]).tokens_per_s

A prompt passes through the GPU once, and its weights come over PCIe. A token then takes, in each layer, one after the
other: the active neurons of queries, keys and values; attention; its projection, on the GPU; the active neurons of the
FFN. GPU and DIMMs compute their own neurons of a block beside each other, and the slowest sets the time. The fixed time
of a layer stands for launches, barriers and merging between processors.

A product takes its bytes over the bandwidth or its operations over the rate, whichever is longer. The machine's numbers
are in its profile, all other assumptions in `Serving`. Both are the same for all systems.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toolkit.machines.machine import GB, Memory, Profile
from toolkit.machines.schedule import Step, schedule
from toolkit.papers.hermes.loads import BlockLoads, Serving, System, WeightBlock, loads_of
from toolkit.timeline import Timeline

GPU, PCIE, CPU, HEAD, COPY = "GPU", "PCIe", "CPU", "head", "copy"


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a layer: the busy seconds [layers, tokens] of each resource, beside each other or in turn."""

    name: str
    work: dict[str, Float[np.ndarray, "layers tokens"]]
    beside: bool = True

    @property
    def seconds(self) -> Float[np.ndarray, "layers tokens"]:
        """From the stage's start to its end."""
        times = np.broadcast_arrays(*self.work.values())
        return np.max(times, axis=0) if self.beside else np.sum(times, axis=0)


@dataclass(frozen=True)
class ServingTimes:
    """Times of a batch of prompts and of the tokens generated after them.

    `parts` has the seconds of a token by part, over all layers, the mean over tokens: the stages, "head", and "copy",
    what PCIe adds to them. They add up to the token's time. `busy` has the seconds in which each resource works.
    """

    prefill_s: float
    parts: dict[str, float]
    busy: dict[str, float]
    tokens: int
    batch: int

    @property
    def token_s(self) -> float:
        """Seconds of one token of every sequence."""
        return sum(self.parts.values())

    @property
    def total_s(self) -> float:
        """Seconds of prompts and tokens."""
        return self.prefill_s + self.tokens * self.token_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second of the whole time (section V-A4)."""
        return self.batch * self.tokens / self.total_s


def generate(machine: Profile, serving: Serving, system: System) -> ServingTimes:
    """A batch of prompts and their tokens. Raises what `loads_of` raises."""
    layers, parts, busy = serving.shape.layers, {COPY: 0.0}, {}
    for stage in token_stages(machine, serving, system):
        copied = stage.seconds - stage.work[GPU] if PCIE in stage.work else np.zeros(1)
        parts[COPY] += layers * float(copied.mean())
        parts[stage.name] = layers * float((stage.seconds - copied).mean())
        for resource, seconds in stage.work.items():
            busy[resource] = busy.get(resource, 0.0) + layers * float(seconds.mean())
    head_bytes = serving.head_bytes
    parts[HEAD] = product_s(machine.device, head_bytes, head_bytes / serving.element_bytes * serving.batch)
    return ServingTimes(_prefill_s(machine, serving, system), parts, busy, serving.generated, serving.batch)


def token_stages(machine: Profile, serving: Serving, system: System) -> list[Stage]:
    """The stages of a layer in their order, for the layers and tokens that `Serving` samples."""
    loads = loads_of(machine, serving, system)
    made = [_products(machine, system, name, block, loads[name]) for name, block in serving.blocks.items()]
    made.insert(1, _attention(machine, serving, system))
    if system.predictor_rank:
        weights = system.predictor_rank * (serving.shape.hidden + serving.shape.ffn)
        seconds = product_s(machine.device, weights * serving.element_bytes, weights * serving.batch)
        made.append(Stage("predictor", {GPU: np.full((1, 1), seconds)}))
    if system.cold != "pcie" and machine.software:
        made.append(Stage("barriers", {"host": np.full((1, 1), machine.software.layer_s)}))
    return made


def token_timeline(machine: Profile, serving: Serving, system: System, token: int = 0) -> Timeline:
    """One token's pass through the sampled layers on the scheduler, each GPU, link and DIMM a resource.

    It ends after the sum of the same stages' seconds.
    """
    steps: list[Step] = []
    before: tuple[Step, ...] = ()
    made = token_stages(machine, serving, system)
    for layer in range(max(len(stage.seconds) for stage in made)):
        for stage in made:
            mine: list[Step] = []
            for resource, seconds in stage.work.items():
                after = before if stage.beside else tuple(mine[-1:]) or before
                place = min(layer, len(seconds) - 1), min(token, seconds.shape[1] - 1)
                kind, tier = ("copy", "dram") if resource == PCIE else ("compute", resource)
                mine.append(Step(kind, stage.name, tier, resource, float(seconds[place]), layer=layer, after=after))
            steps += mine
            before = tuple(mine)
    return schedule(steps)


def product_s(memory: Memory, nbytes, products):
    """Seconds of a product on a processor: bytes over bandwidth or operations over the fp16 rate, the longer.

    Without an fp16 rate, as a profile's CPU has none, bytes alone count.
    """
    rate = memory.tflop_s.get("fp16", np.inf) * 1e12
    return np.maximum(np.divide(nbytes, memory.bandwidth_gb_s * GB), np.multiply(2.0, products) / rate)


def _products(machine: Profile, system: System, name: str, block: WeightBlock, loads: BlockLoads) -> Stage:
    """The products of a block's neurons: hot ones on the GPU, cold ones where the system has them."""
    hot_bytes, hot = loads.hot * block.unit_bytes, loads.hot_products * block.unit_products
    cold_bytes, cold = loads.cold * block.unit_bytes, loads.cold_products * block.unit_products
    if system.cold == "pcie":  # `cold` has one column
        device_s = product_s(machine.device, hot_bytes + cold_bytes[..., 0], hot + cold[..., 0])
        return Stage(name, {PCIE: _copy_s(machine, system, cold_bytes[..., 0]), GPU: device_s}, beside=system.overlaps)
    work = {GPU: product_s(machine.device, hot_bytes, hot)}
    if system.cold == "gpus":
        return Stage(name, work)
    if system.cold == "cpu":
        return Stage(name, work | {CPU: product_s(machine.dram, cold_bytes[..., 0], cold[..., 0])})
    cold_s = machine.near_data.gemv_s(cold_bytes, cold)
    return Stage(name, work | {f"DIMM {number}": cold_s[..., number] for number in range(cold_s.shape[-1])})


def _attention(machine: Profile, serving: Serving, system: System) -> Stage:
    """Scores and sums over the cached keys and values, which lie in the cold memory; on the GPU if there is none."""
    nbytes, products = serving.cache_bytes()[None], serving.attention_products()[None]
    if system.cold in ("pcie", "gpus"):
        return Stage("attention", {GPU: product_s(machine.device, nbytes, products)})
    if system.cold == "cpu":
        return Stage("attention", {CPU: product_s(machine.dram, nbytes, products)})
    dimms = int(machine.near_data.dimms)
    share_s = machine.near_data.gemv_s(nbytes / dimms, products / dimms)
    return Stage("attention", {f"DIMM {number}": share_s for number in range(dimms)})


def _prefill_s(machine: Profile, serving: Serving, system: System) -> float:
    """The prompts on the GPU; weights that do not stay there come over PCIe, beside the products.

    Hot neurons are chosen by the prompt's activations, so a sparse system brings all weights (section IV-A2).
    """
    staying = 0.0 if system.sparse else serving.resident_share(machine)
    copied_s = _copy_s(machine, system, serving.nbytes * (1 - staying))
    products = serving.nbytes / serving.element_bytes * serving.batch * serving.prompt
    computed_s = product_s(machine.device, serving.nbytes, products)
    return float(max(copied_s, computed_s) if system.overlaps else copied_s + computed_s)


def _copy_s(machine: Profile, system: System, nbytes):
    """Seconds of a copy to the GPU, by the link or as slowly as the system copies."""
    return nbytes / (min(machine.links.dram_to_device_gb_s, system.link_gb_s) * GB)
