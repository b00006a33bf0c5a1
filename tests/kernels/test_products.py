"""The contract of all products: every family, on every backend that this machine can run.

`test_cuda.py` runs this file once more with the CUDA kernels.
"""

import pytest
import torch

from tests.kernels.families import (
    DEVICE,
    FAMILIES,
    ON_GPU,
    SIMULATED,
    at_the_end_of_memory,
    each_with_one,
    on_a_cpu,
    random,
)
from toolkit.errors import UserError
from toolkit.kernels import neurons
from toolkit.kernels.engine import backends

HALVES = (torch.float16, torch.bfloat16)


def pairs():
    """Families of one kind differ in the type of their numbers."""
    kinds = {}
    for family in FAMILIES:
        kinds.setdefault((family.module, family.bits is None), []).append(family)
    for kind in kinds.values():
        yield from ((family, backend) for backend, family in each_with_one(kind[0].available(), kind))


PAIRS = list(pairs())


def dtypes_of(pair):
    """The types that a family decodes to: all on its first backend, and one on each other."""
    family, backend = pair
    return [dtype for name, dtype in each_with_one(family.available(), family.dtypes) if name == backend]


def name_of(pair):
    return f"{pair[0].name}-{pair[1]}"


@pytest.fixture(params=PAIRS, ids=name_of)
def pair(request):
    return request.param


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


def there(family, matrix):
    return family.moved(matrix, lambda tensor: tensor.to(DEVICE))


def multiplied(family, matrix, x, backend, out=None):
    return family.multiply(there(family, matrix), x.to(DEVICE), out, backend).cpu()


def faults(family, backend, shape, batches, seed):
    """The faults of products with batches of several sizes, in words."""
    matrix, x, found = family.make(shape, seed), random(max(batches), shape[1], seed=seed), []
    expected, allowed = family.judge(matrix, x, backend)
    for batch in batches:
        y = multiplied(family, matrix, x[:batch], backend)
        if (y.dtype, y.shape) != (torch.float32, (batch, family.rows(shape))):
            found.append(f"{shape}: {y.dtype} {list(y.shape)}")
        elif ((y - expected[:batch]).abs() > allowed[:batch]).any():
            found.append(f"{shape}, {batch} vectors: off by too much")
    return found


def test_products_are_those_of_double_precision(pair):
    family, backend = pair
    batches, shapes = (1, 3) if SIMULATED else (0, 1, 2, 4, 5, 17), enumerate(family.shapes_here())
    assert not [told for seed, shape in shapes for told in faults(family, backend, shape, batches, seed)]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0].decode], ids=name_of)
def test_decoding_writes_every_number(pair):
    family, backend = pair
    for seed, shape in enumerate(family.shapes_here()):
        matrix = family.make(shape, seed)
        for dtype in [family.dtypes[seed % len(family.dtypes)]] if SIMULATED else dtypes_of(pair):
            out = torch.full(shape, 3, dtype=dtype, device=DEVICE)
            assert family.decode(there(family, matrix), out, backend) is out
            assert torch.equal(out.cpu(), family.dense(matrix, shape, seed).to(dtype)), (shape, dtype)


def test_one_vector_fills_out_and_other_types_of_numbers_are_taken_as_fp32(pair):
    family, backend = pair
    shape = (3, 64) if SIMULATED else (9, 64)
    matrix = family.make(shape, 0)
    for dtype in (torch.float64,) if SIMULATED else (*HALVES, torch.float32, torch.float64):
        x, out = random(64, seed=1).to(dtype), torch.full((family.rows(shape),), 3.0, device=DEVICE)
        assert family.multiply(there(family, matrix), x.to(DEVICE), out, backend) is out
        one = multiplied(family, matrix, x.float(), backend)
        expected, allowed = family.judge(matrix, x[None], backend)
        assert ((out.cpu() - expected[0]).abs() <= 2 * allowed[0]).all()
        assert ON_GPU or torch.equal(out, one)


@pytest.mark.skipif(SIMULATED, reason="kernels get contiguous memory, by code that is the CPU's, too")
def test_x_and_out_may_have_any_strides(pair):
    """Columns of a larger matrix, a transposed one, one vector for all: a state-space model hands out such views."""
    family, backend = pair
    shape = (9, 64)
    matrix = there(family, family.make(shape, 0))
    rows, x = family.rows(shape), random(3, 64, seed=1).to(DEVICE)
    expected = family.multiply(matrix, x, None, backend)
    for given in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :64], torch.stack([x, -x], 2)[..., 0]):
        out = torch.full((rows, 3), 3.0, device=DEVICE).T
        assert family.multiply(matrix, given, out, backend) is out
        assert torch.equal(out, expected)
    one = family.multiply(matrix, x[[0, 0, 0]], None, backend)
    assert torch.equal(family.multiply(matrix, x[:1].expand(3, 64), None, backend), one)
    alone, out = torch.stack([x[0], x[1]], 1)[:, 0], torch.full((rows, 2), 3.0, device=DEVICE)
    family.multiply(matrix, alone, out[:, 1], backend)
    assert torch.equal(out[:, 1], family.multiply(matrix, x[0], None, backend))
    assert (out[:, 0] == 3).all(), "results go where they belong"


@on_a_cpu
def test_neither_threads_nor_batch_change_a_sum(pair):
    family, backend = pair
    matrix, x = family.make((1600, 384), 0), random(7, 384, seed=1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(multiplied(family, matrix, x, backend))
            found.append(torch.cat([multiplied(family, matrix, some, backend) for some in x.split(2)[:3]]))
            if family.alone:
                found.append(torch.stack([multiplied(family, matrix, vector, backend) for vector in x]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][: len(other)], other) for other in found)


