"""CORM: experts of a mixture in DRAM, those that the next layer needs loaded ahead, and of each only active neurons.

The idea: a token needs two of eight experts. The router of the next layer, run on this layer's input, names them early
enough to load them while this layer computes. A two-level cache keeps experts and, within them, neurons.

Begin with `notebooks/corm/fig05_prediction_accuracy`, then `fig08_breakdown`. The cache (`toolkit.residency.two_level`)
and the runtime (`toolkit.offload.by_expert`) are the engine's.

- `cost_model`: the time of one token (section 5); `latency`: figures 7 and 8, tables 1, 3 and 4 by it
- `routing`: how well a layer predicts the next one, and which experts stay
- `expert_quality`: the price of fewer bits, predicted experts and skipped neurons
- `expert_race`: ways of loading experts raced from a real disk; `load_rule`: whole expert or active neurons only
"""
