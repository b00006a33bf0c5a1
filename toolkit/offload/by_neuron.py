"""FFNs whose neurons come from disk when a token needs them (LLM in a flash: Alizadeh et al., 2024, section 3).

    with OffloadedModel.open(folder, dram_bytes=150_000_000) as model:
        tokens = model.generate(**model.tokenizer("Only neurons that fire", return_tensors="pt"), max_new_tokens=20)

`toolkit.storage.neuron_packing` writes the folder. On a GPU the most used neurons stay there, and the CPU computes the
others that a token needs (`toolkit.offload.neuron_ffn.SplitFFN`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.cutting import thresholds_of
from toolkit.models.ffn import FFN, decoder_ffns, known_activation, replace_ffn
from toolkit.offload.neuron_ffn import Maths, NeuronFFN, SplitFFN, choose, place
from toolkit.offload.neuron_store import NeuronReads, NeuronStore
from toolkit.offload.strategy import OnDemand, Opening
from toolkit.policies.placement import Shares
from toolkit.policies.residencies import SlidingWindow
from toolkit.policies.residency import Residency
from toolkit.predictors import Predictor, load_predictors
from toolkit.predictors.evaluation import check_fits as check_predictors
from toolkit.sparsity.statistics import load_usage
from toolkit.storage import bundles
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.buffers import buffer_bytes as whole_pages
from toolkit.storage.direct import BLOCK_BYTES, whole_blocks
from toolkit.storage.neuron_packing import LAYOUT, NEEDS, check_fits, width
from toolkit.storage.readers import Reader, open_reader, open_scattered
from toolkit.storage.store import Store

STAGED = 512  # neurons that one read brings at most; their buffer is shared by all layers
GAP_BYTES = 8192  # between neurons that are read over, since a request more would take longer
DEPTH = 128  # reads under way at once: short ones need many (section 2.2)
PREDICTORS, USAGE = "predictors.safetensors", "usage.safetensors"  # beside the configuration

ForLayers = Sequence[Predictor | None]
Masks = Sequence[Bool[np.ndarray, " neurons"]]


class ByNeuron(OnDemand):
    """The FFN of each decoder block reads neurons when a token needs them; see `Strategy`.

    Attention, embeddings, norms, the head and the predictors stay in memory, and of each FFN the neurons that the last
    tokens used. With a GPU all these but predictors and neurons stay there, and so do as many of the most used neurons
    as its budget allows, the `hot` ones of each layer. There is one of `predictors` for each layer.

    Raises `UserError` for options that neurons do not have, predictors or usage of other layers, a budget below what
    one token needs, or a GPU's below the rest of the model; the message says how much that is.
    """

    def __init__(self, opening: Opening):
        store, options = opening.store, opening.options
        refused = {
            "exact": None if opening.demand.exact else False,
            "reader": options.reader if options.direct else None,
        }
        super().__init__(opening, "neurons", partial(check_fits, store), gpu=True, **refused)
        self.by_token = not options.on_gpu
        self._modules = decoder_ffns(self.model)
        self._maths = _maths(self.model, self._modules)
        count = len(self._modules)
        given = opening.demand.predictors
        self.predictors = _packed_predictors(store, count) if given is None else list(given)
        check_predictors(self.model, self.predictors)
        self.hot = _hot(opening, self._modules)
        self._shares = _shares(opening, self._modules, self.predictors, self.hot)
        self._files = opening.stack.enter_context(_reader(store, options.reader))
        self.mode = self._files.mode

    def take_over(self) -> None:
        """Replace the FFNs, and the decoder's other linears."""
        stores = _stores(self._opening, self._modules, self._shares, self._files)
        for number, (block, held) in enumerate(zip(decoder_blocks(self.model), stores, strict=True)):
            self.ffns.append(self._ffn(number, held))
            replace_ffn(block, self._modules[number], self.ffns[-1])
        super().take_over()

    def _ffn(self, number: int, held: NeuronStore) -> NeuronFFN:
        """The module in an FFN's place. With a GPU its hot neurons are copied there."""
        options, recorder, bias = self._opening.options, self._opening.recorder, self._modules[number].down.bias
        settings = (number, held, self.predictors[number], self._maths[number])
        passes = not self._shares.rows[number]
        if not options.on_gpu:
            return NeuronFFN(*settings, bias, passes, recorder)
        hot = place(np.flatnonzero(self.hot[number]), held, self._opening.device, recorder, number)
        return SplitFFN(hot, *settings, _on_cpu(bias), passes, recorder)

    @property
    def learns(self) -> bool:
        """Whether a predictor has a state, which tokens change."""
        return any(predictor is not None and predictor.stateful for predictor in self.predictors)

    def settle(self, tokens: int) -> None:
        """Let go, at the next pass, of neurons that none of the first `tokens` of the last pass needed."""
        for ffn in self.ffns:
            ffn.keep(tokens)


def _reader(store: Store, name: str | None) -> Reader:
    if name is None:
        return open_scattered(store, LAYOUT, depth=DEPTH)
    return open_reader(name, store, LAYOUT, **({"threads": DEPTH} if name == "threads" else {"depth": DEPTH}))


def _maths(model: nn.Module, ffns: Sequence[FFN]) -> list[Maths]:
    """Each layer's FFN. Raises `UserError` for an activation that has no kernel."""
    limits = thresholds_of(model)
    return [
        Maths(known_activation(ffn), ffn.gate is not None, 0.0 if limits is None else float(limits[layer]))
        for layer, ffn in enumerate(ffns)
    ]