@on_a_cpu
def test_nothing_is_touched_beyond_the_end_of_any_tensor(pair):
    """A read too many would end the process."""
    family, backend = pair
    for shape in ((5, 64), (17, 67), (5, 1000)):
        shape = shape[0], -(-shape[1] // family.step) * family.step
        for batch in (1, 4):
            matrix, x = family.make(shape, 0), random(batch, shape[1])
            ends = family.moved(matrix, at_the_end_of_memory)
            out = at_the_end_of_memory(torch.zeros(batch, family.rows(shape)))
            family.multiply(ends, at_the_end_of_memory(x), out, backend)
            assert torch.equal(out.nan_to_num(1.5), multiplied(family, matrix, x, backend).nan_to_num(1.5))
        for dtype in dtypes_of(pair):
            out = at_the_end_of_memory(torch.zeros(shape, dtype=dtype))
            family.decode(ends, out, backend)
            assert torch.equal(out, family.dense(matrix, shape, 0).to(dtype))


def test_contents_of_any_kind_keep_a_product_within_its_tensors(pair):
    """Contents that no writer makes: any numbers come out. The simulator checks every index."""
    family, backend = pair
    if family.harmed is None:
        pytest.skip("all contents are sound")
    generator = torch.Generator().manual_seed(0)
    place = (lambda tensor: tensor.to(DEVICE)) if ON_GPU else at_the_end_of_memory
    rows, widths = (5, (20, 40)) if SIMULATED else (10, (40, 100, 4104, 70_000))
    shapes = [(rows, -(-width // family.step) * family.step) for width in widths]
    sound = [(shape, family.make(shape, 0)) for shape in shapes]
    for case in range(3 if SIMULATED else 40):
        shape, matrix = sound[case % len(sound)]
        harmed = family.moved(family.harmed(matrix, generator), place)
        family.multiply(harmed, place(torch.ones(1 + case // len(sound) % 2, shape[1])), None, backend)
        if family.decode:
            family.decode(harmed, place(torch.ones(shape, dtype=dtypes_of(pair)[0])), backend)


@on_a_cpu
def test_x_may_be_out_and_no_gradient_or_complex_number_is_taken(pair):
    family, backend = pair
    matrix, x = family.make((64, 64), 0), random(64)
    expected = multiplied(family, matrix, x, backend)
    memory = torch.cat([x, torch.zeros(1)])
    if "outliers" not in family.name:  # which are added to what is there
        assert torch.equal(family.multiply(matrix, memory[:64], memory[1:], backend), expected)
    assert torch.equal(family.multiply(matrix, x, x, backend), expected)
    with pytest.raises(ValueError, match=r"x is torch.complex64.*expected real numbers"):
        family.multiply(matrix, torch.ones(64, dtype=torch.complex64), None, backend)
    leaf = torch.ones(64, requires_grad=True)
    with pytest.raises(ValueError, match=r"requires a gradient.*pass x.detach"):
        family.multiply(matrix, leaf, None, backend)
    with torch.no_grad():
        assert torch.equal(family.multiply(matrix, leaf, None, backend), multiplied(family, matrix, leaf, backend))


@on_a_cpu
def test_wrong_arguments_are_refused_before_any_kernel_runs(family, monkeypatch):
    matrix, x, rows = family.make((64, 128), 0), torch.ones(128), family.rows((64, 128))
    for given, out in (
        (x[:64], None),
        (torch.ones(2, 64), None),
        (torch.ones(1, 2, 128), None),
        (torch.ones(128, device="meta"), None),
        (x, torch.empty(rows, dtype=torch.float64)),
        (x, torch.empty(rows + 1)),
        (torch.ones(2, 128), torch.empty(rows)),
    ):
        with pytest.raises((ValueError, UserError), match=r"expected|must be"):
            family.multiply(matrix, given, out, "auto")
    with pytest.raises(UserError, match=r"unknown backend 'lut'; choose from: .*auto.*(portable|table|gguf)"):
        family.multiply(matrix, x, None, "lut")
    for name in family.module.BACKENDS.for_gpus:
        with pytest.raises(UserError, match=r"backend 'cuda\w*' (needs|works)"):
            family.multiply(matrix, x, None, name)
    monkeypatch.setattr(backends, "host_has", lambda feature: feature not in ("fma", "avx512f"))
    needing = next(name for name, backend in family.module.BACKENDS.items() if "fma" in backend.features)
    with pytest.raises(UserError, match=rf"backend '{needing}' needs a CPU with .*fma; this one can run: \w+"):
        family.multiply(matrix, x, None, needing)
    if (family, family.available()[0]) in PAIRS:  # else it would be compiled for this line alone
        assert family.multiply(matrix, x, None, "auto").shape == (rows,), "auto takes what the CPU can run"
    assert neurons.BACKENDS.available()[-1] == "portable"


@pytest.mark.skipif(not ON_GPU or SIMULATED, reason="needs tensors on a GPU")
def test_backends_of_the_cpu_refuse_tensors_on_a_gpu(family):
    if not family.available():
        pytest.skip("has no kernels for a GPU")
    matrix, x = there(family, family.make((64, 128), 0)), torch.ones(128)
    with pytest.raises(ValueError, match=r"backend '.*' works on the CPU; these tensors are on cuda:0"):
        family.multiply(matrix, x.to(DEVICE), None, [*family.module.BACKENDS][-1])
    with pytest.raises(ValueError, match="expected it on cuda:0"):
        family.multiply(matrix, x, None, "auto")
