"""A packed model that runs from disk: `pack_model` wrote it, `OffloadedModel` generates with it under a budget.

with OffloadedModel.open(folder, dram_bytes=100_000_000) as model:
    tokens = model.generate(**model.tokenizer("Packed weights", return_tensors="pt"), max_new_tokens=20)
    model.timeline.stages()
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats import Packed
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks, decoder_linears, hub
from toolkit.offload.budget import Budget
from toolkit.offload.device import Cpu, Cuda, open_device
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.streamer import Streamer
from toolkit.offload.uploader import Uploader, forms, staging_bytes
from toolkit.offload.weights import scratch_bytes
from toolkit.policies.methods import METHODS, Method
from toolkit.policies.placement import LayerMap, fitting, needed_bytes
from toolkit.policies.ways import POLICIES
from toolkit.storage.readers import READERS, open_reader
from toolkit.storage.runs import Layer, OpRun
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder, Timeline

OF_FREE = 0.9  # share of free memory that weights and buffers may take, if nothing is said
GENERATION = "generation_config.json"


@dataclass(eq=False, repr=False)
class OffloadedModel:
    """A decoder-only Hugging Face model whose decoder linears stay packed: on a GPU, in DRAM or on disk.

    `model` is the model itself, on `device`; anything that runs it (`generate`, `toolkit.evaluation`) streams the
    weights. One pass at a time: layers share buffers. Embeddings, norms, biases and the head stay where it computes.
    `budgets` are those of the tiers "dram" and "device".
    """

    store: Store
    model: nn.Module
    source: Streamer | Uploader
    placement: LayerMap
    device: Cpu | Cuda
    budgets: Mapping[str, Budget]
    recorder: Recorder
    mode: str  # of the reader: what really happens, as `Reader.mode`
    _stack: ExitStack = field(default_factory=ExitStack)
    _layer: tuple[int, Mapping[str, Packed]] | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        method: str = "endor",
        dram_bytes: int | None = None,
        placement: LayerMap | None = None,
        policy: str = "pipelined",
        reader: str = "threads",
        verify: bool = True,
        device: str = "cpu",
        device_bytes: int | None = None,
    ) -> Self:
        """Open a packed model.

        Args:
            folder: as `toolkit.storage.packing.pack_model` wrote it.
            method: a key of `METHODS`; the store must hold the variant of its format.
            dram_bytes: hard budget for all weights and buffers (not for activations and the key-value cache); None for
                nine tenths of what is free.
            placement: how many layers stay on the device and in DRAM; None fills the nearest tier with the first ones
                as far as its budget goes.
            policy: "pipelined" brings the next layer while one is used; "sequential" does one thing at a time.
            reader: a key of `toolkit.storage.readers.READERS`; "kvikio" reads straight into a GPU's memory.
            verify: read all of the store first and compare checksums. Weights are not checked again on their way, and
                kernels trust the places that packed ones name: leave it out only for a store that was verified before.
            device: "cpu", or a GPU as torch calls it: "cuda", "cuda:1".
            device_bytes: hard budget for a GPU's memory, as `dram_bytes`. What is asked for is counted; torch rounds
                each piece up to some MB.

        Raises `FormatError` for a damaged store and `UserError` for an unknown name, a GPU that is not there or a
        budget that is too small; the message says how much is needed.
        """
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if policy not in POLICIES:
            raise unknown("policy", policy, POLICIES)
        with ExitStack() as stack:
            place = stack.enter_context(open_device(device))
            budgets = _budgets(place, dram_bytes, device_bytes)
            _check_reader(reader, METHODS[method], place)
            store, recorder = Store.open(folder), Recorder()
            if verify:
                store.verify_files()
            model = _empty_model(store)
            store.check_fits(model, METHODS[method].format)
            layers = store.layers_of(METHODS[method].format)
            runs = [run for layer in layers for run in layer.ops.values()]
            _check_types(store, runs)
            unpacked = place.tier == "device" and METHODS[method].decoded_in == "dram"
            fixed = {"scratch": max(scratch_bytes(run, unpacked) for run in runs), "rest": store.rest_bytes}
            direct = READERS[reader].into == "device"
            placement = placement or _placement(layers, METHODS[method], policy, place, budgets, fixed, direct)
            budgets[place.tier].take(**fixed)
            if place.tier == "device":  # each tensor comes by way of DRAM
                budgets["dram"].check(rest=max((run.nbytes for run in store.index.rest), default=0))
            if len(placement.tiers) != len(layers) or (placement.device and place.tier != "device"):
                where = "on the device, in DRAM and" if place.tier == "device" else "in DRAM and"
                raise UserError(f"{placement}: expected {len(layers)} layers {where} in storage together")
            if verify:  # last of all checks, since it takes long
                store.verify()
            source, mode = _source(stack, store, METHODS[method], placement, place, policy, reader, budgets, recorder)
            opened = cls(store, model, source, placement, place, budgets, recorder, mode)
            with place.within_memory():
                opened._take_over(place.empty(fixed["scratch"]), packed=METHODS[method].decoded_in is None)
            opened._stack = stack.pop_all()
        return opened

    @property
    def tokenizer(self):
        """The tokenizer that was packed with the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.store.model_folder, local_files_only=True)

    @property
    def timeline(self) -> Timeline:
        """Every read, decode and product since the model was opened."""
        return self.recorder.timeline()

    def generate(self, *arguments: Tensor, **named: object) -> Tensor:
        """Hugging Face's `generate`, without gradients; tensors elsewhere are moved to the device first."""
        with torch.no_grad(), self.device.within_memory():
            return self.model.generate(*map(self._here, arguments), **{key: self._here(named[key]) for key in named})

    def close(self) -> None:
        """Wait for the read that is under way, close the files and let go of the weights: it cannot be run any more."""
        self._stack.close()
        self._layer = None
        for module in self.model.modules():
            if isinstance(module, OffloadedLinear):
                module.close()

    def __enter__(self) -> Self:
        """The model itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _take_over(self, scratch: Tensor, packed: bool) -> None:
        """Put our linears in the place of the model's, and what is stored beside them into the model."""
        for number, block in enumerate(decoder_blocks(self.model)):
            for name, linear in decoder_linears(block).items():
                fetch = partial(self._weight, number, name)
                ours = OffloadedLinear(linear, name, number, fetch, scratch, packed, self.recorder, self.device)
                block.set_submodule(name, ours)
        self.model.load_state_dict({k: self._here(rest) for k, rest in self.store.rest()}, strict=False, assign=True)
        self.model.tie_weights()
        left = [name for name, tensor in self.model.named_parameters() if tensor.is_meta]
        if left:
            raise UserError(f"{self.store.folder} has no {left[0]}: pack the model again")
        self.model.to(self.device.torch_device).eval().requires_grad_(False)

    def _here(self, value: object) -> object:
        return value.to(self.device.torch_device) if isinstance(value, Tensor) else value

    def _weight(self, number: int, name: str) -> Packed | Scaled:
        if self._layer is None or self._layer[0] != number:
            self._layer = None  # should the next line raise
            self._layer = number, self.source.layer(number)
        return self._layer[1][name]


