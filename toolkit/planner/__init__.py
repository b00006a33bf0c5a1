"""The planner: speed and price of every way of running a model on this machine, before any is tried."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.planner import sizes, stand_ins
    from toolkit.planner.bench import Contender, packed_folder, race, rivals_of
    from toolkit.planner.by_bytes import best_elsewhere
    from toolkit.planner.prices import Quality
    from toolkit.planner.speed import fitting, this_machine
    from toolkit.planner.target import open_target
    from toolkit.planner.ways import NEURONS, RIVAL, ZEROS
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "NEURONS",
    "RIVAL",
    "ZEROS",
    "Contender",
    "Quality",
    "best_elsewhere",
    "fitting",
    "open_target",
    "packed_folder",
    "race",
    "rivals_of",
    "sizes",
    "stand_ins",
    "this_machine",
]
