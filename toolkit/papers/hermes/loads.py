"""The work of GPU and DIMMs for each token, by layer: drawn activity, mapped and remapped as a system does.

    loads = loads_of(profile("hermes-rtx4090"), Serving("llama2-70b"), SYSTEMS["hermes"])
    loads["FFN neuron"].cold.shape    # layers, tokens, DIMMs

All layers follow the same law, so a few are drawn and stand for all. The first sampled layer has no parents.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int8, Int64, UInt8

from toolkit.errors import UserError
from toolkit.machines.machine import GB, Profile
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.papers.hermes.dimms import by_chance, remap, swap
from toolkit.papers.hermes.mapping import NeuronBlock, Room, greedy
from toolkit.papers.hermes.tally import tally
from toolkit.predictors import state_table
from toolkit.predictors.states import GAIN, LOSS, WEIGHT, starting_states
from toolkit.sparsity.synthetic import BetaLaw, Drift, draw_layers, ranks
from toolkit.sparsity.trace import UNITS

FFN, ATTENTION, _ = UNITS
PROJECTION = "projection"
NEURONS = (ATTENTION, FFN)
HOT = 0.2  # of the neurons are called hot (HERMES, section I)
THREADS = 2  # that follow layers
NO_TIME_S = 1e-15  # of a machine that computes in no time
SEQUENCE = 1 << 32  # between the seeds of a batch's sequences
PARENTS = np.uint8(2 * WEIGHT)  # two active parents add that to a state; a drawn neuron's one stands for both

UNPINNED_GB_S = 10.19  # of Accelerate's copies over PCIe 4.0 (ENDOR, section 3.4)
RANK = 1000  # of Deja Vu's predictors (Liu et al., ICML 2023, section 4)

Parents = tuple[UInt8[np.ndarray, "tokens units"], Int64[np.ndarray, " units"]]  # the layer before, each one's parent


@dataclass(frozen=True)
class System:
    """A system that shares a model's neurons between a GPU and a larger memory (HERMES, sections V-A2 and V-C).

    Args:
        sparse: only active neurons are computed; else all.
        cold: what is not on the GPU is copied to it by `pcie`, or computed by the host's `cpu` or by near-data `dimms`;
            with `gpus` the machine's device is several, which hold the model together and share each product.
        hot: what stays on the GPU: `nothing`, whole `layers`, `random` neurons, or the most `frequent`ly active.
        adjusts: the states by which neurons are swapped while tokens are generated: of the last `token`, of the `layer`
            before, or the sum of `both` (section IV-C). Empty: none are swapped.
        remaps: DIMMs exchange neurons once a window (section IV-D).
        overlaps: copies run beside products.
        predictor_rank: of a trained low-rank predictor on the GPU, which names the active FFN neurons; 0 for none.
        link_gb_s: the rate of copies, if it is below that of the machine's link.
    """

    sparse: bool
    cold: str
    hot: str = "layers"
    adjusts: str = ""
    remaps: bool = False
    overlaps: bool = True
    predictor_rank: int = 0
    link_gb_s: float = float("inf")


SYSTEMS = {
    "accelerate": System(sparse=False, cold="pcie", overlaps=False, link_gb_s=UNPINNED_GB_S),
    "flexgen": System(sparse=False, cold="pcie"),
    "deja_vu": System(sparse=True, cold="pcie", hot="nothing", overlaps=False, predictor_rank=RANK),
    "sparse_offload": System(sparse=True, cold="pcie", hot="frequent", overlaps=False, predictor_rank=RANK),
    "hermes_host": System(sparse=True, cold="cpu", hot="frequent", adjusts="both"),
    "hermes_base": System(sparse=False, cold="dimms"),
    "hermes": System(sparse=True, cold="dimms", hot="frequent", adjusts="both", remaps=True),
    "tensorrt": System(sparse=False, cold="gpus"),
}
ABLATION = {  # each step of section V-C; the last is `SYSTEMS["hermes"]`
    "random": System(sparse=True, cold="dimms", hot="random"),
    "partition": System(sparse=True, cold="dimms", hot="frequent"),
    "token_adjustment": System(sparse=True, cold="dimms", hot="frequent", adjusts="token"),
    "layer_adjustment": System(sparse=True, cold="dimms", hot="frequent", adjusts="layer"),
    "adjustment": System(sparse=True, cold="dimms", hot="frequent", adjusts="both"),
    "hermes": SYSTEMS["hermes"],
}


@dataclass(frozen=True)
class WeightBlock:
    """Weights of a layer that are computed together: so many units of so many bytes and multiply-adds each."""

    units: int
    unit_bytes: int
    unit_products: int

    @property
    def nbytes(self) -> int:
        """Bytes of all units."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, eq=False)
