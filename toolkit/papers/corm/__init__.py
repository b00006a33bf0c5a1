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

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.corm import cost_model, expert_race, latency, routing
    from toolkit.papers.corm.cached_first import CachedFirst
    from toolkit.papers.corm.cost_model import (
        BREAKDOWN,
        CORM,
        DEFAULTS,
        ON_DEMAND,
        PREFETCHED,
        RIVALS,
        SCHEDULINGS,
        SPARSE,
        VALUE_BYTES,
        active_weights,
        expert_bytes,
        expert_weights,
        weight_bits,
    )
    from toolkit.papers.corm.expert_quality import ExpertVariant, expert_variants, routed_output
    from toolkit.papers.corm.expert_race import ExpertRace
    from toolkit.papers.corm.latency import (
        BYTES_ALONE,
        MACHINE,
        OFFLOAD,
        latency_table,
        real_hits,
        routed_table,
        token_row,
    )
    from toolkit.papers.corm.load_rule import DISK, DRAM, GATHERED, WHOLE, Link, load_times, neuron_bytes
    from toolkit.papers.corm.routing import RoutedModel
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BREAKDOWN",
    "BYTES_ALONE",
    "CORM",
    "DEFAULTS",
    "DISK",
    "DRAM",
    "GATHERED",
    "MACHINE",
    "OFFLOAD",
    "ON_DEMAND",
    "PREFETCHED",
    "RIVALS",
    "SCHEDULINGS",
    "SPARSE",
    "VALUE_BYTES",
    "WHOLE",
    "CachedFirst",
    "ExpertRace",
    "ExpertVariant",
    "Link",
    "RoutedModel",
    "active_weights",
    "cost_model",
    "expert_bytes",
    "expert_race",
    "expert_variants",
    "expert_weights",
    "latency",
    "latency_table",
    "load_times",
    "neuron_bytes",
    "real_hits",
    "routed_output",
    "routed_table",
    "routing",
    "token_row",
    "weight_bits",
]
