"""A pruning method that only a test knows: it is registered, and everything that takes a method's name takes it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from toolkit.pruning import METHODS, Calibration, changed, load_pruned, prune
from toolkit.pruning.patterns import lowest, lowest_in_groups

LENGTH = 16


@dataclass(frozen=True)
class RelativeImportance:
    """|W_ij| over the sum of its column."""

    statistic: ClassVar[str | None] = None

    def __call__(self, weight, gram, sparsity, pattern):
        scores = weight.abs() / weight.abs().sum(dim=0).clamp(min=1e-30)
        mask = lowest_in_groups(scores, pattern) if pattern else lowest(scores, int(scores.shape[1] * sparsity))
        return weight.masked_fill(mask, 0)


@dataclass(frozen=True)
class Calibrated(RelativeImportance):
    """The same, with the norm of the inputs."""

    statistic: ClassVar[str | None] = "gram"

    def __call__(self, weight, gram, sparsity, pattern):
        kept = super().__call__(weight * gram.diagonal().sqrt(), None, sparsity, pattern) != 0
        return weight.where(kept, 0)


@pytest.fixture(params=[RelativeImportance, Calibrated])
def method(request, monkeypatch):
    monkeypatch.setitem(METHODS, "toy", request.param())
    return METHODS["toy"]


@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_a_new_method_prunes_by_name(method, tiny, tokens, pattern):
    model = tiny("llama")
    records = prune(model, "toy", pattern=pattern, calibration=tokens.view(-1, LENGTH))
    assert {record.sparsity for record in records} == {0.5}
    same = tiny("llama")
    prune(same, method, pattern=pattern, calibration=tokens.view(-1, LENGTH))
    assert all(map(torch.equal, model.parameters(), same.parameters()))


def test_a_new_method_is_kept(method, tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(changed, "load_model", lambda name, dtype: (tiny(name).to(dtype), "tokenizer"))
    monkeypatch.setattr(changed, "load_tokens", lambda *_: tokens)
    settings = {"calibration": Calibration(windows=3, sequence_length=LENGTH), "dtype": torch.float32}
    (first, _, made), (second, _, read) = (load_pruned("llama", "toy", **settings) for _ in range(2))
    assert made == read
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert len(list((tmp_path / "changed").rglob("*.safetensors"))) == 3