class BlockLoads:
    """Units that GPU (`hot`) and DIMMs (`cold`) compute with, and those times the sequences that need them."""

    hot: Float[np.ndarray, "layers tokens"]
    hot_products: Float[np.ndarray, "layers tokens"]
    cold: Float[np.ndarray, "layers tokens dimms"]
    cold_products: Float[np.ndarray, "layers tokens dimms"]
    swapped: Float[np.ndarray, "layers tokens"] | None = None
    moved: Float[np.ndarray, "layers tokens"] | None = None


@dataclass(frozen=True)
class Serving:
    """A batch of prompts, the tokens generated after them, and what is assumed of the model's activity and the GPU.

    Args:
        model: a key of `ARCHITECTURES`, with ReLU before the FFN's and the attention's matrices.
        batch: sequences; they share their neurons' usage.
        prompt, generated: tokens of each sequence (section V-A4).
        active: share of the neurons that a token activates. With `near` and `far` it makes a `BetaLaw`.
        near, far: share of a token's neurons that the next one shares, and one far away (figure 4).
        drift: share of the hot neurons that change while tokens are generated (section III-B).
        copied: how likely a neuron does what its parent in the layer before does.
        reserved_bytes: of GPU memory that hold no weights: 20 GB are left of 24 GiB, since then 80 % of OPT-13B and
            15 % of OPT-66B fit (section V-B1).
        hot_state, window: the state from which a neuron is hot (the paper does not state it), and tokens between
            remappings.
        sampled_layers, sampled_prompt, sampled_tokens, seed: what is drawn.
    """

    model: str
    batch: int = 1
    prompt: int = 128
    generated: int = 128
    active: float = 0.12
    near: float = 0.9
    far: float = 0.7
    drift: float = 0.52
    copied: float = 0.3
    reserved_bytes: float = 24 * 2**30 - 20e9
    hot_state: int = 10
    window: int = 5
    sampled_layers: int = 2
    sampled_prompt: int = 24
    sampled_tokens: int = 24
    element_bytes: int = 2
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return ARCHITECTURES[self.model]

    @property
    def blocks(self) -> dict[str, WeightBlock]:
        """The blocks of a layer in the order of their use; the projection is one unit."""
        *inputs, (rows, columns) = self.shape.attention.values()
        queries_keys_values = sum(outputs for outputs, _ in inputs)
        ffn = len(self.shape.ffn_matrices) * self.shape.hidden
        sizes = {
            ATTENTION: (self.shape.hidden, queries_keys_values),
            PROJECTION: (1, rows * columns),
            FFN: (self.shape.ffn, ffn),
        }
        return {name: WeightBlock(units, self.element_bytes * each, each) for name, (units, each) in sizes.items()}

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head, which stays on the GPU."""
        return self.shape.vocabulary * self.shape.hidden * self.element_bytes

    @property
    def nbytes(self) -> float:
        """Bytes of the layers' weights."""
        return self.shape.layers * sum(block.nbytes for block in self.blocks.values())

    def resident_share(self, machine: Profile) -> float:
        """The share of the layers' weights that the GPU holds."""
        return min(1.0, max(0.0, self._usable_bytes(machine) - self.head_bytes) / self.nbytes)

    def neuron_bytes_on_gpu(self, machine: Profile) -> float:
        """Bytes of GPU memory for neurons, beside head and projections. Raises `UserError` if not even these fit."""
        staying = self.head_bytes + self.shape.layers * self.blocks[PROJECTION].unit_bytes
        room = self._usable_bytes(machine) - staying
        if room < 0:
            raise UserError(
                f"{self.model}: projections and head take {staying / GB:.1f} GB, and {machine.device.name} has "
                f"{self._usable_bytes(machine) / GB:.1f} GB for weights: expected a larger GPU, or a smaller model"
            )
        return room

    def _usable_bytes(self, machine: Profile) -> float:
        return machine.device.capacity_bytes - self.reserved_bytes

    @property
    def law(self) -> BetaLaw:
        """How neurons are used."""
        return BetaLaw(self.active, self.far, self.near)

    def cache_bytes(self) -> Float[np.ndarray, " tokens"]:
        """Bytes of the keys and values of a layer that each generated token goes through."""
        width = 2 * self.shape.key_value_heads * self.shape.head_size * self.element_bytes
        return self.batch * width * self._contexts()

    def attention_products(self) -> Float[np.ndarray, " tokens"]:
        """Multiply-adds of scores and sums over values in a layer."""
        return self.batch * 2 * self.shape.heads * self.shape.head_size * self._contexts()

    def _contexts(self) -> Float[np.ndarray, " tokens"]:
        """Positions before each sampled token; these are spread over all that are generated."""
        return self.prompt + np.linspace(1, self.generated, self.sampled_tokens)


