"""The FFN of bundled and of quantised neurons against torch in double precision, by every backend.

`test_cuda.py` runs this file once more with the CUDA kernels.
"""

import itertools

import numpy as np
import pytest
import torch

from tests.kernels.families import (
    DEVICE,
    ON_GPU,
    ORACLES,
    SIMULATED,
    backends_here,
    bundle,
    each_backend,
    each_with_one,
    ffn,
    ffn_of_records,
    on_a_cpu,
    random,
    records_of,
)
from toolkit.errors import UserError
from toolkit.kernels import neurons
from toolkit.kernels.neurons.records import record_bytes, section_bytes

backend = each_backend(neurons.BACKENDS)
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="of CUDA kernels alone")
KINDS = [(None, name) for name in backends_here(neurons.BACKENDS)]
KINDS += [(bits, name) for name, bits in each_with_one(backends_here(neurons.RECORD_BACKENDS), (4, 2))]


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    """Bits of codes, or None for dense bundles, and a backend for these."""
    return request.param


def made(rows, hidden, bits=None, seed=0):
    return bundle(rows, hidden, 3, seed=seed) if bits is None else records_of(rows, hidden, bits, seed)


def found(backend, bundles, x, activation="silu", bias=None, threshold=0.0, bits=None):
    bias = None if bias is None else bias.to(DEVICE)
    return neurons.ffn(bundles.to(DEVICE), x.to(DEVICE), activation, bias, threshold, backend=backend, bits=bits).cpu()


def check(backend, bundles, x, activation="silu", bias=None, threshold=0.0, bits=None):
    if bits:
        (expected, bound), tolerance = ffn_of_records(bundles, x, bits, threshold), 2e-5
    else:
        (expected, bound), tolerance = ffn(bundles, x, activation, bias, threshold), 1e-5
    sums = found(backend, bundles, x, activation, bias, threshold, bits)
    assert sums.dtype == torch.float32
    assert ((sums - expected).abs() <= tolerance * bound).all()


def test_a_bias_of_each_neuron(backend):
    check(backend, bundle(33, 67, 2), random(3, 67), "relu", random(33, seed=1).half())


@pytest.mark.parametrize("activation", neurons.ACTIVATIONS)
def test_every_activation_in_a_kernel(backend, activation):
    """The dense kernels: others share their walk over the neurons."""
    rows, hidden = (3, 4) if ON_GPU else (33, 67)
    check(backend, bundle(rows, hidden, 2, seed=4), random(1, hidden, seed=4), activation)


@on_a_cpu
@pytest.mark.parametrize("activation", neurons.ACTIVATIONS)
def test_every_activation(activation):
    values = torch.cat([torch.linspace(-30, 30, 301), torch.tensor([-0.0, torch.nan])])
    numbers = torch.tensor([neurons.ACTIVATIONS[activation](value) for value in values.numpy()])
    expected = ORACLES[activation](values.double()).float()
    torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_worked_example(backend):
    """Two neurons, hidden 2. Neuron 0: relu(1·3 + 2·1 − 1) = 4; neuron 1: relu(−1·3) = 0."""
    bundles = torch.tensor([[1.0, 2, 10, 20], [-1, 0, 5, 5]])
    assert found(backend, bundles, torch.tensor([3.0, 1]), "relu", torch.tensor([-1.0, 0])).tolist() == [40, 80]
    gated = torch.tensor([[1.0, 0, 0, 2, 3, 4], [2, 0, 0, 1, 1, 1]])  # silu(100) · 2 = 200; silu(200) · 1 = 200
    x = torch.tensor([100.0, 1])
    assert found(backend, gated, x).tolist() == [800, 1000]
    gated[1, 0] = 1  # silu(100) · 1 = 100
    assert found(backend, gated, x, threshold=100).tolist() == [600, 800]


