"""Ways of loading experts."""

from dataclasses import asdict
from itertools import pairwise

import pytest

from toolkit.errors import UserError
from toolkit.policies.expert_ways import BREAKDOWN, CORM, EXPERT_WAYS, ExpertWay


def test_each_step_of_the_breakdown_adds_to_the_one_before():
    for before, after in pairwise(BREAKDOWN.values()):
        switches = [(asdict(before)[name], asdict(after)[name]) for name in ("sparse", "mixed", "prefetch", "cached")]
        assert all(new or not old for old, new in switches)
        assert any(new and not old for old, new in switches)
    assert list(BREAKDOWN.values())[-1] is CORM


def test_ways_have_the_names_they_are_found_by():
    assert all(way.name == name for name, way in EXPERT_WAYS.items())


def test_other_bits_are_refused():
    with pytest.raises(UserError, match="3"):
        ExpertWay("three", bits=3)