def _packed_predictors(store: Store, layers: int) -> list[Predictor | None]:
    """Raises `UserError` for a file that is damaged or of another model."""
    file = store.model_folder / PREDICTORS
    return load_predictors(file, str(store.model.get("name"))) if file.exists() else [None] * layers


def _hot(opening: Opening, ffns: Sequence[FFN]) -> Masks:
    """The neurons that stay on the GPU, whose memory is taken; none without one. Raises `UserError` if it is small."""
    store, options, budget = opening.store, opening.options, opening.budgets["device"]
    neurons = [ffn.neurons for ffn in ffns]
    if not options.on_gpu:
        return [np.zeros(count, dtype=bool) for count in neurons]
    budget.take(rest=opening.rest_bytes)
    usage = _packed_usage(store) if opening.demand.usage is None else opening.demand.usage
    left_bytes = int(min(budget.left_bytes, _row_bytes(store, ffns) * sum(neurons)))
    hot = choose(usage, neurons, left_bytes, _row_bytes(store, ffns))
    budget.take(neurons=_row_bytes(store, ffns) * sum(int(mask.sum()) for mask in hot))
    return hot


def _packed_usage(store: Store) -> Sequence[Float[Tensor, " neurons"]]:
    """Raises `UserError` if there is none, and for a file that is damaged or of another model."""
    if not (file := store.model_folder / USAGE).exists():
        raise UserError(f"{store.folder}: does not say which neurons are used most: pack it again, or give usage=")
    return load_usage(file, str(store.model.get("name")))


def _row_bytes(store: Store, ffns: Sequence[FFN]) -> int:
    """Bytes of a neuron in memory."""
    return width(ffns[0]) * store.index.ops[0].dtype.itemsize


def _on_cpu(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().cpu()


def _shares(opening: Opening, ffns: Sequence[FFN], predictors: ForLayers, hot: Masks) -> Shares:
    """Take DRAM for all but hot neurons, and share what is left for the others. Raises `UserError` if it is small."""
    store, options, budget = opening.store, opening.options, opening.budgets["dram"]
    neurons = [max(1, int(np.count_nonzero(~mask))) for mask in hot]
    passing = min(STAGED, max(neurons))
    fixed = {"rest": 0 if options.on_gpu else opening.rest_bytes}
    fixed |= {
        "predictors": sum(predictor.nbytes for predictor in predictors if predictor),
        "buffer": whole_pages(_buffer_bytes(store, ffns)),
    }
    row_bytes = _row_bytes(store, ffns)
    edges_bytes = BLOCK_BYTES * (len(ffns) + 1)  # each layer's rows start on a block
    needs = _needs(store, neurons, predictors)
    keeps = opening.demand.window > 0
    least = Shares.least(needs, neurons, passing) if keeps else 1
    budget.check(**fixed, neurons=whole_pages(row_bytes * least + edges_bytes))
    budget.take(**fixed)
    left_bytes = min(budget.left_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, row_bytes * sum(neurons) + edges_bytes)
    rows = int((left_bytes - edges_bytes) // row_bytes)
    shares = Shares.of(rows, needs, neurons, passing) if keeps else Shares.keeping_nothing(rows, neurons)
    budget.take(neurons=whole_pages(row_bytes * (sum(shares.rows) + shares.passing) + edges_bytes))
    return shares


def _needs(store: Store, neurons: Sequence[int], predictors: ForLayers) -> list[int]:
    """How many of so many neurons a token needs at most. It is 1 where a predictor decides and nobody has counted."""
    pairs = zip(store.model.get(NEEDS) or [1] * len(neurons), neurons, predictors, strict=True)
    return [min(need, number) if predictor else number for need, number, predictor in pairs]


def _stores(opening: Opening, ffns: Sequence[FFN], shares: Shares, reader: Reader) -> Iterator[NeuronStore]:
    """The neurons of each layer that are in memory. Layers without rows of their own share some."""
    store, demand, recorder = opening.store, opening.demand, opening.recorder
    matrices = _matrices([*shares.rows, shares.passing], width(ffns[0]), store.index.ops[0].dtype)
    buffer = aligned_buffer(_buffer_bytes(store, ffns))
    for number, (ffn, rows, matrix) in enumerate(zip(ffns, shares.rows, matrices, strict=False)):
        if not rows:  # emptied before each use
            kept: Residency = SlidingWindow(ffn.neurons, 1, min(shares.passing, ffn.neurons))
        elif demand.residency:
            kept = demand.residency(number, ffn.neurons, rows)
        else:
            kept = SlidingWindow(ffn.neurons, demand.window, rows)
        reads = NeuronReads(store.layer(number, LAYOUT), number, reader, buffer, recorder, STAGED, GAP_BYTES)
        biases = None if ffn.gate else _on_cpu(ffn.up.bias)
        yield NeuronStore(kept, width(ffn), matrix.dtype, reads, biases, matrix if rows else matrices[-1])


def _matrices(rows: Sequence[int], width: int, dtype: torch.dtype) -> list[Float[Tensor, "rows width"]]:
    """Matrices in one piece of memory, since each piece takes whole huge pages. Each starts on a block."""
    sizes = [whole_blocks(count * width * dtype.itemsize) for count in rows]
    arena, ends = torch.from_numpy(aligned_buffer(sum(sizes))), accumulate(sizes)
    pieces = [arena[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    row_bytes = width * dtype.itemsize
    return [
        piece[: count * row_bytes].view(dtype).view(count, width) for count, piece in zip(rows, pieces, strict=True)
    ]


def _buffer_bytes(store: Store, ffns: Sequence[FFN]) -> int:
    most = min(STAGED, max(ffn.neurons for ffn in ffns))
    return bundles.buffer_bytes(store.layer(0, LAYOUT), most, GAP_BYTES)
