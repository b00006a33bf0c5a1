"""The residency policies there are, by name. A policy with settings of its own takes them by name."""

from toolkit.policies.belady import Belady
from toolkit.policies.hot_table import HotTable
from toolkit.policies.least_stale import LeastStale
from toolkit.policies.lfu import Lfu
from toolkit.policies.lru import Lru
from toolkit.policies.random_choice import RandomChoice
from toolkit.policies.residency import Residency
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.policies.static import Static

RESIDENCIES: dict[str, type[Residency]] = {
    "window": SlidingWindow,
    "lru": Lru,
    "lfu": Lfu,
    "least_stale": LeastStale,
    "random": RandomChoice,
    "hot_table": HotTable,
    "static": Static,
    "belady": Belady,
}
