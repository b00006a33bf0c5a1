"""Hermes: hot neurons on a GPU, cold ones on near-data DIMMs that compute where they lie.

The idea: some neurons fire for nearly every token, most for few. The GPU holds the hot ones. DIMMs with processors
compute the others in place, so that vectors cross the link and weights do not.

Begin with `notebooks/hermes/fig03_hot_cold`, then `fig09_offloading_systems`. GPU and DIMMs are simulated.

- `mapping`: which neurons lie on the GPU and on which DIMM, offline (section IV-B): a greedy solution of the paper's
  ILP with a bound on its gap; `notebooks/hermes/fig13_ablation` has the ILP itself, solved by SciPy's `milp`
- `dimms`: which neurons move while tokens are generated (section IV-D): `remap` between DIMMs, `swap` with the GPU
- `loads`: the work of each processor for each token; `tokens`: its time, the cost model of section V
- `systems`: tokens a second of Hermes and its rivals; `traces`: the activity that all of it replays
- `tally`: neurons counted by place and level, and some of them picked
- `toolkit.predictors.states`: the predictor of section IV-C, which other papers' figures use as well
- `toolkit.residency.policies`: its hot sets as policies, `HotTable` and `Static`
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.hermes import dimms, traces
    from toolkit.papers.hermes.loads import ABLATION, FFN, SYSTEMS, Serving, gpu_room, loads_of, neuron_blocks
    from toolkit.papers.hermes.mapping import NeuronBlock, NeuronMap, Room, greedy
    from toolkit.papers.hermes.systems import (
        COLOURS,
        HIGH_END,
        MACHINE,
        SystemCase,
        fitted_sets,
        null_table,
        serving_times,
        shares,
        systems_table,
    )
    from toolkit.papers.hermes.tokens import token_timeline
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ABLATION",
    "COLOURS",
    "FFN",
    "HIGH_END",
    "MACHINE",
    "SYSTEMS",
    "NeuronBlock",
    "NeuronMap",
    "Room",
    "Serving",
    "SystemCase",
    "dimms",
    "fitted_sets",
    "gpu_room",
    "greedy",
    "loads_of",
    "neuron_blocks",
    "null_table",
    "serving_times",
    "shares",
    "systems_table",
    "token_timeline",
    "traces",
]
