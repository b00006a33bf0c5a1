"""A router that prefers experts in memory, and its price (Skliar et al., "Mixture of Cache-Conditional Experts", 2024).

    compared(RoutedModel().text, {name: CachedFirst(slots=4, bonus=bonus) for name, bonus in bonuses.items()})

This is their "cache prior" (arXiv 2412.00099): experts in memory gain a bonus on the router's scores. The expert with
the highest score is always used, and each chosen expert keeps the weight that the router gives it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from toolkit.models.cutting import attached
from toolkit.models.experts import Experts
from toolkit.residency.policies import Lru
from toolkit.sparsity.recording import mixtures
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import Alteration, EvaluationSettings


class CachedChoice:
    """The choice of one layer's experts, token by token, and the `slots` experts that it keeps in memory by LRU.

    `bonus` is a share of the scores' range (highest less lowest), of which the mean over all tokens so far is taken.
    """

    def __init__(self, experts: int, slots: int, per_token: int, bonus: float):
        self.cache, self.per_token, self.bonus = Lru(experts, slots), per_token, bonus
        self.tokens, self.ranges, self.loaded = 0, 0.0, 0

    def choose(self, scores: Float32[np.ndarray, " experts"]) -> Int64[np.ndarray, " k"]:
        """The experts of the next token, the best first; memory holds them afterwards."""
        self.tokens, self.ranges = self.tokens + 1, self.ranges + float(np.ptp(scores))
        raised = scores + self.bonus * self.ranges / self.tokens * self.cache.held
        raised[scores.argmax()] = np.inf
        chosen = np.argsort(-raised, kind="stable")[: self.per_token]
        self.loaded += len(self.cache.step(chosen).loaded)
        return chosen

    @property
    def hits(self) -> float:
        """The share of the chosen experts that memory held."""
        return 1 - self.loaded / (self.tokens * self.per_token)


@dataclass(frozen=True)
class CachedFirst(Alteration):
    """Each mixture chooses by `CachedChoice`. With a bonus of 0 the model's outputs stay as they are.

    The fact `expert_hits` is the share of the chosen experts that memory held, over all layers.
    """

    slots: int
    """Experts that each layer keeps."""
    bonus: float = 0.0
    """The bonus of experts in memory, over the mean range of the scores."""

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Raises `UserError` for a model without experts, or fewer slots than a token uses experts."""
        found, facts = mixtures(loaded(settings.model)[0]), {"expert_hits": float("nan")}
        choices = [CachedChoice(each.count, self.slots, each.per_token, self.bonus) for each in found]
        for each in found:
            each.gate  # noqa: B018 - it is found by running the mixture, so before the mixture's choice changes

        def reroute(
            experts: Experts, choice: CachedChoice, _: nn.Module, args: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            scores = experts.scores(args[0])
            ids = torch.from_numpy(np.stack([choice.choose(token) for token in scores.cpu().numpy()])).to(scores.device)
            return args[0], ids, experts.weigh(scores, ids).to(args[2].dtype)

        pairs = zip(found, choices, strict=True)
        with attached(e.routed.register_forward_pre_hook(partial(reroute, e, choice)) for e, choice in pairs):
            yield facts
        facts["expert_hits"] = float(np.mean([choice.hits for choice in choices]))