def test_a_quantised_neuron_by_hand(kind):
    """All scales 1, all zero points 1; gate and up hold the code 2 in weight 0, down code 3 in weight 17: 1 and 2."""
    bits, backend = kind
    if bits is None:
        pytest.skip("of quantised neurons alone")
    record, nbytes = torch.zeros(1, record_bytes(64, bits), dtype=torch.uint8), section_bytes(64, bits)
    codes = nbytes - 8 * bits
    for part, (weight, code) in enumerate([(0, 2), (0, 2), (17, 3)]):
        section = record[0, part * nbytes : (part + 1) * nbytes]
        section[:8] = torch.tensor([0.0, 1, 0, 1], dtype=torch.float16).view(torch.uint8)
        numbers = np.full(16, sum(1 << bits * field for field in range(4)))  # code 1: weight 0
        numbers[weight % 16] += (code - 1) << bits * (weight // 16)
        section[codes:] = torch.from_numpy(numbers.astype("<u2" if bits == 4 else "u1").view(np.uint8))
    x, expected = torch.zeros(64), torch.zeros(64)
    x[0], expected[17] = 100, 20_000  # silu(100) · 100 · 2
    torch.testing.assert_close(found(backend, record, x, bits=bits), expected, rtol=1e-4, atol=0)


def test_neurons_within_the_threshold_count_as_zero_and_their_down_columns_are_not_read(kind):
    bits, backend = kind
    sizes = [(5, 64)] if SIMULATED else [(1, 64), (9, 192), (30, 768), (300, 128)]
    for (rows, hidden), threshold in itertools.product(sizes, (0.02, 0.3, 3.0)):
        bundles, x = made(rows, hidden, bits, rows), random(2 if SIMULATED else 5, hidden)
        check(backend, bundles, x, threshold=threshold, bits=bits)
    if bits is None:
        bundles[:, -hidden:] = torch.nan
    else:
        nbytes = section_bytes(hidden, bits)
        bundles[:, 2 * nbytes : 2 * nbytes + 8] = 0xFF  # NaN
    assert not found(backend, bundles, x, threshold=1e9, bits=bits).any()
    assert found(backend, bundles, x, bits=bits).isnan().all()


def test_rows_that_a_vector_does_not_want_add_nothing_for_it(kind):
    bits, backend = kind
    bundles, x = made(9, 64, bits), random(3, 64, seed=1)
    wanted = torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    given = bundles.to(DEVICE), x.to(DEVICE), "silu"
    sums = neurons.ffn(*given, wanted=wanted.to(DEVICE), backend=backend, bits=bits).cpu()
    alone = [found(backend, bundles[rows].clone(), vector, bits=bits) for rows, vector in zip(wanted, x, strict=True)]
    torch.testing.assert_close(sums, torch.stack(alone), rtol=1e-5, atol=1e-5)


@on_a_cpu
def test_listed_rows_give_the_same_bits_wherever_they_lie_and_in_any_number_of_calls(backend):
    """The list is that of neurons; another order of the rows, chunks and a batch leave each vector's sums alone."""
    bundles, x, chosen = bundle(60, 72, 3), random(5, 72, seed=1), np.arange(0, 60, 2)
    starts, wanted = np.array([0, 7, 7, 21, 30]), np.random.default_rng(0).random((5, 30)) < 0.6
    whole, moved = torch.zeros(4, 5, 72), torch.zeros(4, 5, 72)
    neurons.add_listed(whole, bundles, chosen, starts, x, "silu", wanted=wanted, backend=backend)
    expected = [found(backend, bundles[chosen[mask]], one) for mask, one in zip(wanted, x, strict=True)]
    torch.testing.assert_close(whole.sum(0), torch.stack(expected), rtol=1e-4, atol=1e-4)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    places = order.argsort().numpy()[chosen]
    for first, end in ((0, 5), (5, 26), (26, 30)):
        part = np.clip(starts, first, end) - first
        named = {"wanted": wanted[:, first:end], "backend": backend}
        neurons.add_listed(moved, bundles[order], places[first:end], part, x, "silu", **named)
    assert torch.equal(moved, whole)
    for rows, part, told in (([60], [0, 1], "are listed"), ([1], [0, 2], "parts start"), ([1, 2], [0, 2, 1], "parts")):
        sums = torch.zeros(len(part) - 1, 5, 72)
        with pytest.raises(ValueError, match=told):
            neurons.add_listed(sums, bundles, np.array(rows), np.array(part), x, "silu", backend=backend)


def test_a_weight_that_is_nan_shows(backend):
    bundles = bundle(4, 8, 2, torch.float16)
    bundles[2, 3] = torch.nan
    assert found(backend, bundles, torch.ones(8), "relu", threshold=1e9).isnan().all()


@on_a_cpu
def test_a_vector_that_is_not_finite_shows_and_leaves_the_others_alone(kind):
    bits, backend = kind
    bundles, x = made(9, 128, bits), random(5, 128)
    alone = found(backend, bundles, x, bits=bits)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 77] = value
        sums = found(backend, bundles, x, bits=bits)
        assert not sums[2].isfinite().all()
        assert torch.equal(sums[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


def test_rows_of_a_larger_matrix(backend):
    matrix, x = bundle(20, 70, 2, torch.float16), random(70)
    alone = found(backend, matrix[:5].clone(), x, "relu")
    assert torch.equal(neurons.ffn(matrix.to(DEVICE)[:5], x.to(DEVICE), "relu", backend=backend).cpu(), alone)


@on_a_gpu
@pytest.mark.parametrize("multiprocessors", [0, 10_000])
def test_any_number_of_parts(multiprocessors, monkeypatch):
    monkeypatch.setattr("toolkit.kernels.neurons.cuda.multiprocessors", lambda device: multiprocessors)
    check("cuda", bundle(33, 4, 2), random(1, 4), "relu")


@on_a_gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_more_vectors_than_one_pass_takes_and_one_alone(bits, monkeypatch):
    monkeypatch.setattr(f"toolkit.kernels.neurons.cuda.VECTORS{'_OF_RECORDS' if bits else ''}", 2)
    bundles, x = made(3, 64, bits), random(3, 64)
    check("cuda", bundles, x, bits=bits)
    assert torch.equal(found("cuda", bundles, x[2], bits=bits), found("cuda", bundles, x, bits=bits)[2])


@on_a_gpu
def test_rows_that_begin_at_any_address():
    from toolkit.kernels.neurons.cuda import elements_at_once

    bundles, x = bundle(5, 8, 2, torch.float16), random(8)
    moved = torch.cat([torch.zeros(1, dtype=torch.float16), bundles.flatten()]).to(DEVICE)[1:].view(bundles.shape)
    assert (elements_at_once(moved, 8), elements_at_once(bundles, 8)) == (1, 4)
    check("cuda", moved.cpu(), x, "relu")


@on_a_cpu
def test_wrong_arguments_are_refused():
    dense = {"bundles": torch.ones(4, 16), "x": torch.ones(8), "activation": "relu"}
    records = {"bundles": torch.zeros(4, 192, dtype=torch.uint8), "x": torch.ones(64), "activation": "silu", "bits": 4}
    for sound, name, wrong, told in (
        (dense, "activation", "swish", "unknown activation 'swish'"),
        (dense, "bundles", torch.ones(4, 25), "expected torch.float32"),
        (dense, "bundles", torch.ones(16, 4).T, "must be contiguous"),
        (dense, "bias", torch.ones(3), "bias is"),
        (dense, "threshold", float("nan"), "threshold is nan"),
        (records, "bits", 3, "bits of a neuron's codes 3"),
        (records, "x", torch.ones(96), "hidden is 96"),
        (records, "x", torch.ones(128), r"expected torch.uint8 \[4, 256\]"),
        (records, "bias", torch.zeros(4), "no bias"),
    ):
        with pytest.raises((UserError, ValueError), match=told):
            neurons.ffn(**sound | {name: wrong})
