"""Hermes: hot neurons on a GPU, cold ones on near-data DIMMs that compute where they lie.

The idea: some neurons fire for nearly every token, most for few. The GPU holds the hot ones. DIMMs with processors
compute the others in place, so that vectors cross the link and weights do not.

Begin with `notebooks/hermes/fig03_hot_cold`, then `fig09_offloading_systems`. GPU and DIMMs are simulated.

- `mapping`: which neurons lie on the GPU and on which DIMM, offline (section IV-B: an ILP, and its greedy solution)
- `dimms`: which neurons move between DIMMs while tokens are generated (section IV-D)
- `loads`: the work of each processor for each token; `tokens`: its time, the cost model of section V
- `systems`: tokens a second of Hermes and its rivals; `traces`: the activity that all of it replays
- `tally`: neurons counted by place and level, and some of them picked
- `toolkit.predictors.states`: the predictor of section IV-C, which other papers' figures use as well
"""
