"""A model whose FFN neurons come from disk when a token needs them (LLM in a flash: Alizadeh et al., 2024, section 3).

    with NeuronModel.open(folder, predictors, dram_bytes=150_000_000) as model:
        tokens = model.generate(**model.tokenizer("Only neurons that fire", return_tensors="pt"), max_new_tokens=20)
        model.timeline.stages()

Attention, embeddings, norms, the head and the predictors stay in memory, and of each FFN the neurons that the last
tokens used. `toolkit.storage.neuron_packing` writes the folder.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats.dense import Dense
from toolkit.interchange.reading import load_tokenizer
from toolkit.kernels.neurons import ACTIVATIONS
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.activation import activation_name
from toolkit.models.cutting import thresholds_of
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.skeleton import empty_model, read_config, read_generation_config
from toolkit.offload.budget import Budget, check_bytes
from toolkit.offload.device import Cpu
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.neuron_ffn import Maths, NeuronFFN
from toolkit.offload.neuron_store import NeuronStore
from toolkit.offload.plan import OF_FREE
from toolkit.offload.single_token import SingleToken
from toolkit.offload.turn import Turn
from toolkit.policies.neuron_memory import Shares
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.predictors import Predictor, Predictors
from toolkit.predictors.evaluation import check_fits as check_predictors
from toolkit.storage import bundles
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.buffers import buffer_bytes as whole_pages
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.neuron_packing import LAYOUT, NEEDS, check_fits, width
from toolkit.storage.readers import Reader, open_reader, open_scattered
from toolkit.storage.readers.base import HostReader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder, Timeline

STAGED = 512  # neurons that one read brings at most; their buffer is shared by all layers
GAP_BYTES = 8192  # between neurons that are read over, since a request more would take longer
DEPTH = 128  # reads under way at once: short ones need many (section 2.2)
PREDICTORS = "predictors.safetensors"  # beside the configuration
WINDOW = 5  # tokens (section 3.1)

ForLayers = Sequence[Predictor | None]


@dataclass(eq=False, repr=False)
class NeuronModel:
    """A decoder-only Hugging Face model whose FFNs lie in bundles on disk. It computes on the CPU.

    `model` is the model itself: everything that runs it (`generate`, `toolkit.evaluation`) reads neurons as it needs
    them. One thread runs it at a time, since layers share buffers; a second one gets a `UserError`.
    """

    store: Store
    model: nn.Module
    ffns: Sequence[NeuronFFN]
    budget: Budget
    recorder: Recorder
    mode: str  # how the disk is really read, as `Reader.mode`
    _stack: ExitStack = field(default_factory=ExitStack)
    _turn: Turn = field(default_factory=Turn)
    _step: SingleToken | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        predictors: ForLayers | None = None,
        dram_bytes: int | None = None,
        window: int = WINDOW,
        reader: str | None = None,
        verify: bool = True,
    ) -> Self:
        """Open a model that `pack_neurons` wrote.

        Args:
            folder: what it wrote.
            predictors: one for each layer; None takes those that were packed with the model, if any. A layer without
                one needs all its neurons for each token: it stays in memory whole, or is read whole each time.
            dram_bytes: hard budget for all weights and buffers, but not for activations and the key-value cache. None
                takes nine tenths of what is free.
            window: how many tokens a neuron stays after its last use, if memory allows. 0 keeps nothing.
            reader: a key of `toolkit.storage.readers.READERS` that reads into DRAM; None takes what is best for many
                short reads, `open_scattered`.
            verify: read the whole folder first and compare checksums; as for `toolkit.offload.options.Options`.

        Raises `FormatError` for a damaged folder, and `UserError` for a folder of another model, predictors of another
        number of layers, or a budget below what one token needs; the message says how much that is.
        """
        check_bytes(dram_bytes=dram_bytes)
        if window < 0:
            raise UserError(f"window of {window} tokens: expected 0 or more")
        with ExitStack() as stack:
            store, recorder = Store.open(folder), Recorder()
            if store.variants != (LAYOUT,):
                raise UserError(f"{folder}: holds no neurons: name a folder that `pack --method neurons` wrote")
            if verify:
                store.verify()
            model = _model(store)
            ffns = decoder_ffns(model)
            maths = _maths(model, ffns)
            found = _packed_predictors(store, len(ffns)) if predictors is None else list(predictors)
            check_predictors(model, found)
            budget = Budget("DRAM", int(OF_FREE * Cpu().free_bytes) if dram_bytes is None else dram_bytes)
            shares = _shares(store, ffns, found, budget, window)
            files = stack.enter_context(_reader(store, reader))
            stores = _stores(store, ffns, shares, window, files, recorder)
            ours = [
                NeuronFFN(
                    layer, held, found[layer], maths[layer], ffns[layer].down.bias, not shares.rows[layer], recorder
                )
                for layer, held in enumerate(stores)
            ]
            opened = cls(store, model, ours, budget, recorder, files.mode)
            opened._take_over()
            opened._stack = stack.pop_all()
        return opened

    @property
    def tokenizer(self):
        """The tokenizer that was packed with the model. Raises `UserError` if there is none."""
        return load_tokenizer(self.store.model_folder)

    @property
    def timeline(self) -> Timeline:
        """All reads, bookkeeping, predictions and products since the model was opened.

        Memory management is the time of the spans of stage "other" that no read covers.
        """
        return self.recorder.timeline()

    def generate(self, *arguments: Tensor, **named: object) -> Tensor:
        """Hugging Face's `generate`, without gradients.

        Raises `UserError` if another thread runs or closes this model.
        """
        with self._turn.taken(), torch.no_grad():
            return self.model.generate(*arguments, **named)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Inside the block nothing is read: FFNs compute with the neurons that memory holds."""
        for ffn in self.ffns:
            ffn.reads = False
        try:
            yield
        finally:
            for ffn in self.ffns:
                ffn.reads = True

    def keep(self, tokens: int) -> None:
        """Let go, at the next pass, of neurons that none of the first `tokens` of the last pass needed."""
        for ffn in self.ffns:
            ffn.keep(tokens)

    def close(self) -> None:
        """Wait for the pass under way, close the files and release the memory. The model cannot run again."""
        self._turn.end()
        self._stack.close()
        for part in (*self.ffns, *([self._step] if self._step else [])):
            part.close()

    def __enter__(self) -> Self:
        """The model itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _take_over(self) -> None:
        """Put our modules in the places of the model's FFNs and other linears of its decoder."""
        ffns = zip(decoder_blocks(self.model), decoder_ffns(self.model), self.ffns, strict=True)
        for number, (block, ffn, ours) in enumerate(ffns):
            ours._run = self._turn.guard(ours._run)  # blocks can be called by themselves
            _replace_ffn(block, ffn, ours)
            for name, linear in decoder_linears(block).items():
                block.set_submodule(name, _resident(linear, name, number, self.recorder))
        self._step = SingleToken.of(self.model)
        forward = self._step.guard(self.model.forward) if self._step else self.model.forward
        self.model.forward = self._turn.guard(forward)