def loads_of(machine: Profile, serving: Serving, system: System) -> dict[str, BlockLoads]:
    """The loads of each block under a system; dense systems have all layers, sparse ones those that are sampled.

    Raises `UserError` for a GPU that is smaller than the projections and the head, or DIMMs that do not hold the model.
    """
    columns = _columns(machine, serving, system)
    if system.cold == "gpus" and serving.resident_share(machine) < 1:
        raise UserError(
            f"{serving.model}: its {serving.nbytes / GB:.0f} GB do not fit {machine.device.name}: expected more GPUs"
        )
    if not system.sparse:
        return _dense_loads(serving, serving.resident_share(machine), columns)
    return _sparse_loads(machine, serving, system, columns)


def _columns(machine: Profile, serving: Serving, system: System) -> int:
    """How many processors share the cold neurons."""
    if system.cold != "dimms":
        return 1
    if machine.near_data is None:
        raise UserError(f"{machine.id} has no near-data DIMMs: expected a machine with some, or cold neurons elsewhere")
    dimms, needed = int(machine.near_data.dimms), machine.near_data.dimms_needed(serving.nbytes)
    if dimms < needed:
        raise UserError(f"{serving.model}: {dimms} DIMMs hold less than its weights: expected {needed} or more")
    return dimms


def _dense_loads(serving: Serving, resident_share: float, columns: int) -> dict[str, BlockLoads]:
    """Whole layers on the GPU, the first ones; of the others each DIMM computes its share."""
    layers = serving.shape.layers
    resident = (np.arange(layers) < round(resident_share * layers)).astype(float)[:, None]
    made = {}
    for name, block in serving.blocks.items():
        hot = block.units * resident
        cold = np.repeat((block.units - hot)[..., None] / columns, columns, axis=-1)
        made[name] = BlockLoads(hot, serving.batch * hot, cold, serving.batch * cold)
    return made


