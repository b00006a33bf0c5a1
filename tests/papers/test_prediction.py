"""The predictor's time beside that of the experts, on a small shape; no times are compared."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.papers.corm import prediction

TINY = ModelShape(2, 64, 96, 2, 100, 2, 32, experts=4, experts_per_token=2)


@pytest.fixture
def shapes(monkeypatch):
    monkeypatch.setattr(prediction, "ARCHITECTURES", {"tiny": TINY, "dense": ModelShape(2, 64, 96, 2, 100, 2, 32)})


def test_a_row_for_each_part(shapes):
    table = prediction.prediction_times.__wrapped__("tiny", repetitions=2, tokens=2).set_index("part")
    assert list(table.index) == ["predictor", "experts"]
    gate, expert = 64 * 96 * 2, 3 * 64 * 96 * 2
    assert table["nbytes"].tolist() == [4 * 64 * 2 + 2 * gate, 4 * 64 * 2 + 2 * expert]
    assert (table["seconds_low"] <= table["seconds"]).all()
    assert (table["seconds"] <= table["seconds_high"]).all()


def test_the_parts_compute_what_they_say():
    inputs = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    predictor, experts = (prediction._Part(name, TINY, inputs) for name in prediction.PARTS)
    gates = [inputs[0] @ gate.float().T for gate in predictor.used]
    expected = [torch.nn.functional.silu(gate).abs() > prediction.LIMIT for gate in gates]
    for mask, wanted in zip(predictor.token(0), expected, strict=True):
        assert (mask != wanted).float().mean() < 0.05  # rounding, at the limit
    shares = (experts.router.float() @ inputs[0]).topk(2).values.softmax(0)
    total = sum(share * _ffn(rows.float(), inputs[0]) for share, rows in zip(shares, experts.used, strict=True))
    torch.testing.assert_close(experts.token(0)[0], total, rtol=1e-3, atol=1e-3)


def _ffn(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = rows.chunk(3, dim=1)
    return (torch.nn.functional.silu(gate @ x) * (up @ x)) @ down


def test_a_model_without_experts_is_refused(shapes):
    with pytest.raises(UserError, match="no experts"):
        prediction.prediction_times.__wrapped__("dense")