def _model(store: Store) -> nn.Module:
    """The model of a folder, with all its tensors but the weights of its FFNs."""
    runs = (*store.index.ops, *store.index.rest)
    config = read_config(store.model_folder, [piece.shape for run in runs for piece in run.pieces.values()])
    model = empty_model(config, lambda outline: check_fits(store, outline))
    if (generation := read_generation_config(store.model_folder)) is not None:
        model.generation_config = generation
    model.load_state_dict(dict(store.rest()), strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _reader(store: Store, name: str | None) -> Reader:
    if name is None:
        return open_scattered(store, LAYOUT, depth=DEPTH)
    return open_reader(name, store, LAYOUT, **({"threads": DEPTH} if name == "threads" else {"depth": DEPTH}))


def _maths(model: nn.Module, ffns: Sequence[FFN]) -> list[Maths]:
    """What each layer computes, as the configuration says. Raises `UserError` for what has no kernel."""
    name = activation_name(model)
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    limits = thresholds_of(model)
    return [
        Maths(name, ffn.gate is not None, 0.0 if limits is None else float(limits[layer]))
        for layer, ffn in enumerate(ffns)
    ]


def _packed_predictors(store: Store, layers: int) -> list[Predictor | None]:
    """Raises `UserError` for a file that is damaged or of another model."""
    file = store.model_folder / PREDICTORS
    return list(Predictors.load(file, str(store.model.get("name")))) if file.exists() else [None] * layers


def _shares(store: Store, ffns: Sequence[FFN], predictors: ForLayers, budget: Budget, window: int) -> Shares:
    """Take all memory from the budget, and share what is left for neurons. Raises `UserError` if it is too small."""
    neurons = [ffn.neurons for ffn in ffns]
    passing = min(STAGED, max(neurons))
    fixed = {
        "rest": store.rest_bytes,
        "predictors": sum(predictor.nbytes for predictor in predictors if predictor),
        "buffer": whole_pages(_buffer_bytes(store, ffns)),
    }
    row_bytes = width(ffns[0]) * store.index.ops[0].dtype.itemsize
    edges_bytes = BLOCK_BYTES * (len(ffns) + 1)  # each layer's rows start on a block
    needs = _needs(store, neurons, predictors)
    least = Shares.least(needs, neurons, passing) if window else 1
    budget.check(**fixed, neurons=whole_pages(row_bytes * least + edges_bytes))
    budget.take(**fixed)
    left_bytes = min(budget.left_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, row_bytes * sum(neurons) + edges_bytes)
    rows = int((left_bytes - edges_bytes) // row_bytes)
    shares = Shares.of(rows, needs, neurons, passing) if window else Shares.keeping_nothing(rows, neurons)
    budget.take(neurons=whole_pages(row_bytes * (sum(shares.rows) + shares.passing) + edges_bytes))
    return shares


def _needs(store: Store, neurons: Sequence[int], predictors: ForLayers) -> list[int]:
    """How many neurons a token needs of each layer. It is 1 where a predictor decides and nobody has counted."""
    told = store.model.get(NEEDS)
    count = isinstance(told, list) and len(told) == len(neurons) and all(isinstance(need, int) for need in told)
    return [
        (told[layer] if count else 1) if predictor else neurons[layer] for layer, predictor in enumerate(predictors)
    ]


def _stores(
    store: Store, ffns: Sequence[FFN], shares: Shares, window: int, reader: HostReader, recorder: Recorder
) -> Iterator[NeuronStore]:
    """The neurons of each layer that are in memory. Layers without rows of their own share some."""
    matrices = _matrices([*shares.rows, shares.passing], width(ffns[0]), store.index.ops[0].dtype)
    buffer = aligned_buffer(_buffer_bytes(store, ffns))
    for number, (ffn, rows, matrix) in enumerate(zip(ffns, shares.rows, matrices, strict=False)):
        kept = SlidingWindow(ffn.neurons, window if rows else 1, rows or min(shares.passing, ffn.neurons))
        fetch = _Fetch(store.layer(number, LAYOUT), number, reader, buffer, recorder)
        biases = None if ffn.gate else ffn.up.bias
        yield NeuronStore(kept, width(ffn), matrix.dtype, fetch, biases, matrix if rows else matrices[-1])


def _matrices(rows: Sequence[int], width: int, dtype: torch.dtype) -> list[Float[Tensor, "rows width"]]:
    """Matrices in one piece of memory, since each piece takes whole huge pages. Each starts on a block."""
    sizes = [_up(count * width * dtype.itemsize) for count in rows]
    arena, ends = torch.from_numpy(aligned_buffer(sum(sizes))), accumulate(sizes)
    pieces = [arena[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    row_bytes = width * dtype.itemsize
    return [
        piece[: count * row_bytes].view(dtype).view(count, width) for count, piece in zip(rows, pieces, strict=True)
    ]


def _buffer_bytes(store: Store, ffns: Sequence[FFN]) -> int:
    most = min(STAGED, max(ffn.neurons for ffn in ffns))
    return bundles.buffer_bytes(store.layer(0, LAYOUT), most, GAP_BYTES)


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, eq=False)
class _Fetch:
    """Reads neurons of one layer into rows of memory, through a buffer that layers share."""

    stored: Layer
    number: int
    reader: HostReader
    buffer: UInt8[np.ndarray, " bytes"]
    recorder: Recorder

    def __call__(self, neurons: Int64[np.ndarray, " new"], rows: Float[Tensor, "new width"]) -> None:
        bundle_bytes = self.stored.nbytes // next(iter(self.stored.ops.values())).shape[0]
        for first in range(0, len(neurons), STAGED):
            part = slice(first, first + STAGED)
            begun_s = self.recorder.now_s()
            bundles.read_neurons(self.reader, self.stored, neurons[part], rows[part], self.buffer, GAP_BYTES)
            self.recorder.record("read", "neurons", "storage", begun_s, len(neurons[part]) * bundle_bytes, self.number)


def _resident(linear: nn.Linear, name: str, layer: int, recorder: Recorder) -> OffloadedLinear:
    """A linear whose weight is dense and stays in memory."""
    weight = Dense(tuple(linear.weight.shape), linear.weight.data)
    return OffloadedLinear(linear, name, layer, lambda: weight, torch.empty(0), True, recorder, Cpu())


def _replace_ffn(block: nn.Module, ffn: FFN, ours: NeuronFFN) -> None:
    """Put ours in the place of a block's FFN. OPT's is no module of its own: its parts lie in the block."""
    names = {module: name for name, module in block.named_modules()}
    if place := names[ffn.down].rpartition(".")[0]:
        block.set_submodule(place, ours)
    else:
        block.set_submodule(names[ffn.up], ours)
        for name in (names[ffn.down], "activation_fn"):
            block.set_submodule(name, nn.Identity())
