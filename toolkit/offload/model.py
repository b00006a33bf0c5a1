"""A model that runs from what `pack` wrote, or from a GGUF file, within a budget of memory: transformers' own modules.

GGUF files of models that `toolkit.offload.decoder` knows run there, without torch, unless this is asked for.

    with OffloadedModel.open(folder, dram_bytes=100_000_000) as model:
        tokens = model.generate(**model.tokenizer("Packed weights", return_tensors="pt"), max_new_tokens=20)
        model.timeline.breakdown()  # where the time went

How weights come is a strategy: whole layers are streamed (`toolkit.offload.streamed`), or only what a token needs is
read: FFN neurons (`toolkit.offload.by_neuron`), or experts (`toolkit.offload.by_expert`). The folder says which.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from html import escape
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError, check_whole, disk_trouble
from toolkit.formats import decode
from toolkit.interchange.reading import load_tokenizer
from toolkit.kernels.engine import compiled
from toolkit.memory_limits import return_large_blocks, trim
from toolkit.models.head import HEAD, linears_by_layer
from toolkit.models.new_tensors import lasting
from toolkit.offload.budget import Budget
from toolkit.offload.by_expert import ByExpert
from toolkit.offload.by_neuron import ByNeuron
from toolkit.offload.device import Cpu, Cuda, open_device
from toolkit.offload.draft import Speculative, shares_cache
from toolkit.offload.embedding import StoredEmbedding
from toolkit.offload.held import HeldLayers
from toolkit.offload.holding import holding
from toolkit.offload.methods import GGUF
from toolkit.offload.options import Options
from toolkit.offload.overhead import Overhead, ProcessLimit, TextRoom
from toolkit.offload.placement import LayerMap
from toolkit.offload.plan import budgets_of
from toolkit.offload.single_token import SingleToken
from toolkit.offload.speculation import Speculation
from toolkit.offload.strategy import Opening, Strategy, skeleton
from toolkit.offload.streamed import Streamed
from toolkit.offload.turn import Offloaded, Turn, unowned
from toolkit.storage import experts, neuron_packing
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.gguf_store import GgufStore, open_store
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store
from toolkit.timeline import Recorder, Timeline
from toolkit.vocabulary import check_vocabulary

TOKENS = 40  # that `generate_text` makes unless told otherwise, as `run` does
# by the variant of the folder; others are streamed
STRATEGIES: dict[str, Callable[[Opening], Strategy]] = {
    neuron_packing.LAYOUT: ByNeuron,
    experts.LAYOUT: ByExpert,
}


@dataclass(eq=False, repr=False)
class OffloadedModel(AbstractContextManager):
    """A decoder-only Hugging Face model whose decoder weights stay packed or by neuron: on a GPU, in DRAM or on disk.

    `model` is the model itself, on `device`. One thread runs it at a time, since layers share buffers; a second one
    gets a `UserError`. Norms, biases and the head stay in the memory of `device`. So do input embeddings that are the
    head's matrix, and all of them on a GPU; otherwise their rows are read (`toolkit.offload.embedding`). `budgets` are
    those of the tiers "dram" and "device". `speculation` counts what the last text with a draft took.
    """

    store: Store
    model: nn.Module
    strategy: Strategy
    device: Cpu | Cuda
    budgets: Mapping[str, Budget]
    recorder: Recorder
    _stack: ExitStack = field(default_factory=ExitStack)
    _turn: Turn = field(default_factory=Turn)
    speculation: Speculation | None = None

    @classmethod
    def open(
        cls, folder: str | Path, method: str | None = None, beside: Self | None = None, **settings: object
    ) -> Self:
        """Open a folder that `toolkit.storage.packing.pack_model` wrote, or a GGUF file, which stays as it is.

        `settings` are the other fields of `Options`. Load the tokenizer before, if `memory_bytes` is to count it.
        `beside` is another opened model. Both keep within its budgets and share equal tensors, such as embeddings and
        head. The settings have no budgets then.

        Raises `FormatError` for a damaged store, and `UserError` for a GPU that is not there, a store of another model,
        settings that the folder's layout does not have, trouble with the disk, or a budget that is too small; the
        message says how much is needed.
        """
        options = Options(method, **settings)
        with lasting(), _in_words(), ExitStack() as stack:
            device: Cpu | Cuda = stack.enter_context(open_device(options.device))
            store, recorder = open_store(folder), Recorder()
            options = stack.enter_context(_within_process(options, store))
            budgets = _budgets(options, device, beside)
            variant = store.variants[0] if len(store.variants) == 1 else ""
            common = {} if beside is None else _common(store, beside)
            if options.on_gpu and isinstance(store, GgufStore):
                raise UserError(
                    f"{store.folder} is a GGUF file, whose blocks the CPU reads and multiplies: take device cpu"
                )
            held = _held(store, variant) if variant in STRATEGIES and store.head_rows else None
            if held is not None and options.on_gpu:
                raise UserError(
                    f"{store.folder} has a packed head, which a GPU does not take: pack it with --head whole"
                )
            opening = Opening(store, options, device, budgets, recorder, stack, common, held)
            strategy = STRATEGIES.get(variant, Streamed)(opening)
            if options.verify and variant in STRATEGIES:  # this takes long, so it is the last check
                store.verify()
            opened = cls(store, strategy.model, strategy, device, budgets, recorder)
            with device.within_memory():
                opened._take_over(opening)
            opened._stack = stack.pop_all()
        trim()
        return opened

    @property
    def mode(self) -> str:
        """How the disk is really read, as `Reader.mode`."""
        return self.strategy.mode

    @property
    def placement(self) -> LayerMap | None:
        """Where each layer lives; None if neurons are read."""
        return self.strategy.placement

    @property
    def held(self) -> str:
        """The part of the weights that is in memory, and its bytes, in words."""
        return holding(self)

    def __repr__(self) -> str:
        """The folder or file, and what is in memory."""
        return f"<OffloadedModel {str(self.store.folder)!r}: {self.held}>"

    def _repr_html_(self) -> str:
        rows = {"from": self.store.folder, "in memory": self.held, "so far": self.timeline}
        cells = (f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    @cached_property
    def tokenizer(self):
        """The tokenizer that was packed with the model. Raises `UserError` if there is none."""
        return load_tokenizer(self.store.model_folder)

    @property
    def timeline(self) -> Timeline:
        """All reads, copies, decodes, bookkeeping, predictions and products since the model was opened."""
        return self.recorder.timeline()

    def generate_text(self, prompt: str, tokens: int = TOKENS, **settings: object) -> str:
        """The text that follows a prompt: the likeliest tokens, `tokens` of them, or fewer if the model ends it.

        `settings` go to `generate`: `do_sample=True` draws tokens, `draft=` has another opened model propose them.
        Raises `UserError` for a prompt of no token, for tokens that are no whole number from 1, and as `generate` does.
        """
        check_whole("tokens", tokens)
        tokenizer = self.tokenizer
        with hub.foreign_code(self.store.folder, "its tokenizer fails"):
            encoded = tokenizer(prompt, return_tensors="pt")
        if not (given := encoded["input_ids"].shape[1]):
            raise UserError(f"prompt {prompt!r}: this model's tokenizer makes no token of it; give a word")
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        named = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": padding, **settings}
        with hub.foreign_code(self.store.folder, "transformers cannot generate text with its settings"):
            text = self.generate(**encoded, **named)
        return tokenizer.decode(text[0, given:], skip_special_tokens=True)

    def generate(
        self, *arguments: Tensor, draft: Self | None = None, draft_tokens: int | None = None, **named: object
    ) -> Tensor:
        """Hugging Face's `generate`, without gradients. Tensors are moved to the device first.

        A `draft`, an opened packed copy of this model or a smaller one of the same vocabulary, proposes `draft_tokens`
        a pass (None: while a further one is worth its time), and this model checks them in one pass
        (`toolkit.offload.draft`). Raises `UserError` if another thread runs or closes this model, in a forked child,
        for ids that the model lacks, and for a draft of another vocabulary.
        """
        if draft is not None:
            named["custom_generate"] = self._with(draft, draft_tokens, named.get("streamer"))
        with self._turn.taken(), torch.no_grad(), self.device.within_memory():
            moved = {name: self._on_device(value) for name, value in named.items()}
            text = self.model.generate(*map(self._on_device, arguments), **moved)
        self.note_kernels()
        return text

    def note_kernels(self) -> None:
        """Note that this model has made a text: the kernels that it needs are compiled and kept."""
        compiled.note_run(_kernels(self.store))

    def _with(self, draft: Self, tokens: int | None, streamer: object) -> Speculative:
        """The decoding method that has this draft. Raises `UserError` for one that cannot serve this model."""
        shares = shares_cache(self.model, draft.model)
        if draft.device.tier != self.device.tier:
            raise UserError("the draft is on another device than the model: open both on one device")
        if isinstance(self.strategy, ByNeuron) and self.strategy.learns:
            raise UserError("predictors with a state would learn from tokens that are not accepted: take others")
        method = Speculative(draft.model, self.strategy.settle, tokens, streamer, shares)
        self.speculation = method.counts
        return method

    def close(self) -> None:
        """Wait for the pass and the read under way, close the files and release the weights.

        The model cannot run again. Text that another thread generates ends after this pass, with a `UserError` there.
        """
        self._turn.end()
        self._stack.close()
        trim()

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _take_over(self, opening: Opening) -> None:
        """Load the tensors that the strategy does not bring, then let it replace the model's modules."""
        rest = {name: self._on_device(tensor) for name, tensor in self.store.rest(opening.not_read)}
        rest |= opening.common
        self.model.load_state_dict(rest, strict=False, assign=True)
        del rest  # so that a strategy can let go of some
        self.model.tie_weights()
        if opening.held is not None:
            opening.held.take_over(self.model, self.recorder)
        self.strategy.take_over()
        if opening.on_disk:
            self._leave_on_disk(opening.on_disk)
        if left := [name for name, tensor in self.model.named_parameters() if tensor.is_meta]:
            raise UserError(f"{self.store.folder} has no {left[0]}: pack the model again")
        self.model.to(self.device.torch_device).eval().requires_grad_(False)
        if type(head := self.model.get_output_embeddings()) is nn.Linear:
            head.__class__ = _Head
        for module in self.model.modules():
            if isinstance(module, Offloaded):
                module.forward = self._turn.guard(module.forward)
                opening.stack.callback(module.close)
        forward = unowned(self.model.forward)
        if step := SingleToken.of(self.model) if self.strategy.by_token else None:
            forward = step.guard(forward)
            opening.stack.callback(step.close)
        words = self.model.get_input_embeddings().num_embeddings
        forward = _known_tokens(forward, words, partial(load_tokenizer, self.store.model_folder))
        self.model.forward = self._turn.guard(forward)

    def _leave_on_disk(self, weight: str) -> None:
        """Leave the input embedding with this weight on disk: its rows are read when they are needed."""
        module, embedding = weight.rpartition(".")[0], self.model.get_input_embeddings()
        ours = StoredEmbedding(embedding, partial(self.store.row, weight))
        self.model.set_submodule(module, ours)

    def _on_device(self, value: object) -> object:
        return value.to(self.device.torch_device) if isinstance(value, Tensor) else value


