"""The residency policies there are, by name. A policy with settings of its own takes them by name."""

from toolkit.policies.belady import Belady
from toolkit.policies.lru import Lru
from toolkit.policies.residency import Residency
from toolkit.policies.sliding_window import SlidingWindow

RESIDENCIES: dict[str, type[Residency]] = {"window": SlidingWindow, "lru": Lru, "belady": Belady}
