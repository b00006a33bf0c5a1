"""Mixtures whose experts come from disk when a token needs them (CORM: coarse-to-fine-grained offloading, section 4).

    with OffloadedModel.open(folder, dram_bytes=800_000_000) as model:
        tokens = model.generate(**model.tokenizer("Few experts", return_tensors="pt"), max_new_tokens=20)

`toolkit.storage.experts` writes the folder. Experts are read whole: at CORM's 45 % of active neurons that is the
quicker way from a disk (notebook corm/fig09). Their neurons are gathered in the cost model and in replays only.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from toolkit.models import decoder_blocks
from toolkit.models.blocks import replace_module
from toolkit.models.experts import Experts, block_experts, mixtures_by_layer
from toolkit.offload.expert_ffn import ExpertFFN, Router, products
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.offload.strategy import OnDemand, Opening
from toolkit.residency.policies import Lru
from toolkit.residency.two_level import TwoLevel
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.buffers import buffer_bytes as whole_pages
from toolkit.storage.experts import LAYOUT, check_fits, op_name
from toolkit.storage.gguf_store import GgufStore
from toolkit.storage.readers import open_reader


class ByExpert(OnDemand):
    """The mixture of each decoder block reads experts when a token needs them; see `Strategy`. It computes on the CPU.

    The model's own modules route. They stay in memory with attention, embeddings, norms, shared experts and the head.
    As many experts of each layer as the budget allows stay there, too.

    Raises `UserError` for options that experts do not have, or a budget that does not hold the experts of one token;
    the message says how much that is.
    """

    def __init__(self, opening: Opening):
        store, options = opening.store, opening.options
        of_file = isinstance(store, GgufStore)
        fits = partial(store.check_fits, variant=LAYOUT) if of_file else partial(check_fits, store)
        super().__init__(opening, "experts", fits, predictors=opening.demand.predictors)
        outline = mixtures_by_layer(self.model)
        self._slot_bytes = max(run.nbytes for layer in outline for run in store.layer(layer, LAYOUT).ops.values())
        layers = [store.layer(layer, LAYOUT) for layer in outline]
        self._scratch_bytes = max(op.scratch_bytes for it in layers for op in it.ops.values()) if of_file else 0
        self._slots = self._take_slots(outline)
        self._reader = opening.stack.enter_context(open_reader(options.reader, store, LAYOUT))
        self.mode = self._reader.mode

    def take_over(self) -> None:
        """Replace the routed experts, and the decoder's linears."""
        arena = aligned_buffer(sum(self._slots.values()) * self._slot_bytes).reshape(-1, self._slot_bytes)
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8)
        for layer, count in self._slots.items():
            mine, arena = arena[:count], arena[count:]
            ours = self._replaced(layer, mine, scratch)
            if self.ffns and self._opening.demand.look_ahead:
                self.ffns[-1].precede(ours)
            self.ffns.append(ours)
        super().take_over()

    def _replaced(self, layer: int, arena: np.ndarray, scratch: torch.Tensor) -> ExpertFFN:
        """Put our module in the place of a layer's routed experts; only their biases stay."""
        opening, demand, block = self._opening, self._opening.demand, decoder_blocks(self.model)[layer]
        experts, stored = block_experts(block, layer), opening.store.layer(layer, LAYOUT).ops
        assert experts is not None  # layers with slots have experts
        chosen = demand.residency
        policy = Lru if chosen is None else lambda units, rows: chosen(layer, units, rows)
        runs = [stored[op_name(expert)] for expert in range(experts.count)]
        cache = TwoLevel(experts.count, experts.neurons, len(arena), policy)
        slots = ExpertSlots(cache, runs, arena, self._reader, opening.recorder, layer)
        each = products(experts, slots, scratch)
        ours = ExpertFFN(layer, slots, each, opening.recorder, bool(demand.window), demand.exact)
        replace_module(block, experts.routed, ours)
        routing = replace(experts, routed=ours)
        ours.router = Router(routing) if demand.routing is None else demand.routing(layer, routing)
        return ours

    def _take_slots(self, outline: Mapping[int, Experts]) -> dict[int, int]:
        """Take all memory from the budget; return how many experts of each layer it holds.

        All layers get the same number; the first layers get one more each until none is left.
        """
        opening, budget, slot_bytes = self._opening, self._opening.budgets["dram"], self._slot_bytes
        slots = {layer: experts.per_token for layer, experts in outline.items()}
        least = sum(slots.values())
        rest = opening.rest_bytes + self._scratch_bytes
        budget.check(rest=rest, slots=whole_pages(least * slot_bytes))
        budget.take(rest=rest)
        if opening.demand.window:  # else nothing stays
            whole = int(min(budget.left_bytes, 1 << 62)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            left = whole // slot_bytes - least
            while left > 0 and (growing := [layer for layer, count in slots.items() if count < outline[layer].count]):
                for layer in growing[:left]:
                    slots[layer] += 1
                left -= len(growing[:left])
        budget.take(slots=whole_pages(sum(slots.values()) * slot_bytes))
        return slots
