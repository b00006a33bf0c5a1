"""A router that prefers experts in memory: one token by hand, and a model that stays as it was without a bonus."""

import numpy as np
import torch

from tests.models.test_experts import FAMILIES
from tests.models.test_models import small
from toolkit.models.plain import plain
from toolkit.papers.corm import cached_first
from toolkit.papers.corm.cached_first import CachedChoice, CachedFirst
from toolkit.studies.quality import EvaluationSettings


def test_a_choice_by_hand():
    """The range is 4. Expert 3 is in memory: with half a range it passes expert 1, but not the best one, expert 0."""
    scores = np.array([4.0, 2.5, 0.0, 1.0], dtype=np.float32)
    for bonus, expected in {0.0: [0, 1], 0.25: [0, 1], 0.5: [0, 3], 2.0: [0, 3]}.items():
        choice = CachedChoice(experts=4, slots=2, per_token=2, bonus=bonus)
        choice.cache.step(np.array([2, 3]))
        assert choice.choose(scores).tolist() == expected, bonus
        assert choice.hits == (0.5 if 3 in expected else 0)


def test_without_a_bonus_a_model_stays_as_it_is(monkeypatch):
    model = plain(small("Mixtral", **FAMILIES["Mixtral"][0]).eval().requires_grad_(False))
    monkeypatch.setattr(cached_first, "loaded", lambda name: (model, None, ""))
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(ids).logits
        found = {}
        for bonus in (0.0, 10.0):
            with CachedFirst(slots=4, bonus=bonus).change(EvaluationSettings("toy")) as facts:
                found[bonus] = model(ids).logits, facts
        again = model(ids).logits
    torch.testing.assert_close(found[0.0][0], expected)
    assert not torch.allclose(found[10.0][0], expected)
    assert found[10.0][1]["expert_hits"] > found[0.0][1]["expert_hits"]
    torch.testing.assert_close(again, expected)
