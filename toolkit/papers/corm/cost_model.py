"""The cost model of one token through a mixture of experts that lies in DRAM (CORM, section 5).

    shape, machine = ARCHITECTURES["mixtral-8x7b"], profile("corm-rtx3090ti")
    token(shape, BREAKDOWN["+P"], machine).total_s

A host thread loads experts, one after the other: it gathers the neurons that are wanted, and copies them to the GPU.
The GPU computes attention, shared experts and the experts that are there. Without `prefetch` one waits for the other.
With it, layer i's input also passes the gate of layer i + 1, then W1 of the experts that this gate names. Their active
neurons in W2 and W3 are loaded while layer i is computed (section 4.2). The first layer is always loaded on demand.

All of it is expected values: an expert that is cached with a probability of 0.25 takes 0.75 of its time to load.
`LoadingInputs` has the numbers that the paper states or leaves open; the profile has those of the machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from toolkit.errors import UserError
from toolkit.machines.machine import GB, Profile
from toolkit.machines.schedule import Step, schedule
from toolkit.models.architectures import ModelShape
from toolkit.timeline import Timeline

GROUPS = {4: (64, 256), 2: (16, 128)}  # weights a group, and groups that share a second scale (CORM, appendix)
META_BITS, SECOND_BITS = 16, 64  # of a group: scale and zero point; of groups: those of both in fp16
VALUE_BYTES = 2  # that products are done in
W1 = 1 / 3  # of an expert's weights
RESERVED_BYTES = 2**30  # of GPU memory, for the context, activations, keys and values: assumed
LOADER, GPU, GATHERER = "loader", "GPU", "gatherer"  # resources
LOADING = ("copy", "manage")  # stages that bring weights: to copy, to gather
PREDICTOR, EXPERTS = "predictor", "experts"  # operations


@dataclass(frozen=True)
class Scheduling:
    """How a token is brought through a mixture of experts that does not fit the GPU (CORM, figure 8, table 1).

    Args:
        name: as the figures have it.
        sparse: only an expert's active neurons are loaded, unless loading it whole is quicker (section 4.1).
        mixed: experts that are seldom used are stored in 2 bits (section 4.1).
        prefetch: experts, and with `sparse` their neurons, are predicted a layer ahead and loaded while the layer
            before is computed (section 4.2).
        cached: each layer keeps its last used experts, and with `sparse` the neurons that were loaded (section 4.3).
        exact: mispredicted experts and neurons are loaded when their layer needs them; else the token uses the
            predicted ones only.
        resident: all experts stay on the GPU, and nothing is loaded.
        bits: of a weight of experts that are not `mixed`: 2, 4 or 16.
    """

    name: str
    sparse: bool = False
    mixed: bool = False
    prefetch: bool = False
    cached: bool = False
    exact: bool = False
    resident: bool = False
    bits: int = 4


ON_DEMAND = Scheduling("B")
SPARSE = replace(ON_DEMAND, name="+S", sparse=True, mixed=True)
PREFETCHED = replace(SPARSE, name="+P", prefetch=True)
CORM = replace(PREFETCHED, name="+C", cached=True)
BREAKDOWN = {it.name: it for it in (ON_DEMAND, SPARSE, PREFETCHED, CORM)}  # each adds to the one before (figure 8)
RIVALS = {
    "mixtral-offload": Scheduling("mixtral-offload", prefetch=True, cached=True, exact=True),  # section 5.1
    "offloading": Scheduling("offloading", bits=16),  # table 1, whose 3.9 s fit fp16
    "quantisation": Scheduling("quantisation", resident=True, bits=2),  # table 1
    "resident": Scheduling("resident", resident=True),  # all experts in INT4 on the GPU: not in the paper
}
SCHEDULINGS = BREAKDOWN | RIVALS


@dataclass(frozen=True)
class LoadingInputs:
    """The inputs of the cost model beside a machine's numbers. `RANGES` has both ends of what is left open.

    Args:
        active: the share of an expert's neurons that a token activates (section 3, figure 2: 55 % are inactive at the
            threshold of 0.25).
        limit: gathering neurons and copying them takes as long as the whole matrices at this share of them, more than
            0 (section 5.3, figure 9: 75 %).
        accuracy: the share of needed experts, and of active neurons, that the layer before foretells. Assumed: another
            study's gate finds 81 to 89 % of the next layer's experts.
        slots: experts that each layer caches; None: as many as a token uses, the least that a cache can have.
        hit_rate: the share of needed experts that are cached; None: `slots` of all, what chance gives. It is more where
            tokens repeat experts or some experts are used more.
        reused: the share of a cached expert's active neurons that were active at its use before; None: by chance. Up to
            the 90 % that HERMES gives for neighbouring tokens.
        low_bits: the share of loads that are of experts in 2 bits, where a scheduling has them. The paper has no share.
        overlap: the share of the GPU's work on experts that the loader need not wait for. The default is all that the
            order of steps allows; section 5.3 has over 80 % of the computing.
        fixed_scales: the fixed time of an expert falls with the neurons that are loaded (figure 9: time in proportion
            to the active neurons); else it stays.
        gathers_beside: neurons are gathered while others are copied; else the loader does one after the other, as
            figure 9 adds both times up.
    """

    active: float = 0.45
    limit: float = 0.75
    accuracy: float = 0.85
    slots: int | None = None
    hit_rate: float | None = None
    reused: float | None = None
    low_bits: float = 0.0
    overlap: float = 1.0
    fixed_scales: bool = True
    gathers_beside: bool = False

    def wanted(self, tokens: float) -> float:
        """The share of W2 and W3 that so many tokens need of an expert: 1 where gathering does not pay."""
        union = 1 - (1 - self.active) ** tokens
        return union if union <= self.limit else 1.0

    def expert_hits(self, shape: ModelShape) -> float:
        """The share of needed experts that are cached.

        An LRU cache of s among n experts that are used alike, each token's independent of those before, hits s / n.
        """
        if self.hit_rate is not None:
            return self.hit_rate
        return min(1.0, (self.slots or shape.experts_per_token) / shape.experts)

    def neuron_hits(self, shape: ModelShape) -> float:
        """The share of a cached expert's active neurons that are on the GPU.

        The cache is the union of the neurons of an expert's uses since it was loaded (section 4.3). With a hit rate h,
        it was used m times with probability (1 − h) · h^(m − 1). The use before has a share `reused` of what is active
        now, each one before it `active` of what is left.
        """
        hits = self.expert_hits(shape)
        if hits == 1:
            return 1.0
        reused = self.active if self.reused is None else self.reused
        return 1 - (1 - reused) * (1 - hits) / (1 - hits * (1 - self.active))


DEFAULTS = LoadingInputs()
RANGES = {"low_bits": (0.0, 0.5), "overlap": (0.8, 1.0), "accuracy": (0.8, 1.0), "reused": (0.45, 0.9)}  # left open


def weight_bits(bits: int) -> float:
    """Bits that a weight takes with its share of scales and zero points: 4.25 of 4 bits, 3.03 of 2, 16 of 16."""
    if bits == 16:
        return 16.0
    group, groups = GROUPS[bits]
    return bits + META_BITS / group + SECOND_BITS / (group * groups)


def expert_weights(shape: ModelShape) -> int:
    """Weights of one expert. Raises `UserError` for a model without experts."""
    if not shape.experts:
        raise UserError("the model has no experts: expected one such as mixtral-8x7b")
    return sum(outputs * inputs for outputs, inputs in shape.ffn_matrices.values())


def expert_bytes(shape: ModelShape, scheduling: Scheduling, inputs: LoadingInputs = DEFAULTS) -> float:
    """Bytes of one expert that a scheduling loads, the mean over loads where some have fewer bits."""
    low = inputs.low_bits if scheduling.mixed else 0.0
    bits = (1 - low) * weight_bits(scheduling.bits) + low * weight_bits(2)
    return expert_weights(shape) * bits / 8


def slots_that_fit(shape: ModelShape, machine: Profile, scheduling: Scheduling) -> int:
    """Experts of a layer that fit the GPU beside all other weights, which are stored in as many bits."""
    routed = expert_weights(shape) * shape.experts * shape.routed_layers
    others = (sum(shape.parameters.values()) - routed) * weight_bits(scheduling.bits) / 8
    room = machine.device.capacity_bytes - RESERVED_BYTES - others
    return int(np.clip(room / (expert_bytes(shape, scheduling) * shape.routed_layers), 0, shape.experts))


def active_weights(shape: ModelShape) -> int:
    """Weights that one token is multiplied with, the embedding left out."""
    parts, one = shape.parameters, expert_weights(shape)
    used = (shape.experts_per_token + shape.shared_experts) * shape.routed_layers * one
    return _head_weights(shape) + parts["attention"] + parts["ffn"] + parts["router"] + used


@dataclass(frozen=True)
class LayerLoads:
    """The experts of each layer that a token, or a prompt, uses and loads.

    `experts` of a layer are used, each by the activations of `tokens_each` tokens, and `hits` of them are cached. From
    them `first` of W1 is loaded and `rest` of W2 and W3: shares, the mean over experts. `whole`: experts are not
    divided. A scheduling that keeps all experts on the GPU loads none.
    """

    experts: int
    tokens_each: float
    first: float
    rest: float
    hits: float = 0.0
    whole: bool = True


def token_loads(shape: ModelShape, scheduling: Scheduling, inputs: LoadingInputs = DEFAULTS) -> LayerLoads:
    """The use and the loads of one token, in the steady state of the cache."""
    hits = 1.0 if scheduling.resident else inputs.expert_hits(shape) if scheduling.cached else 0.0
    wanted = inputs.wanted(1) if scheduling.sparse else 1.0
    if wanted == 1:
        return LayerLoads(shape.experts_per_token, 1, 1 - hits, 1 - hits, hits)
    rest = wanted * (1 - hits * inputs.neuron_hits(shape))
    return LayerLoads(shape.experts_per_token, 1, 1 - hits, rest, hits, whole=False)


def prompt_loads(
    shape: ModelShape, scheduling: Scheduling, tokens: int, inputs: LoadingInputs = DEFAULTS
) -> LayerLoads:
    """The use and the loads of a prompt, each expert once, with nothing cached; experts and neurons are used alike.

    Raises `UserError` for a prompt without tokens.
    """
    if tokens < 1:
        raise UserError(f"a prompt of {tokens} tokens: expected 1 or more")
    unused = (1 - shape.experts_per_token / shape.experts) ** tokens
    experts = max(round(shape.experts * (1 - unused)), shape.experts_per_token)
    each = tokens * shape.experts_per_token / experts
    if scheduling.resident:
        return LayerLoads(experts, each, 0.0, 0.0, 1.0)
    wanted = inputs.wanted(each) if scheduling.sparse else 1.0
    return LayerLoads(experts, each, 1.0, wanted, whole=wanted == 1)


def token(shape: ModelShape, scheduling: Scheduling, machine: Profile, inputs: LoadingInputs = DEFAULTS) -> Timeline:
    """The modelled timeline of one token, in the steady state of the cache."""
    return schedule(_Layers(shape, scheduling, machine, inputs, token_loads(shape, scheduling, inputs)).steps())


def prompt(
    shape: ModelShape, scheduling: Scheduling, machine: Profile, tokens: int, inputs: LoadingInputs = DEFAULTS
) -> Timeline:
    """The modelled timeline of a prompt, with nothing cached. Raises what `prompt_loads` raises."""
    return schedule(
        _Layers(shape, scheduling, machine, inputs, prompt_loads(shape, scheduling, tokens, inputs)).steps()
    )


def beside_s(timeline: Timeline) -> float:
    """Seconds in which weights are loaded while the GPU computes (table 3)."""
    return max(0.0, timeline.busy_s(*LOADING) + timeline.busy_s("compute") - timeline.busy_s())


@dataclass(frozen=True)
class _Layers:
    """The steps of a pass, layer by layer."""

    shape: ModelShape
    scheduling: Scheduling
    machine: Profile
    inputs: LoadingInputs
    loads: LayerLoads

    def steps(self) -> Iterator[Step]:
        """In the order in which the loader and the GPU take them: this layer's loads before those of the next."""
        before, ahead = None, []  # `ahead`: loads of this layer that were begun in the one before
        for layer in range(self.shape.layers):
            weights = self._dense_weights(layer)
            rest_s = self.machine.rest_s(VALUE_BYTES * weights, mixture=True)
            dense = self._product("attention", layer, weights, fixed_s=rest_s, after=[before])
            yield dense
            before = dense
            if layer < self.shape.dense_layers:
                continue
            first, rest = self._on_demand(layer)
            loads = self._first(layer, first, dense)
            loads += self._rest(layer, rest, loads)
            next_first = self._first(layer + 1, float(self._ahead(layer + 1)), dense)
            experts = self._experts(layer, [dense, *loads, *ahead])
            predictors = [self._predictor(layer + 1, step, experts[-1]) for step in next_first if not self.loads.whole]
            next_rest = self._rest(layer + 1, 1.0, predictors)
            yield from chain(loads, next_first, experts, predictors, next_rest)
            before, ahead = experts[-1], next_first + next_rest
        yield self._product("head", None, _head_weights(self.shape), after=[before])

    def _ahead(self, layer: int) -> bool:
        """Whether a layer's loads begin in the layer before, which has a gate to pass."""
        return self.scheduling.prefetch and self.shape.dense_layers < layer < self.shape.layers

    def _on_demand(self, layer: int) -> tuple[float, float]:
        """The shares of W1, and of W2 and W3, that are loaded when a layer needs them, of all that it loads.

        An expert, or a neuron, is missed if no token that uses it predicts it.
        """
        if not self._ahead(layer):
            return 1.0, 1.0
        missed = (1 - self.inputs.accuracy) ** self.loads.tokens_each if self.scheduling.exact else 0.0
        return missed, 1 - (1 - missed) ** 2

    def _first(self, layer: int, share: float, after: Step) -> list[Step]:
        """A copy for each expert: of W1, or of the whole expert."""
        part, op = (1.0, "expert") if self.loads.whole else (W1, "W1")
        share *= self.loads.first
        if not share:
            return []
        seconds, nbytes = self._moved_s(part, share) + self._fixed_s(part, share), self._nbytes(part, share)
        return [Step("copy", op, "dram", LOADER, seconds, nbytes, layer, (after,)) for _ in range(self.loads.experts)]

    def _rest(self, layer: int, share: float, each_after: Sequence[Step]) -> list[Step]:
        """For each expert: gather the neurons of W2 and W3, then copy them."""
        loaded = share * self.loads.rest
        if self.loads.whole or not loaded:
            return []
        scales = self.inputs.fixed_scales
        moved_s = self._moved_s(1 - W1, loaded)
        gathered_s = (1 / self.inputs.limit - 1) * (moved_s + (self._fixed_s(1 - W1, loaded) if scales else 0.0))
        copied_s = moved_s + self._fixed_s(1 - W1, loaded if scales else share)
        gatherer = GATHERER if self.inputs.gathers_beside else LOADER
        nbytes, made = self._nbytes(1 - W1, loaded), []
        for after in each_after:
            gather = Step("manage", "gather", "dram", gatherer, gathered_s, nbytes, layer, (after,))
            made += [gather, Step("copy", "neurons", "dram", LOADER, copied_s, nbytes, layer, (gather,))]
        return made

    def _nbytes(self, part: float, share: float) -> int:
        return round(part * share * expert_bytes(self.shape, self.scheduling, self.inputs))

    def _moved_s(self, part: float, share: float) -> float:
        """Seconds that the bytes of a share of a part of an expert take over the link."""
        nbytes = part * share * expert_bytes(self.shape, self.scheduling, self.inputs)
        return nbytes / (self.machine.links.dram_to_device_gb_s * GB)

    def _fixed_s(self, part: float, share: float) -> float:
        return part * share * self.machine.links.dram_to_device_fixed_s

    def _experts(self, layer: int, after: Sequence[Step]) -> list[Step]:
        """The products with a layer's experts; the loader waits for what does not overlap."""
        weights = self.loads.experts * expert_weights(self.shape)
        whole = self._product(EXPERTS, layer, weights, self.loads.tokens_each, after=after)
        if not self.scheduling.prefetch or self.inputs.overlap == 1:
            return [whole]
        beside = replace(whole, seconds=self.inputs.overlap * whole.seconds)
        alone_s = (1 - self.inputs.overlap) * whole.seconds
        return [beside, replace(whole, resource=LOADER, seconds=alone_s, nbytes=0, after=(beside,))]

    def _predictor(self, layer: int, *after: Step) -> Step:
        """W1 of a predicted expert. The gate, less than 0.1 % of that, is left out."""
        return self._product(PREDICTOR, layer, round(W1 * expert_weights(self.shape)), self.loads.tokens_each, after)

    def _product(
        self, op: str, layer: int | None, weights: int, tokens: float | None = None, after=(), fixed_s: float = 0.0
    ) -> Step:
        """A product with fp16 weights: their bytes at the GPU's rate, or the operations, whichever takes longer."""
        device, nbytes = self.machine.device, weights * VALUE_BYTES
        tokens = (
            self.loads.tokens_each * self.loads.experts / self.shape.experts_per_token if tokens is None else tokens
        )
        operations_s = 2.0 * weights * tokens / (device.tflop_s.get("fp16", np.inf) * 1e12)
        seconds = fixed_s + max(device.matvec_s("dense", nbytes), operations_s)
        return Step("compute", op, "device", GPU, seconds, nbytes, layer, tuple(step for step in after if step))

    def _dense_weights(self, layer: int) -> int:
        """Bytes of attention, and of the FFN or the router and the shared experts."""
        shape, parts = self.shape, self.shape.parameters
        attention = parts["attention"] // shape.layers
        if layer < shape.dense_layers:
            return attention + parts["ffn"] // shape.dense_layers
        return attention + shape.experts * shape.hidden + shape.shared_experts * expert_weights(shape)


def _head_weights(shape: ModelShape) -> int:
    return shape.parameters["head"] or shape.parameters["embedding"]
