"""FFNs whose neurons come from disk when a token needs them (LLM in a flash: Alizadeh et al., 2024, section 3).

    with OffloadedModel.open(folder, dram_bytes=150_000_000) as model:
        tokens = model.generate(**model.tokenizer("Only neurons that fire", return_tensors="pt"), max_new_tokens=20)

`toolkit.storage.neuron_packing` writes the folder. On a GPU the most used neurons stay there, and the CPU computes the
others that a token needs (`toolkit.offload.neuron_ffn.SplitFFN`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.cutting import thresholds_of
from toolkit.models.ffn import decoder_ffns, known_activation, replace_ffn
from toolkit.offload.neuron_ffn import Maths, NeuronFFN, SplitFFN, choose, place
from toolkit.offload.neuron_store import NeuronReads, NeuronStore
from toolkit.offload.placement import Shares
from toolkit.offload.strategy import OnDemand, Opening
from toolkit.predictors import Predictor, load_predictors
from toolkit.predictors.evaluation import check_fits as check_predictors
from toolkit.residency.base import Residency
from toolkit.residency.policies import SlidingWindow
from toolkit.sparsity.statistics import load_usage
from toolkit.storage import bundles
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.buffers import buffer_bytes as whole_pages
from toolkit.storage.direct import BLOCK_BYTES, whole_blocks
from toolkit.storage.neuron_packing import LAYOUT, NEEDS, check_fits, width
from toolkit.storage.readers import open_reader

STAGED = 512  # neurons that one read brings at most; their buffer is shared by all layers
GAP_BYTES = 8192  # between neurons that are read over, since a request more would take longer
DEPTH = 128  # reads under way at once: short ones need many (section 2.2)
PREDICTORS, USAGE = "predictors.safetensors", "usage.safetensors"  # beside the configuration


class ByNeuron(OnDemand):
    """The FFN of each decoder block reads neurons when a token needs them; see `Strategy`.

    Attention, embeddings, norms, the head and the predictors stay in memory, and so do the neurons of each FFN that the
    last tokens used. With a GPU, attention, embeddings, norms and the head stay in its memory. Its budget's rest holds
    the most used neurons, the `hot` ones of each layer. `predictors` has one entry per layer.

    Raises `UserError` for options that neurons do not have, predictors or usage of other layers or that are damaged, an
    activation that has no kernel, a budget below what one token needs, or a GPU's below the rest of the model; the
    message says how much that is.
    """

    def __init__(self, opening: Opening):
        store, options, demand = opening.store, opening.options, opening.demand
        refused = {"exact": None if demand.exact else False, "reader": options.reader if options.direct else None}
        super().__init__(opening, "neurons", partial(check_fits, store), gpu=True, **refused)
        self.by_token = not options.on_gpu
        self._modules, limits = decoder_ffns(self.model), thresholds_of(self.model)
        self._maths = [
            Maths(known_activation(ffn), ffn.gate is not None, 0.0 if limits is None else float(limits[layer]))
            for layer, ffn in enumerate(self._modules)
        ]
        self._width, self._dtype = width(self._modules[0]), store.index.ops[0].dtype
        self._row_bytes = self._width * self._dtype.itemsize
        most = min(STAGED, max(ffn.neurons for ffn in self._modules))
        layers = [store.layer(number, LAYOUT) for number in range(len(self._modules))]  # some are wider
        self._buffer_bytes = max(bundles.buffer_bytes(layer, most, GAP_BYTES) for layer in layers)
        self.hot = self._choose_hot()
        self.predictors = self._load_predictors()
        check_predictors(self.model, self.predictors)
        self._shares = self._share()
        self._files = opening.stack.enter_context(open_reader(options.reader, store, LAYOUT, depth=DEPTH))
        self.mode = self._files.mode

    def take_over(self) -> None:
        """Replace the FFNs, and the decoder's other linears."""
        for number, (block, held) in enumerate(zip(decoder_blocks(self.model), self._stores(), strict=True)):
            self.ffns.append(self._ffn(number, held))
            replace_ffn(block, self._modules[number], self.ffns[-1])
        super().take_over()

    @property
    def learns(self) -> bool:
        """Whether a predictor has a state, which tokens change."""
        return any(predictor is not None and predictor.stateful for predictor in self.predictors)

    def settle(self, tokens: int) -> None:
        """At the next pass, drop the neurons that none of the first `tokens` of the last pass needed."""
        for ffn in self.ffns:
            ffn.keep(tokens)

    def _load_predictors(self) -> list[Predictor | None]:
        opening = self._opening
        if opening.demand.predictors is not None:
            return list(opening.demand.predictors)
        if not (file := opening.store.model_folder / PREDICTORS).exists():
            return [None] * len(self._modules)
        self._check(file.stat().st_size, [True] * len(self._modules))  # before they take that much
        return load_predictors(file, str(opening.store.model.get("name")))

    def _choose_hot(self) -> list[Bool[np.ndarray, " neurons"]]:
        """The neurons that stay on the GPU; takes their memory from its budget. None without a GPU."""
        opening, budget = self._opening, self._opening.budgets["device"]
        neurons, usage = [ffn.neurons for ffn in self._modules], opening.demand.usage
        if not opening.options.on_gpu:
            return [np.zeros(count, dtype=bool) for count in neurons]
        budget.take(rest=opening.rest_bytes)
        store = opening.store
        if usage is None and not (file := store.model_folder / USAGE).exists():
            raise UserError(f"{store.folder}: does not say which neurons are used most: pack it again, or give usage=")
        usage = load_usage(file, str(store.model.get("name"))) if usage is None else usage
        left_bytes = int(min(budget.left_bytes, self._row_bytes * sum(neurons)))
        hot = choose(usage, neurons, left_bytes, self._row_bytes)
        budget.take(neurons=self._row_bytes * sum(int(mask.sum()) for mask in hot))
        return hot

    @property
    def _cold(self) -> list[int]:
        """How many neurons of each layer are not on a GPU, 1 at least."""
        return [max(1, int(np.count_nonzero(~mask))) for mask in self.hot]

    @property
    def _passing(self) -> int:
        """Neurons that layers without rows of their own share."""
        return min(STAGED, max(self._cold))

    @property
    def _edges_bytes(self) -> int:
        return BLOCK_BYTES * (len(self._modules) + 1)  # each layer's rows start on a block

    def _fixed(self, predictors_bytes: int) -> dict[str, int]:
        """The DRAM for all but neurons."""
        rest = 0 if self._opening.options.on_gpu else self._opening.rest_bytes
        return {"rest": rest, "predictors": predictors_bytes, "buffer": whole_pages(self._buffer_bytes)}

    def _needs(self, predicted: Sequence[bool]) -> list[int]:
        """Neurons of each layer for a token: one where a predictor decides and nobody has counted, all without one."""
        counted = self._opening.store.model.get(NEEDS) or [1] * len(predicted)
        parts = zip(counted, self._cold, predicted, strict=True)
        return [min(need, number) if foretold else number for need, number, foretold in parts]

    def _check(self, predictors_bytes: int, predicted: Sequence[bool]) -> None:
        """Raise `BudgetError` unless the DRAM suffices for what one token needs."""
        keeps = self._opening.demand.window > 0
        least = Shares.least(self._needs(predicted), self._cold, self._passing) if keeps else 1
        neurons = whole_pages(self._row_bytes * least + self._edges_bytes)
        self._opening.budgets["dram"].check(**self._fixed(predictors_bytes), neurons=neurons)

    def _share(self) -> Shares:
        """Take DRAM for all but hot neurons, and share what is left for the others."""
        opening, budget, row_bytes = self._opening, self._opening.budgets["dram"], self._row_bytes
        edges_bytes = self._edges_bytes
        predictors_bytes = sum(predictor.nbytes for predictor in self.predictors if predictor)
        predicted, cold = [each is not None for each in self.predictors], self._cold
        self._check(predictors_bytes, predicted)
        budget.take(**self._fixed(predictors_bytes))
        left_bytes = min(budget.left_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, row_bytes * sum(cold) + edges_bytes)
        rows = int((left_bytes - edges_bytes) // row_bytes)
        if opening.demand.window > 0:
            shares = Shares.of(rows, self._needs(predicted), cold, self._passing)
        else:
            shares = Shares.keeping_nothing(rows, cold)
        budget.take(neurons=whole_pages(row_bytes * (sum(shares.rows) + shares.passing) + edges_bytes))
        return shares

    def _stores(self) -> Iterator[NeuronStore]:
        """The neurons of each layer that are in memory. Layers without rows of their own share some."""
        opening, shares = self._opening, self._shares
        *matrices, passing = self._matrices([*shares.rows, shares.passing])
        buffer = aligned_buffer(self._buffer_bytes)
        for number, (ffn, rows, matrix) in enumerate(zip(self._modules, shares.rows, matrices, strict=True)):
            if not rows:  # emptied before each use
                kept: Residency = SlidingWindow(ffn.neurons, 1, min(shares.passing, ffn.neurons))
            elif opening.demand.residency:
                kept = opening.demand.residency(number, ffn.neurons, rows)
            else:
                kept = SlidingWindow(ffn.neurons, opening.demand.window, rows)
            stored = opening.store.layer(number, LAYOUT)
            reads = NeuronReads(stored, number, self._files, buffer, opening.recorder, STAGED, GAP_BYTES)
            biases = None if ffn.gate else _on_cpu(ffn.up.bias)
            yield NeuronStore(kept, self._width, self._dtype, reads, biases, matrix if rows else passing)

    def _matrices(self, rows: Sequence[int]) -> list[Float[Tensor, "rows width"]]:
        """Matrices in one piece of memory, since each piece takes whole huge pages. Each starts on a block."""
        sizes = [whole_blocks(count * self._row_bytes) for count in rows]
        pieces = torch.from_numpy(aligned_buffer(sum(sizes))).split(sizes)
        used = (piece[: count * self._row_bytes] for count, piece in zip(rows, pieces, strict=True))
        return [piece.view(self._dtype).view(-1, self._width) for piece in used]

    def _ffn(self, number: int, held: NeuronStore) -> NeuronFFN:
        """The module in an FFN's place. With a GPU its hot neurons are copied there."""
        opening, bias = self._opening, self._modules[number].down.bias
        settings = (number, held, self.predictors[number], self._maths[number])
        passes, computes_held = not self._shares.rows[number], opening.demand.neurons == "held"
        if not opening.options.on_gpu:
            return NeuronFFN(*settings, bias, passes, opening.recorder, computes_held)
        hot = place(np.flatnonzero(self.hot[number]), held, opening.device, opening.recorder, number)
        return SplitFFN(hot, *settings, _on_cpu(bias), passes, opening.recorder, computes_held)


def _on_cpu(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().cpu()
