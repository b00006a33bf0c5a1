"""Rows are shared out among torch's threads, each exactly once, by themselves or in stages, whatever happens."""

import itertools
import os
import signal
import threading

import numba
import numpy as np
import pytest
import torch

from tests.kernels.families import random
from toolkit.formats import FORMATS, QUANTISED, READABLE, encode
from toolkit.formats.scaled import Scaled
from toolkit.kernels.engine import parallel
from toolkit.kernels.engine.compiled import COMPILE
from toolkit.kernels.engine.parallel import Product, Program, Task, over_rows, stages

MUCH = 1 << 30  # bytes of work: as many threads as there are
PATIENCE_S = 60
SHAPES = [(1, 1), (5, 3), (16, 16), (17, 40), (70, 130)]


@numba.njit(**COMPILE)
def count(visits, more, first, last):
    for row in range(first, last):
        visits[row] += more


@numba.njit(**COMPILE)
def fail_at(visits, place, first, last):
    for row in range(first, last):
        visits[row] += 1
        if row == place:
            raise ValueError("row of no use")


@numba.njit(**COMPILE)
def mirror(source, target, first, last):
    for row in range(first, last):
        target[row] = source[source.size - 1 - row] + 1


@numba.njit(**COMPILE)
def multiply(values, factor):
    for row in range(values.size):
        values[row] *= factor


@pytest.fixture(params=["team", "alone"])
def team(request, monkeypatch):
    """More threads than cores, or one where torch has no team."""
    if request.param == "alone":
        monkeypatch.setattr(parallel, "fork", lambda: None)
    elif parallel.fork() is None:
        pytest.skip("this torch has no OpenMP threads that C can call")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_types_and_layouts_of_arguments_are_told_apart(team):
    for visits in (np.zeros(9, np.int64), np.zeros(9, np.float32), np.zeros((9, 2), np.int64)[:, 0]):
        for more in (1, np.int32(2), np.float64(3)):
            over_rows(count, 9, MUCH, visits, more)
        assert visits.tolist() == [6] * 9


def test_several_threads_call_at_once(team):
    def work(visits):
        for _ in range(200):
            over_rows(count, len(visits), MUCH, visits, 1)

    found = [np.zeros(50 + number, np.int64) for number in range(4)]
    callers = [threading.Thread(target=work, args=(visits,)) for visits in found]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert all((visits == 200).all() for visits in found)