def unpack_model(store: Store, variant: str) -> nn.Module:
    """An ordinary dense model in memory, in evaluation mode and without gradients; packed weights are decoded.

    Raises `FormatError` for a damaged store, and `UserError` for one of another model.
    """
    store.verify(variant)
    model = skeleton(store, lambda outline: store.check_fits(outline, variant))
    model.load_state_dict(dict(store.rest()), strict=False, assign=True)
    slot = aligned_buffer(store.slot_bytes(variant))
    with open_reader(None, store, variant) as reader:
        every = linears_by_layer(model, store.head_rows)
        for layer, linears in zip(store.layers_of(variant), every, strict=True):
            reader.read(layer.chunks, slot)
            for op, packed in layer.view(slot).items():
                linears[op].weight = nn.Parameter(torch.empty(packed.shape, dtype=packed.dtype), requires_grad=False)
                linears[op].weight.data.copy_(decode(packed))
    if parts := [linears[HEAD].weight for linears in every if HEAD in linears]:
        model.get_output_embeddings().weight = nn.Parameter(torch.cat(parts), requires_grad=False)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class _Head(nn.Linear):
    """The output head. torch would multiply a slice, such as a prompt's last hidden state, 20 times as slowly."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → [..., vocabulary]."""
        return super().forward(x.flatten(0, -2).view(x.shape))


