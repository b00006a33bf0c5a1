"""A packed model that runs from disk: `pack_model` wrote it, `OffloadedModel` generates with it under a budget.

with OffloadedModel.open(folder, dram_bytes=100_000_000) as model:
    tokens = model.generate(**model.tokenizer("Packed weights", return_tensors="pt"), max_new_tokens=20)
    model.timeline.stages()
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError, unknown
from toolkit.formats import Packed
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.offload.budget import Budget
from toolkit.offload.cpu import scratch_bytes
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.methods import METHODS
from toolkit.offload.placement import LayerMap, nearest_first, needed_bytes
from toolkit.offload.streamer import SLOTS, Streamer
from toolkit.offload.timeline import Recorder, Timeline
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import OpRun
from toolkit.storage.store import Store


class OffloadedModel:
    """A decoder-only Hugging Face model whose decoder linears stay packed, in DRAM or on disk.

    `model` is the model itself, on the CPU; anything that runs it (`generate`, `toolkit.evaluation`) streams the
    weights. One pass at a time: layers share buffers. Embeddings, norms, biases and the head stay in DRAM.
    """

    def __init__(self, store: Store, model: nn.Module, streamer: Streamer, budget: Budget, recorder: Recorder):
        self.store, self.model, self.streamer, self.budget, self.recorder = store, model, streamer, budget, recorder
        self._layer: tuple[int, Mapping[str, Packed | Scaled]] | None = None

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
    ) -> Self:
        """Open a packed model.

        Args:
            folder: as `toolkit.storage.packing.pack_model` wrote it.
            method: a key of `METHODS`; the store must hold the variant of its format.
            dram_bytes: hard budget for all weights and buffers (not for activations and the key-value cache); None for
                no limit.
            placement: how many layers stay in DRAM; None fills it with the first ones as far as the budget goes.
            policy: "pipelined" reads the next layer while one is used; "sequential" does one thing at a time.
            reader: a key of `toolkit.storage.readers.READERS`.
            verify: read all of the store first and compare checksums. Weights are not checked again on their way, and
                kernels trust the places that packed ones name: leave it out only for a store that was verified before.

        Raises `FormatError` for a damaged store and `UserError` for an unknown name or a budget that is too small; the
        message says how much is needed.
        """
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if policy not in SLOTS:
            raise unknown("policy", policy, SLOTS)
        store, budget, recorder = Store.open(folder), Budget("DRAM", dram_bytes), Recorder()
        variant = METHODS[method].format
        if verify:
            store.verify()
        model = _empty_model(store)
        store.check_fits(model, variant)
        runs = [run for layer in store.layers_of(variant) for run in layer.ops.values()]
        _check_types(store, variant, runs)
        fixed = {"scratch": max(map(scratch_bytes, runs)), "rest": store.rest_bytes}
        placement = placement or _placement(store, variant, policy, budget, fixed)
        budget.take(**fixed)
        tiers, count = placement.tiers, len(decoder_blocks(model))
        if len(tiers) != count or "device" in tiers:
            raise UserError(f"{placement}: expected {count} layers in DRAM and storage together, none on a device")
        scratch = torch.zeros(fixed["scratch"], dtype=torch.uint8)
        with ExitStack() as stack:
            source = stack.enter_context(open_reader(reader, store, variant))
            streamer = stack.enter_context(Streamer(store, variant, tiers, source, policy, budget, recorder))
            opened = cls(store, model, streamer, budget, recorder)
            opened._take_over(scratch, packed=METHODS[method].decoded_in is None)
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
        """Hugging Face's `generate`, without gradients."""
        with torch.no_grad():
            return self.model.generate(*arguments, **named)

    def close(self) -> None:
        """Wait for the read that is under way and close the files; the model cannot be run any more."""
        self._stack.close()

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
                ours = OffloadedLinear(linear, name, number, fetch, scratch, packed, self.recorder)
                block.set_submodule(name, ours)
        self.model.load_state_dict(dict(self.store.rest()), strict=False, assign=True)
        self.model.tie_weights()
        left = [name for name, tensor in self.model.named_parameters() if tensor.is_meta]
        if left:
            raise UserError(f"{self.store.folder} has no {left[0]}: pack the model again")
        self.model.eval().requires_grad_(False)

    def _weight(self, number: int, name: str) -> Packed | Scaled:
        if self._layer is None or self._layer[0] != number:
            self._layer = None  # should the next line raise
            self._layer = number, self.streamer.layer(number)
        return self._layer[1][name]


def _empty_model(store: Store) -> nn.Module:
    """The model without its parameters; buffers that are computed, not stored, are there."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with hub.quiet(), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(store.model_folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # what is tied became two parameters on its way to nowhere
    return model


def _check_types(store: Store, variant: str, runs: Sequence[OpRun]) -> None:
    """Integers alone are no weights."""
    for run in runs:
        if not (run.scales_dtype or run.dtype).is_floating_point:
            raise UserError(
                f"{store.folder}: {run.label} is {run.dtype} without scales, which tells no weight; pack the model "
                f"with --int8, or its weights by `Scaled.encode`"
            )


def _placement(store: Store, variant: str, policy: str, budget: Budget, fixed: Mapping[str, int]) -> LayerMap:
    """The first layers in DRAM, as far as the budget goes beside what must be there."""
    sizes = [layer.nbytes for layer in store.layers_of(variant)]
    budget.check(**fixed, slots=needed_bytes([], sizes, SLOTS[policy]))
    return nearest_first(sizes, budget.left_bytes - sum(fixed.values()), SLOTS[policy])