def _empty_model(store: Store) -> nn.Module:
    """The model without its parameters; buffers that are computed, not stored, are there."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with hub.quiet(), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(store.model_folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config)
        if (store.model_folder / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(store.model_folder, local_files_only=True)
    model.tie_weights()  # what is tied became two parameters on its way to nowhere
    return model


def _check_types(store: Store, runs: Sequence[OpRun]) -> None:
    """Integers alone are no weights."""
    for run in runs:
        if not (run.scales_dtype or run.dtype).is_floating_point:
            raise UserError(
                f"{store.folder}: {run.label} is {run.dtype} without scales, which tells no weight; pack the model "
                f"with --int8, or its weights by `Scaled.encode`"
            )


def _budgets(place: Cpu | Cuda, dram_bytes: int | None, device_bytes: int | None) -> dict[str, Budget]:
    if place.tier != "device" and device_bytes is not None:
        raise UserError(f"device_bytes={device_bytes}: a CPU has no memory but DRAM: set dram_bytes, or device='cuda'")
    free = {found.tier: int(OF_FREE * found.free_bytes) for found in (Cpu(), place)}
    limits = {"dram": dram_bytes, "device": device_bytes}
    limits |= {tier: nbytes for tier, nbytes in free.items() if limits[tier] is None}
    return {"dram": Budget("DRAM", limits["dram"]), "device": Budget("device", limits["device"])}


def _check_reader(reader: str, method: Method, place: Cpu | Cuda) -> None:
    """Refuse what cannot be read directly: to a place without a GPU, or what the CPU has to unpack."""
    if reader not in READERS:
        raise unknown("reader", reader, READERS)
    if READERS[reader].into == "device" and (place.tier != "device" or method.decoded_in == "dram"):
        why = "this method unpacks on the CPU" if place.tier == "device" else "this model computes on the CPU"
        raise UserError(f"reader {reader!r} reads into a GPU's memory, and {why}: use reader 'threads'")


def _placement(
    layers: Sequence[Layer],
    method: Method,
    policy: str,
    place: Cpu | Cuda,
    budgets: Mapping[str, Budget],
    fixed: Mapping[str, int],
    direct: bool,
) -> LayerMap:
    """The first layers in the nearest tier, as far as its budget goes beside what must be there."""
    on_device = 0
    if place.tier == "device":
        staying, passing = ([form.nbytes for form in found] for found in forms(layers, method))
        on_device = _fitting(staying, passing, policy, budgets["device"], fixed)
        fixed = {"staging": staging_bytes(layers, method)}
    stored = [layer.nbytes for layer in layers[on_device:]]
    passing = [0] * len(stored) if direct else stored
    in_dram = _fitting(stored, passing, policy, budgets["dram"], fixed)
    return LayerMap(on_device, in_dram, len(stored) - in_dram)


def _fitting(
    staying: Sequence[int], passing: Sequence[int], policy: str, budget: Budget, fixed: Mapping[str, int]
) -> int:
    """How many layers can stay. Raises `UserError` unless all of them can, or at least pass through the slots."""
    slots = POLICIES[policy].slots
    least = min(needed_bytes([], passing, slots), needed_bytes(staying, [], slots))
    budget.check(**fixed, slots=least)
    return fitting(staying, passing, slots, budget.left_bytes - sum(fixed.values()))


def _source(
    stack: ExitStack,
    store: Store,
    method: Method,
    placement: LayerMap,
    place: Cpu | Cuda,
    policy: str,
    reader: str,
    budgets: Mapping[str, Budget],
    recorder: Recorder,
) -> tuple[Streamer | Uploader, str]:
    """What brings the layers to where they are used, and the mode of its reads."""
    direct = None
    if READERS[reader].into == "device":
        direct, reader = stack.enter_context(open_reader(reader, store, method.format)), "threads"
    files = stack.enter_context(open_reader(reader, store, method.format))
    if place.tier != "device":
        streamer = Streamer(store, method.format, placement.tiers, files, policy, budgets["dram"], recorder)
        return stack.enter_context(streamer), files.mode
    uploader = Uploader(store, method, placement.tiers, place, files, direct, policy, budgets, recorder)
    return stack.enter_context(uploader), (direct or files).mode
