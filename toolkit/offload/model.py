"""A packed model that runs from disk: `pack_model` writes it, and `OffloadedModel` generates with it under a budget.

with OffloadedModel.open(folder, dram_bytes=100_000_000) as model:
    tokens = model.generate(**model.tokenizer("Packed weights", return_tensors="pt"), max_new_tokens=20)
    model.timeline.stages()
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.interchange.reading import load_tokenizer
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.skeleton import empty_model, read_config, read_generation_config
from toolkit.offload.budget import Budget
from toolkit.offload.checks import check_placement, check_weights
from toolkit.offload.device import Cpu, Cuda, open_device
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.options import Options
from toolkit.offload.plan import Plan, budgets_of, placed, scratch_bytes
from toolkit.offload.single_token import SingleToken
from toolkit.offload.streamer import Streamer
from toolkit.offload.turn import Turn
from toolkit.offload.uploader import Uploader
from toolkit.policies.placement import LayerMap
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder, Timeline


@dataclass(eq=False, repr=False)
class OffloadedModel:
    """A decoder-only Hugging Face model whose decoder linears stay packed: on a GPU, in DRAM or on disk.

    `model` is the model itself, on `device`. Everything that runs it (`generate`, `toolkit.evaluation`) streams the
    weights. One thread runs it at a time, since layers share buffers; a second one gets a `UserError`. Embeddings,
    norms, biases and the head stay in the memory of `device`. `budgets` are those of the tiers "dram" and "device".
    """

    store: Store
    model: nn.Module
    source: Streamer | Uploader
    placement: LayerMap
    device: Cpu | Cuda
    budgets: Mapping[str, Budget]
    recorder: Recorder
    mode: str  # how the disk is really read, as `Reader.mode`
    _stack: ExitStack = field(default_factory=ExitStack)
    _turn: Turn = field(default_factory=Turn)
    _layer: tuple[int, Mapping[str, Packed]] | None = None
    _step: SingleToken | None = None

    @classmethod
    def open(cls, folder: str | Path, method: str = "endor", **settings: object) -> Self:
        """Open a packed model, which `toolkit.storage.packing.pack_model` wrote.

        `settings` are the other fields of `Options`: `dram_bytes`, `placement`, `policy`, `reader`, `verify`, `device`,
        `device_bytes`. Raises what `from_options` raises.
        """
        return cls.from_options(folder, Options(method, **settings))

    @classmethod
    def from_options(cls, folder: str | Path, options: Options) -> Self:
        """Open a packed model.

        Raises `FormatError` for a damaged store, and `UserError` for a GPU that is not there, a store of another model
        or a budget that is too small; the message says how much is needed.
        """
        way = options.way
        with ExitStack() as stack:
            device = stack.enter_context(open_device(options.device))
            budgets = budgets_of(options, device)
            store, recorder = Store.open(folder), Recorder()
            if options.verify:
                store.verify_files()
            model = _empty_model(store, way.stored.format)
            layers = store.layers_of(way.stored.format)
            check_weights(store, layers)
            fixed = {"scratch": scratch_bytes(layers, way), "rest": store.rest_bytes}
            placement = options.placement or placed(layers, way, budgets, fixed)
            check_placement(placement, len(layers), options.on_gpu)
            budgets[device.tier].take(**fixed)
            if options.on_gpu:  # each tensor is read into DRAM first
                budgets["dram"].check(rest=max((run.nbytes for run in store.index.rest), default=0))
            if options.verify:  # this takes long, so it is the last check
                store.verify(way.stored.format)
            plan = Plan(layers, placement.tiers, way)
            source, mode = _source(stack, store, plan, options.reader, device, budgets, recorder)
            opened = cls(store, model, source, placement, device, budgets, recorder, mode)
            with device.within_memory():
                opened._take_over(device.empty(fixed["scratch"]), packed=way.stored.used_packed)
            opened._stack = stack.pop_all()
        return opened

    @property
    def tokenizer(self):
        """The tokenizer that was packed with the model. Raises `UserError` if there is none."""
        return load_tokenizer(self.store.model_folder)

    @property
    def timeline(self) -> Timeline:
        """All reads, copies, decodes and products since the model was opened."""
        return self.recorder.timeline()

    def generate(self, *arguments: Tensor, **named: object) -> Tensor:
        """Hugging Face's `generate`, without gradients. Tensors are moved to the device first.

        Raises `UserError` if another thread runs or closes this model.
        """
        with self._turn.taken(), torch.no_grad(), self.device.within_memory():
            moved = {name: self._on_device(value) for name, value in named.items()}
            return self.model.generate(*map(self._on_device, arguments), **moved)

    def close(self) -> None:
        """Wait for the pass and the read under way, close the files and release the weights.

        The model cannot run again. Text that another thread generates ends after this pass, with a `UserError` there.
        """
        self._turn.end()
        self._stack.close()
        self._layer = None
        for module in self.model.modules():
            if isinstance(module, OffloadedLinear):
                module.close()
        if self._step:
            self._step.close()

    def __enter__(self) -> Self:
        """The model itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _take_over(self, scratch: Tensor, packed: bool) -> None:
        """Replace the model's linears by ours, and load the other stored tensors into the model."""
        for number, block in enumerate(decoder_blocks(self.model)):
            for name, linear in decoder_linears(block).items():
                fetch = partial(self._weight, number, name)
                ours = OffloadedLinear(linear, name, number, fetch, scratch, packed, self.recorder, self.device)
                ours.forward = self._turn.guard(ours.forward)  # blocks can be called by themselves
                block.set_submodule(name, ours)
        rest = {name: self._on_device(tensor) for name, tensor in self.store.rest()}
        self.model.load_state_dict(rest, strict=False, assign=True)
        self.model.tie_weights()
        left = [name for name, tensor in self.model.named_parameters() if tensor.is_meta]
        if left:
            raise UserError(f"{self.store.folder} has no {left[0]}: pack the model again")
        self.model.to(self.device.torch_device).eval().requires_grad_(False)
        self._step = SingleToken.of(self.model) if packed and isinstance(self.device, Cpu) else None
        forward = self._step.guard(self.model.forward) if self._step else self.model.forward
        self.model.forward = self._turn.guard(forward)

    def _on_device(self, value: object) -> object:
        return value.to(self.device.torch_device) if isinstance(value, Tensor) else value

    def _weight(self, number: int, name: str) -> Packed:
        if self._layer is None or self._layer[0] != number:
            self._layer = None  # the next line may raise
            self._layer = number, self.source.layer(number)
        return self._layer[1][name]


def _empty_model(store: Store, variant: str) -> nn.Module:
    """The model without its parameters, of which this store holds every one. Buffers that are computed are there."""
    runs = (*store.index.ops, *store.index.rest)
    config = read_config(store.model_folder, [piece.shape for run in runs for piece in run.pieces.values()])
    generation = read_generation_config(store.model_folder)
    model = empty_model(config, lambda model: store.check_fits(model, variant))
    if generation is not None:
        model.generation_config = generation
    return model


def _source(
    stack: ExitStack,
    store: Store,
    plan: Plan,
    reader: str,
    device: Cpu | Cuda,
    budgets: Mapping[str, Budget],
    recorder: Recorder,
) -> tuple[Streamer | Uploader, str]:
    """What brings the layers to where they are used, and the mode of its reads."""
    form, direct = plan.way.stored.format, None
    if plan.way.path == "direct":
        direct, reader = stack.enter_context(open_reader(reader, store, form)), "threads"
    files = stack.enter_context(open_reader(reader, store, form))
    if plan.way.device == "cpu":
        return stack.enter_context(Streamer(plan, files, budgets["dram"], recorder)), files.mode
    return stack.enter_context(Uploader(plan, device, files, direct, budgets, recorder)), (direct or files).mode