def test_a_forked_child_has_threads_of_its_own(team):
    visits = np.zeros(64, np.int64)
    over_rows(count, 64, MUCH, visits, 1)
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)  # a child that waits for its parent's threads is ended
        over_rows(count, 64, MUCH, visits, 1)
        os._exit(int(not (visits == 2).all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    over_rows(count, 64, MUCH, visits, 1)
    assert (visits == 2).all()


def test_stages_follow_each_other_and_rows_are_shared_by_hand(team):
    """(1 + 1) · 3 and (0 + 0.5) · 3, then once more from there."""
    first, second = np.ones(100, np.int64), np.zeros(7, np.float32)
    adding = [Task(count, (first, 1), 100, MUCH), Task(count, (second, np.float32(0.5)), 7, MUCH // 50)]
    program = Program([adding, [Task(multiply, (first, 3))], [Task(multiply, (second, np.float32(3)))]])
    for expected in ((6, 1.5), (21, 6)):
        program.run()
        assert (first == expected[0]).all()
        assert (second == expected[1]).all()


@pytest.mark.parametrize("rows", [1, 5, 100_000])
def test_a_stage_sees_all_of_the_stage_before(team, rows):
    """Each row takes what the opposite row has: a part that began too early would miss an addition."""
    even, odd = np.arange(rows), np.zeros(rows, np.int64)
    pairs = ((even, odd), (odd, even)) * 10
    program = Program([[Task(mirror, pair, rows, MUCH)] for pair in pairs])
    for run in range(1, 51):
        program.run()
        assert np.array_equal(even, np.arange(rows) + 20 * run)


def test_an_error_is_raised_and_nothing_runs_after_it(team):
    visits, others, later = np.zeros(100, np.int64), np.zeros(100, np.int64), np.ones(3, np.int64)
    with pytest.raises(ValueError, match="row of no use"):
        over_rows(fail_at, 100, MUCH, visits, 70)
    failing, adding = Task(fail_at, (visits, 3), 100, MUCH), Task(count, (others, 1), 100, MUCH)
    for failing_stages in ([[adding], [failing], *[[adding]] * 30], [[failing], [Task(multiply, (later, 0))], []]):
        with pytest.raises(ValueError, match="row of no use"):
            Program(failing_stages).run()
    assert (others <= 2).all()  # once in the team, once more where the failure is raised
    assert (later == 1).all()


def test_each_row_is_visited_once(team):
    for rows, nbytes in itertools.product((0, 1, 2, 3, 7, 64, 1001), (0, 1, MUCH)):
        visits, others = np.zeros(rows, np.int64), np.zeros(5, np.int64)
        Program([[Task(count, (visits, 2), rows, nbytes), Task(count, (others, 1), 5, MUCH)], []]).run()
        over_rows(count, rows, nbytes, visits, 2)
        assert (visits == 4).all()
        assert (others == 1).all()


def test_functions_that_are_not_compiled_take_part():
    visits, seen = np.zeros(3, np.int64), []
    Program([[Task(seen.append, (1,))], [Task(count, (visits, 2), 3, MUCH)]]).run()
    assert seen == [1]
    assert (visits == 2).all()


def test_a_program_outlives_the_names_of_its_arrays():
    def made():
        x = np.arange(1000, dtype=np.float32)
        return Program([[Task(multiply, (x, np.float32(2)))]]), x.ctypes.data, x.size

    program, place, size = made()
    rubbish = [np.full(1000, 7, np.float32) for _ in range(50)]
    program.run()
    found = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * size).from_address(place))
    assert np.array_equal(found, 2 * np.arange(1000))
    assert all((each == 7).all() for each in rubbish)


@pytest.mark.parametrize("form", [name for name, form in READABLE.items() if form.has_matvec])
def test_products_of_formats_are_those_of_matvec(form, team):
    dtypes = [torch.float32, torch.bfloat16, *[torch.int8] * (form not in QUANTISED)]
    for shape, dtype in itertools.product(SHAPES, dtypes):
        weight = (20 * random(*shape)).to(dtype).masked_fill(random(*shape, seed=1) < 0, 0)
        check(encode(form, weight), (weight if form in FORMATS else encode(form, weight).decode()).double())


def test_formats_without_a_kernel_have_none():
    assert encode("csr", random(4, 4)).product(torch.zeros(4), torch.zeros(4)) is None


@pytest.mark.parametrize("form", ["dense", "endor"])
def test_scales_are_multiplied(form, team):
    packed = Scaled.encode(form, random(33, 70).to(torch.bfloat16))
    check(packed, packed.packed.decode().double() * packed.scales.double()[:, None])


def test_a_permuted_matrix_reads_permuted_inputs(team):
    packed = encode("spqr", random(20, 37))
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    permuted = type(packed)(packed.shape, packed.dtype, packed.words, packed.offsets, packed.col_vals, order)
    check(permuted, permuted.decode().double())
    foreign = order.masked_fill(order > 30, 1 << 30).masked_fill(order < 3, -5)
    damaged = type(packed)(packed.shape, packed.dtype, packed.words, packed.offsets, packed.col_vals, foreign)
    Program(stages([damaged.product(torch.ones(37), torch.empty(20))])).run()  # reads within x


def check(packed, weight):
    """Twice, with other inputs in the same place; beside another product in the same stage."""
    x, y, other = torch.zeros(weight.shape[1]), torch.empty(len(weight)), np.zeros(9, np.int64)
    program = Program(stages([packed.product(x, y), Product(Task(count, (other, 1), 9, MUCH))]))
    for seed in (2, 3):
        x.copy_(random(len(x), seed=seed))
        program.run()
        expected = weight @ x.double()
        scale = float((weight.abs() @ x.double().abs()).max()) + 1e-6
        assert float((y - expected).abs().max()) <= 2e-3 * scale
        torch.testing.assert_close(y, packed.matvec(x).float(), rtol=0, atol=1e-2 * scale)
    assert (other == 2).all()


def test_few_bytes_take_one_part_each_and_many_are_shared_by_bytes(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    values = np.zeros(1, np.int64)
    stage = [Task(count, (values, 1), 1000, 3 * MUCH), Task(count, (values, 1), 999, MUCH), Task(multiply, (values, 1))]
    found = [part for (part,) in parallel.chains_of(stage)]
    assert [sum(part.task is task for part in found) for task in stage] == [6, 2, 1]
    assert found[0][1:] == (0, 166)
    assert found[-2][1:] == (499, 999)
    assert parallel.PARTS * 2 == 8


def test_tasks_that_run_alone_are_one_part(team):
    """((1 · 2 + 3) · 2 + 3) · 2: in this order only, in one part between two that are shared."""
    values = np.ones(64, np.float32)
    doubling, adding = Task(multiply, (values, np.float32(2))), Task(count, (values, np.float32(3)), 64, 1)
    shared = Task(count, (values, np.float32(1)), 64, MUCH)
    program = Program([[shared], [doubling], [adding], [doubling], [adding], [doubling], [shared]])
    chains = [chain for stage in parallel._joined(program.stages) for chain in parallel.chains_of(stage)]
    assert [part.task for part in max(chains, key=len)] == [doubling, adding, doubling, adding, doubling]
    for _ in range(2):
        values[:] = 0
        program.run()
        assert (values == 27).all()
