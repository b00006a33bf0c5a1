"""When steps start and end on named resources: a disk, a link, a GPU, eight DIMMs.

    one = Step("compute", "ffn", "dimm 0", "dimm 0", seconds=3)
    other = Step("compute", "ffn", "dimm 1", "dimm 1", seconds=5)
    merge = Step("compute", "merge", "device", "gpu", seconds=1, after=(one, other))
    schedule([one, other, merge]).total_s  # 6

A resource serves one step at a time, in the order in which the steps are given.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.errors import UserError
from toolkit.timeline import Span, Timeline


@dataclass(frozen=True, eq=False)
class Step:
    """A span before its times are known: the resource that it keeps busy, for how long, and the steps it waits for.

    The other fields are those of `Span`. Two steps with the same fields are two steps.
    """

    stage: str
    op: str
    tier: str
    resource: str
    seconds: float
    nbytes: int = 0
    layer: int | None = None
    after: tuple["Step", ...] = ()


def schedule(steps: Iterable[Step]) -> Timeline:
    """The modelled timeline: each step starts as soon as its resource is free and the steps of `after` have ended.

    Raises `UserError` for a step that is given before one that it waits for, and as `Span` does.
    """
    free_s: defaultdict[str, float] = defaultdict(float)
    ends_s: dict[Step, float] = {}
    spans = []
    for step in steps:
        if early := [other for other in step.after if other not in ends_s]:
            raise UserError(
                f"{step.stage} of {step.op!r} waits for {early[0].stage} of {early[0].op!r}: give that first"
            )
        start_s = max(free_s[step.resource], *(ends_s[other] for other in step.after), 0.0)
        ends_s[step] = free_s[step.resource] = start_s + step.seconds
        spans.append(Span(step.stage, step.op, step.tier, start_s, ends_s[step], step.nbytes, step.layer))
    return Timeline(tuple(spans), "modelled")
