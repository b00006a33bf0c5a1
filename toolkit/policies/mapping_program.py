"""The offline mapping as an integer program (Hermes, equations 1 to 7), by PuLP with CBC or HiGHS.

mapping = solve(blocks, room, "highs", limit_s=30)
mapping.gap   # over the bound of the linear relaxation, whichever solver stopped when
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from toolkit.errors import UserError, unknown
from toolkit.policies.mapping import NeuronBlock, NeuronMap, Room, expect_room
from toolkit.policies.residency import expect_positive

if TYPE_CHECKING:
    import pulp

SOLVERS = {"cbc": "PULP_CBC_CMD", "highs": "HiGHS"}  # their names in PuLP
MISSING = {"cbc": "reinstall pulp, which brings it", "highs": "`pip install highspy`"}
GROUP = 64  # neurons of like frequency that share a place


def solve(
    blocks: Sequence[NeuronBlock],
    room: Room,
    solver: str = "cbc",
    limit_s: float = 60,
    group: int = GROUP,
    gap: float = 0.0,
    dimms_apart: bool = False,
) -> NeuronMap:
    """The best mapping that a solver finds in `limit_s` seconds.

    Args:
        solver: one of `SOLVERS`.
        group: so many neurons of a block, in the order of DIMM time per byte, get one place.
        gap: the solver may stop this near to its own bound (0.01 is 1 %).
        dimms_apart: a group gets a DIMM of its own choice; else all DIMMs are one, and cold neurons are dealt to them.

    Raises `UserError` for a solver that is unknown, absent or finds nothing in time, and if the DIMMs are too small.
    """
    import pulp

    expect_room(blocks, room)
    expect_positive(group=group)
    if not limit_s > 0:
        raise UserError(f"limit_s: {limit_s}; expected seconds, more than 0")
    if solver not in SOLVERS:
        raise unknown("solver", solver, SOLVERS)
    if solver not in installed():
        raise UserError(f"solver {solver}: not installed; {MISSING[solver]}, or use `greedy`")
    groups = [np.split(order, range(group, len(order), group)) for order in (block.by_saving for block in blocks)]
    problem, places = _program(blocks, room, groups, room.dimms if dimms_apart else 1)
    problem.solve(pulp.getSolver(SOLVERS[solver], msg=False, timeLimit=limit_s, gapRel=gap))
    if problem.status == pulp.LpStatusInfeasible:
        raise UserError(f"groups of {group} neurons do not fit the DIMMs one by one: take smaller groups")
    if problem.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
        raise UserError(f"{solver} found no mapping in {limit_s:g} s: allow more, take larger groups, or use `greedy`")
    place = [_places(len(block.frequency), *both) for block, *both in zip(blocks, groups, places, strict=True)]
    hot = [each == 0 for each in place]
    # a hot neuron's copy on a DIMM costs no time: any will do
    return NeuronMap.of(blocks, room, hot, [np.maximum(each - 1, 0) for each in place] if dimms_apart else None)


def installed() -> list[str]:
    """The solvers at hand."""
    import pulp

    return [name for name, solver in SOLVERS.items() if pulp.getSolver(solver, msg=False).available()]


Choices = list[list["pulp.LpVariable"]]  # of each group: whether it is on the GPU, on DIMM 0, on DIMM 1 and so on


def _program(
    blocks: Sequence[NeuronBlock], room: Room, groups: list[list[Int64[np.ndarray, " neurons"]]], dimms: int
) -> tuple["pulp.LpProblem", list[Choices]]:
    """The program; room's DIMMs become so many, which are as fast and hold as much together."""
    import pulp

    share = room.dimms // dimms
    second = max([block.dimm_load.sum() for block in blocks if block.dimm_load.any()], default=1)
    byte = max(int(block.neuron_bytes.max()) for block in blocks)  # solvers want numbers near 1
    problem, held, choices = pulp.LpProblem("mapping", pulp.LpMinimize), [[] for _ in range(dimms + 1)], []
    waits = [problem.add_variable(f"z{number}", lowBound=0) for number in range(len(blocks))]
    problem += pulp.lpSum(waits)
    for number, (block, parts) in enumerate(zip(blocks, groups, strict=True)):
        names = [[f"x{number}_{part}_{place}" for place in range(dimms + 1)] for part in range(len(parts))]
        choices.append([[problem.add_variable(name, cat="Binary") for name in row] for row in names])
        sizes = [block.neuron_bytes[part].sum() / byte for part in parts]
        for place, chosen in enumerate(zip(*choices[-1], strict=True)):
            load, fixed = (block.dimm_load / share, 0) if place else (block.gpu_load, 2 * room.sync_s)
            times = [load[part].sum() / second for part in parts]
            problem += waits[number] >= pulp.lpDot(times, chosen) + fixed / second
            held[place] += [size * each for size, each in zip(sizes, chosen, strict=True)]
        for row in choices[-1]:
            problem += pulp.lpSum(row) == 1
    problem += pulp.lpSum(held[0]) <= room.gpu_bytes / byte
    for there in held[1:]:
        problem += pulp.lpSum(there) <= room.dimm_bytes * share / byte
    return problem, choices


def _places(neurons: int, groups: list[Int64[np.ndarray, " neurons"]], choices: Choices) -> np.ndarray:
    """The place of each neuron: 0 is the GPU, 1 the first DIMM."""
    place = np.empty(neurons, dtype=np.int8)
    for group, row in zip(groups, choices, strict=True):
        place[group] = np.argmax([chosen.value() for chosen in row])
    return place
