"""Budgets hold to the byte."""

import pytest

from toolkit.offload.budget import Budget, BudgetError


def test_a_budget_can_be_used_up_and_not_by_a_byte_more():
    budget = Budget("DRAM", 10_000)
    budget.take(rest=1_000, slots=4_000)
    budget.take(slots=4_999)
    assert (budget.used_bytes, budget.left_bytes, budget.taken["slots"]) == (9_999, 1, 8_999)
    with pytest.raises(BudgetError) as caught:
        budget.take(rest=2)
    assert caught.value.needed_bytes == 10_001
    budget.take(rest=1)
    assert budget.left_bytes == 0


def test_no_limit_holds_everything():
    budget = Budget("DRAM")
    budget.take(layers=1 << 60)
    assert budget.left_bytes == float("inf")
