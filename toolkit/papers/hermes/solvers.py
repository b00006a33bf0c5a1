"""How long the offline mapping takes, and how near it comes to its bound: greedily and by solvers (figure 13).

Each way is kept by itself, so that an interrupted run goes on with the next one. Within one there is nothing to go on
from: the layers share the GPU's memory, so no layer's neurons are settled before those of all are.
"""

import time
from collections.abc import Sequence

import pandas as pd

from toolkit.machines.hardware import profile
from toolkit.measure.turns import measured
from toolkit.models.architectures import ARCHITECTURES
from toolkit.papers.hermes.systems import MACHINE
from toolkit.policies.hot_cold_ways import SYSTEMS
from toolkit.policies.mapping import NeuronBlock, Room, greedy
from toolkit.policies.mapping_program import installed, solve
from toolkit.simulation.hot_cold_loads import Serving, gpu_room, neuron_blocks

GREEDY = "greedy"
ENOUGH = 0.001  # solvers may stop this near to their own bound


def offline_problem(model: str, seed: int = 0) -> tuple[list[NeuronBlock], Room]:
    """All blocks of a model with drawn frequencies, and the room of the default machine (section IV-B)."""
    machine, serving = profile(MACHINE), Serving(model, sampled_layers=ARCHITECTURES[model].layers, seed=seed)
    return neuron_blocks(machine, serving, SYSTEMS["hermes"]), gpu_room(machine, serving)


def solvers_table(model: str, limit_s: float, seed: int = 0, ways: Sequence[str] | None = None) -> pd.DataFrame:
    """A row for the greedy mapping and for each solver, by default those that are installed; kept one by one.

    Columns: solver; solve_s, of a problem that is made already; gap_percent, over the bound of the linear relaxation;
    model, part, evidence, profile. Raises what `solve` raises.
    """
    chosen = (GREEDY, *installed()) if ways is None else ways
    table = pd.concat([_solved(model, way, limit_s, seed) for way in chosen], ignore_index=True)
    return table.assign(model=model, part="solvers", evidence="measured", profile="this-machine")


@measured
def _solved(model: str, way: str, limit_s: float, seed: int) -> pd.DataFrame:
    blocks, room = offline_problem(model, seed)
    begun_s = time.perf_counter()
    found = greedy(blocks, room) if way == GREEDY else solve(blocks, room, way, limit_s, gap=ENOUGH)
    seconds = time.perf_counter() - begun_s
    return pd.DataFrame([{"solver": way, "solve_s": seconds, "gap_percent": 100 * found.gap}])
