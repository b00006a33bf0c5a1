"""How many of the experts that a token needs are in memory already, by the routing of real models."""

from functools import cache

from toolkit.activations.route_traces import ROUTE_TRACES
from toolkit.models.architectures import ModelShape
from toolkit.planner.sizes import footprint
from toolkit.planner.ways import EXPERTS, PlannedWay
from toolkit.studies.routing import RoutedModel, every, own_policies, policy_table, routing_of

FEW_EXPERTS = 16  # mixtures up to this size route as the small one does, larger ones as those of the traces
SMALL = "smollm2-135m-moe-upcycled"
STEP = 8  # of the traces' layers


def hits_of(shape: ModelShape, way: PlannedWay, dram_bytes: int) -> float:
    """The share of needed experts that a way finds in so many bytes of DRAM; 0 for a way without experts."""
    if way.kind != EXPERTS:
        return 0.0
    return expert_hits(shape, footprint(shape, way).held_share(dram_bytes))


def expert_hits(shape: ModelShape, held: float) -> float:
    """The share of needed experts that an LRU cache by layer finds if it holds this share of a layer's experts.

    It is the median over the traces of `ROUTE_TRACES`, or that of the small mixture for one of few experts.
    """
    share = max(held, shape.experts_per_token / shape.experts)
    return 1.0 if share >= 1 else _hits(shape.experts <= FEW_EXPERTS, round(share, 2))


@cache
def _hits(few: bool, share: float) -> float:
    if few:
        return float(own_policies(RoutedModel(SMALL), [share], ["lru"])["expert_hits"].iloc[0])
    found = [
        policy_table(every(routing_of(name), STEP), [share], ["lru"])["expert_hits"].iloc[0] for name in ROUTE_TRACES
    ]
    return float(sorted(found)[len(found) // 2])