@contextmanager
def _in_words() -> Iterator[None]:
    """Trouble with a disk, or too many open files, becomes a `UserError`."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(error) or error from error


def _known_tokens(forward: Callable, words: int, tokenizer: Callable[[], object]) -> Callable:
    """The model's `forward`, which refuses ids that the model lacks before it computes anything."""

    @wraps(forward)
    def checked(*arguments, **named):
        if isinstance(ids := arguments[0] if arguments else named.get("input_ids"), Tensor):
            check_vocabulary(ids, words, tokenizer)
        return forward(*arguments, **named)

    return checked


def _budgets(options: Options, device: Cpu | Cuda, beside: OffloadedModel | None) -> Mapping[str, Budget]:
    if beside is None:
        return budgets_of(options, device)
    for name in ("dram_bytes", "memory_bytes", "device_bytes"):
        if (limit := getattr(options, name)) is not None:
            raise UserError(f"{name}={limit}: both models keep within the limit of the one that was opened first")
    return beside.budgets


@contextmanager
def _within_process(options: Options, store: Store) -> Iterator[Options]:
    """The options with the budget of DRAM that a limit for the process leaves; an error inside is about the limit."""
    if options.memory_bytes is None:
        yield options
        return
    return_large_blocks()
    overhead = Overhead.of_store(store, TextRoom(options.context), not compiled.ran_before(_kernels(store)))
    limit = ProcessLimit.now(options.memory_bytes, overhead, options.memory_from)
    with limit.explained():
        yield replace(options, dram_bytes=limit.budget(options.dram_bytes))


def _kernels(store: Store) -> str:
    """A name for the kernels that a store's model uses, by which it is noted that they are kept."""
    return f"opened-{'-'.join(store.variants)}"


def _held(store: Store, variant: str) -> HeldLayers:
    """The packed layers beside the neurons or experts of a store."""
    if isinstance(store, GgufStore):
        return HeldLayers(store, {number: layer for (number, found), layer in store.layers.items() if found == GGUF})
    layers = {number: layer for (number, found), layer in store.layers.items() if found == variant}
    return HeldLayers(store, {number: layer for number, layer in layers.items() if HEAD in layer.ops})


def _common(store: Store, beside: OffloadedModel) -> dict[str, Tensor]:
    """The tensors beside the ops' weights that another opened model has, too."""
    there = {run.name: run.identity for run in beside.store.index.rest}
    tensors = beside.model.state_dict(keep_vars=True)
    same = [run.name for run in store.index.rest if there.get(run.name) == run.identity and run.name in tensors]
    return {name: tensors[name].data for name in same}
