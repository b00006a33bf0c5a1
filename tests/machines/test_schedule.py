"""The scheduler on named resources, by hand."""

import pytest

from toolkit.errors import UserError
from toolkit.machines.schedule import Step, schedule


def step(op, resource, seconds, *after, stage="compute"):
    return Step(stage, op, resource, resource, seconds, after=after)


def times(timeline):
    return {span.op: (span.start_s, span.end_s) for span in timeline.spans}


def test_two_dimms_and_a_gpu_wait_for_each_other_at_the_merge():
    """One decoder layer's hot neurons on the GPU and its cold ones on two DIMMs (HERMES), and the next attention.

    link    xx   m m       x: the input goes to the DIMMs, m: a DIMM's part comes back
    gpu     hhhh    +aa    h: hot neurons, +: the merge waits for all three, a: attention of the next layer
    dimm 0    000
    dimm 1    11111
            0    5    10
    """
    x = step("input", "link", 2, stage="copy")
    hot = step("hot", "gpu", 4)
    cold = [step("cold 0", "dimm 0", 3, x), step("cold 1", "dimm 1", 5, x)]
    parts = [step(f"part {number}", "link", 1, each, stage="copy") for number, each in enumerate(cold)]
    merge = step("merge", "gpu", 1, hot, *parts)
    attention = step("attention", "gpu", 2, merge)
    timeline = schedule([x, hot, *cold, *parts, merge, attention])
    assert times(timeline) == {
        "input": (0, 2),
        "hot": (0, 4),
        "cold 0": (2, 5),
        "cold 1": (2, 7),
        "part 0": (5, 6),
        "part 1": (7, 8),
        "merge": (8, 9),
        "attention": (9, 11),
    }
    assert (timeline.total_s, timeline.evidence) == (11, "modelled")
    assert {span.tier for span in timeline.spans} == {"link", "gpu", "dimm 0", "dimm 1"}


def test_a_resource_serves_its_steps_in_the_order_given():
    """The second step could start at once, but the first one of its resource waits for another."""
    slow = step("slow", "disk", 3)
    first = step("first", "gpu", 1, slow)
    second = step("second", "gpu", 1)
    assert times(schedule([slow, first, second])) == {"slow": (0, 3), "first": (3, 4), "second": (4, 5)}
    assert times(schedule([slow, second, first])) == {"slow": (0, 3), "second": (0, 1), "first": (3, 4)}


def test_two_steps_with_the_same_fields_are_two():
    first, second = step("read", "disk", 2), step("read", "disk", 2)
    last = step("product", "cpu", 1, first)
    assert [(s.start_s, s.end_s) for s in schedule([first, second, last]).spans] == [(0, 2), (2, 4), (2, 3)]


def test_a_step_before_the_one_it_waits_for_is_refused():
    read = step("fc1", "disk", 2, stage="read")
    with pytest.raises(UserError, match="compute of 'fc1' waits for read of 'fc1': give that first"):
        schedule([step("fc1", "gpu", 1, read), read])
