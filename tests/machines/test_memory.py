from types import SimpleNamespace

import pytest
import torch

from toolkit.machines import memory


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.advance(seconds)` moves."""
    fake = SimpleNamespace(now=0.0)
    fake.advance = lambda seconds: setattr(fake, "now", fake.now + seconds)
    monkeypatch.setattr(memory.time, "perf_counter", lambda: fake.now)
    return fake


def test_read_bandwidth_is_bytes_over_time(clock, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sum", lambda tensor: clock.advance(0.5))
    assert memory.read_gb_s(1_000_000, 3) == pytest.approx([0.002] * 3)


def test_copy_counts_each_byte_once(clock, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: clock.advance(0.25))
    assert memory.transfer_gb_s(1_000_000, 2, "cpu", "cpu") == pytest.approx([0.004] * 2)


def test_a_product_counts_two_operations_a_term_and_grows_until_it_is_long(clock, monkeypatch):
    sides = []

    def matmul(left, right, out):
        sides.append(len(left))
        clock.advance(0.02 if len(left) < 1024 else 0.1)

    monkeypatch.setattr(torch, "matmul", matmul)
    assert memory.gemm_tflop_s("fp32", 2) == pytest.approx([2 * 1024**3 / 0.1 / 1e12] * 2)
    assert sides == [256] * 2 + [512] * 2 + [1024] * 4
