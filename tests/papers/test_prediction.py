"""The predictor's time beside that of the experts (corm/tab04), on a small shape; no times are compared."""

import torch

from tests.notebook_code import functions_of
from toolkit.models.architectures import ModelShape

TINY = ModelShape(2, 64, 96, 2, 100, 2, 32, experts=4, experts_per_token=2)
tab04 = functions_of("corm/tab04")


def test_a_row_for_each_part():
    table = tab04.prediction_times(TINY, tokens=2).set_index("part")
    assert list(table.index) == ["predictor", "experts"]
    gate, expert = 64 * 96 * 2, 3 * 64 * 96 * 2
    assert table["nbytes"].tolist() == [4 * 64 * 2 + 2 * gate, 4 * 64 * 2 + 2 * expert]
    assert (table["seconds_low"] <= table["seconds"]).all()
    assert (table["seconds"] <= table["seconds_high"]).all()


def test_the_parts_compute_what_they_say():
    inputs = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    predictor, experts = (tab04.Part(name, TINY, inputs) for name in ("predictor", "experts"))
    gates = [inputs[0] @ gate.float().T for gate in predictor.used]
    expected = [torch.nn.functional.silu(gate).abs() > tab04.LIMIT for gate in gates]
    for mask, wanted in zip(predictor.token(0), expected, strict=True):
        assert (mask != wanted).float().mean() < 0.05  # rounding, at the limit
    shares = (experts.router.float() @ inputs[0]).topk(2).values.softmax(0)
    total = sum(share * _ffn(rows.float(), inputs[0]) for share, rows in zip(shares, experts.used, strict=True))
    torch.testing.assert_close(experts.token(0)[0], total, rtol=1e-3, atol=1e-3)


def _ffn(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = rows.chunk(3, dim=1)
    return (torch.nn.functional.silu(gate @ x) * (up @ x)) @ down
