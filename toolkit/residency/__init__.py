"""The units that stay in memory: policies for neurons and experts, without I/O.

- `base`: a policy decides, for each token, which units are loaded and dropped
- `policies`: LRU, LFU, the sliding window and others, by name; `two_level`: experts, and neurons within each
- `replay`: a trace through a policy, without a disk or a model

A new one goes into `RESIDENCIES` of `policies`. `toolkit.offload.placement` chooses whole layers.
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.residency.policies import (
        RESIDENCIES,
        Belady,
        HotTable,
        LeastStale,
        Lru,
        SlidingWindow,
        Static,
        residency_of,
    )
    from toolkit.residency.replay import most_held, rates, replay_experts, units_of
    from toolkit.residency.two_level import TwoLevel
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "RESIDENCIES",
    "Belady",
    "HotTable",
    "LeastStale",
    "Lru",
    "SlidingWindow",
    "Static",
    "TwoLevel",
    "most_held",
    "rates",
    "replay_experts",
    "residency_of",
    "units_of",
]