def _sparse_loads(machine: Profile, serving: Serving, system: System, columns: int) -> dict[str, BlockLoads]:
    """Active neurons of the sampled layers, on the GPU or where they lie; the projection is on the GPU."""
    one, nothing = np.ones((1, 1)), np.zeros((1, 1, columns))
    made = {PROJECTION: BlockLoads(one, serving.batch * one, nothing, nothing)}
    places, moves = iter(_offline(machine, serving, system, columns)), _moves_in_the_shadow(machine, serving)
    for name in NEURONS:
        layers, before = [], None
        with ThreadPoolExecutor(THREADS) as pool:  # few layers' draws are in memory at a time
            for layer, counts in enumerate(drawn(serving, name)):
                hot, dimm = (each.copy() for each in next(places))
                parents = None if before is None else (before, parents_of(serving, name, layer))
                arguments = serving, system, counts, parents, hot, dimm, columns, moves[name]
                layers.append(pool.submit(_follow, *arguments))
                wait(layers[:-THREADS])
                before = counts
        layers = [future.result() for future in layers]
        made[name] = BlockLoads(*(np.stack(each) for each in zip(*layers, strict=True)))
    return {name: made[name] for name in serving.blocks}


def _offline(machine: Profile, serving: Serving, system: System, columns: int) -> list[tuple]:
    """Hot neurons, and the DIMM of each, before the first token: of all sampled attention blocks, then of all FFNs."""
    blocks, room = neuron_blocks(machine, serving, system), gpu_room(machine, serving, columns)
    if system.hot == "frequent":
        found = greedy(blocks, room)
        return list(zip(found.hot, found.dimm, strict=True))
    share = room.gpu_bytes / room.dimm_bytes if system.hot == "random" else 0.0
    chosen = []
    for seed, block in enumerate(blocks, serving.seed):
        units = len(block.frequency)
        hot = np.random.default_rng(seed).permutation(units) < round(share * units)
        chosen.append((hot, by_chance(units, columns, seed)))
    return chosen


def neuron_blocks(machine: Profile, serving: Serving, system: System) -> list[NeuronBlock]:
    """The sampled layers' blocks for the offline mapping, the attention's first, with the usage known beforehand."""
    made = []
    for name in NEURONS:
        block = serving.blocks[name]
        gpu_s = max(NO_TIME_S, block.unit_bytes / (machine.device.bandwidth_gb_s * GB))
        for layer in range(serving.sampled_layers):
            usage = usage_of(serving, name, layer)
            needed = 1 - (1 - usage) ** serving.batch  # by some sequence
            uses = np.divide(serving.batch * usage, needed, out=np.ones_like(usage), where=needed > 0)
            made.append(NeuronBlock(needed, gpu_s, _cold_s(machine, system, block, uses), block.unit_bytes))
    return made


def gpu_room(machine: Profile, serving: Serving, dimms: int | None = None) -> Room:
    """The sampled layers' part of the GPU's room for neurons, and DIMMs that each could hold all of these layers."""
    share = serving.sampled_layers / serving.shape.layers
    nbytes = sum(serving.sampled_layers * serving.blocks[name].nbytes for name in NEURONS)
    return Room(round(share * serving.neuron_bytes_on_gpu(machine)), dimms or int(machine.near_data.dimms), nbytes)


def _cold_s(machine: Profile, system: System, block: WeightBlock, uses: Float[np.ndarray, " units"]):
    """Seconds that a cold neuron takes where the system has it, when so many sequences of a batch use it."""
    if system.cold == "dimms":
        return machine.near_data.gemv_s(block.unit_bytes, uses * block.unit_products)
    gb_s = machine.dram.bandwidth_gb_s if system.cold == "cpu" else machine.links.dram_to_device_gb_s
    return block.unit_bytes / (gb_s * GB)


def usage_of(serving: Serving, name: str, layer: int) -> Float[np.ndarray, " units"]:
    """The share of tokens that each neuron of a drawn layer is active for, before any drift."""
    units = serving.blocks[name].units
    usage = np.empty(units)
    usage[ranks(units, layer, serving.seed, name)] = serving.law.usage(units)
    return usage


