"""Rows are shared out among torch's threads, each exactly once, whatever happens."""

import os
import signal
import threading

import numba
import numpy as np
import pytest
import torch

from toolkit.kernels.runtime import threads
from toolkit.kernels.runtime.compiled import COMPILE

MUCH = 1 << 30  # bytes of work: as many threads as there are
PATIENCE_S = 60


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


@pytest.fixture(params=["openmp", "pool"])
def team(request, monkeypatch):
    """The two kinds of threads; more of them than cores."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "fork_address", lambda: None)
    elif threads.fork_address() is None:
        pytest.skip("this torch has no OpenMP threads that C can call")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 1001])
def test_each_row_is_visited_once(team, rows):
    visits = np.zeros(rows, np.int64)
    threads.over_rows(count, rows, MUCH, visits, 2)
    assert (visits == 2).all()


def test_types_and_layouts_of_arguments_are_told_apart(team):
    for visits in (np.zeros(9, np.int64), np.zeros(9, np.float32), np.zeros((9, 2), np.int64)[:, 0]):
        for more in (1, np.int32(2), np.float64(3)):
            threads.over_rows(count, 9, MUCH, visits, more)
        assert visits.tolist() == [6] * 9


def test_an_error_in_one_part_is_raised(team):
    with pytest.raises(ValueError, match="row of no use"):
        threads.over_rows(fail_at, 100, MUCH, np.zeros(100, np.int64), 70)


def test_several_threads_call_at_once(team):
    def work(visits):
        for _ in range(200):
            threads.over_rows(count, len(visits), MUCH, visits, 1)

    found = [np.zeros(50 + number, np.int64) for number in range(4)]
    callers = [threading.Thread(target=work, args=(visits,)) for visits in found]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert all((visits == 200).all() for visits in found)


def test_a_forked_child_has_threads_of_its_own(team):
    visits = np.zeros(64, np.int64)
    threads.over_rows(count, 64, MUCH, visits, 1)
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)  # a child that waits for its parent's threads is ended
        threads.over_rows(count, 64, MUCH, visits, 1)
        os._exit(int(not (visits == 2).all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads.over_rows(count, 64, MUCH, visits, 1)
    assert (visits == 2).all()
