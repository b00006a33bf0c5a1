"""Passes timed on this machine, beside rivals, and kept together with their circumstances."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.measure import accelerate, fio, llama_cpp, memory_group
    from toolkit.measure.contestant import Contestant, Reference, Text
    from toolkit.measure.disturbance import Guard
    from toolkit.measure.packed_model import PackedModel
    from toolkit.measure.processes import OurRun
    from toolkit.measure.race import PLACED, Race, race_spans
    from toolkit.measure.summary import by_turn, stage_summary, times_as_fast
    from toolkit.measure.turns import take_turns, timeline_of
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "PLACED",
    "Contestant",
    "Guard",
    "OurRun",
    "PackedModel",
    "Race",
    "Reference",
    "Text",
    "accelerate",
    "by_turn",
    "fio",
    "llama_cpp",
    "memory_group",
    "race_spans",
    "stage_summary",
    "take_turns",
    "timeline_of",
    "times_as_fast",
]