def parents_of(serving: Serving, name: str, layer: int) -> Int64[np.ndarray, " units"]:
    """The parent of each neuron in the layer before: the neuron of the same rank of usage."""
    units = serving.blocks[name].units
    parents = np.empty(units, np.int64)
    parents[ranks(units, layer, serving.seed, name)] = ranks(units, layer - 1, serving.seed, name)
    return parents


def drawn(serving: Serving, name: str) -> Iterator[UInt8[np.ndarray, "tokens units"]]:
    """Layer after layer: how many sequences activate each neuron, for the prompt's sampled tokens, then the others."""
    units, tokens = serving.blocks[name].units, serving.sampled_prompt + serving.sampled_tokens
    drift = Drift(serving.drift, hot=HOT, start=serving.sampled_prompt)
    seeds = [serving.seed + SEQUENCE * number for number in range(serving.batch)]
    laws = [serving.law] * serving.sampled_layers
    sequences = [draw_layers(laws, units, tokens, seed, serving.copied, drift, name) for seed in seeds]
    for layer, (counts, *others) in enumerate(zip(*sequences, strict=True)):
        first = ranks(units, layer, seeds[0], name)
        for seed, active in zip(seeds[1:], others, strict=True):
            counts[:, first] += active[:, ranks(units, layer, seed, name)]  # neurons of one rank are the same neuron
        yield counts


def _follow(
    serving: Serving,
    system: System,
    counts: UInt8[np.ndarray, "tokens units"],
    parents: Parents | None,
    hot: Bool[np.ndarray, " units"],
    dimm: Int8[np.ndarray, " units"],
    columns: int,
    moves: int,
) -> list[np.ndarray]:
    """The work of one layer's block: neurons are swapped, computed, observed and, once a window, remapped.

    Returns the fields of `BlockLoads`. The activity of a neuron's parent is known before this layer is computed.
    """
    prompt, sequences = serving.sampled_prompt, np.arange(serving.batch + 1)
    table = state_table.packed(starting_states((counts[:prompt] > 0).mean(0)))
    recent, rows = np.zeros(len(hot), np.uint8), []
    for token in range(prompt, len(counts)):
        active, swapped, moved = counts[token] > 0, 0, 0
        if system.adjusts:
            change = swap(
                _heat(system, state_table.unpacked(table, len(hot)), parents, token), hot, serving.hot_state, moves
            )
            hot[change.dropped], hot[change.loaded], swapped = False, True, len(change.loaded)
        if system.remaps and token > prompt and (token - prompt) % serving.window == 0:
            dimm, moving = remap(recent, dimm, columns)
            recent[:], moved = 0, len(moving)
        found = tally(np.where(hot, np.int8(columns), dimm), counts[token], columns + 1, serving.batch + 1)
        neurons, products = found[:, 1:].sum(1), found @ sequences
        rows.append((neurons[-1], products[-1], neurons[:-1], products[:-1], swapped, moved))
        recent += active & ~hot
        state_table.observe(table, active, GAIN, LOSS)
    return [np.array(each, dtype=float) for each in zip(*rows, strict=True)]


def _heat(
    system: System, state: UInt8[np.ndarray, " units"], parents: Parents | None, token: int
) -> UInt8[np.ndarray, " units"]:
    """The score that the adjustment compares with the hot threshold: the states, what parents add, or both."""
    heat = np.zeros_like(state) if system.adjusts == "layer" else state
    if system.adjusts == "token" or parents is None:
        return heat
    before, of = parents
    return np.minimum(heat + PARENTS * (before[token] > 0)[of].view(np.uint8), state_table.HIGHEST)


def _moves_in_the_shadow(machine: Profile, serving: Serving) -> dict[str, int]:
    """How many neurons of each block PCIe brings while the GPU computes the projection (section IV-C2)."""
    shadow_s = serving.blocks[PROJECTION].unit_bytes / (machine.device.bandwidth_gb_s * GB)
    nbytes = shadow_s * machine.links.dram_to_device_gb_s * GB / len(NEURONS)
    return {name: int(nbytes // serving.blocks[name].unit_bytes) for name in NEURONS}
