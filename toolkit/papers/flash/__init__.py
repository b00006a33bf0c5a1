"""LLM in a flash: predict which FFN neurons fire, keep a window of them in DRAM, read the others from flash.

The idea: with ReLU most neurons of an FFN are zero for a token. A small predictor names those that fire. Neurons of the
last tokens stay in DRAM, so few new ones are read, each as one bundle of its rows and columns.

Begin with `notebooks/flash/fig04_sliding_window`, then `tab03_end_to_end`. The engine runs a model this way
(`toolkit.offload.by_neuron`, `toolkit.storage.bundles`, `toolkit.predictors`, `toolkit.residency`).

- `cost_model`: a token's reads (table 2) and whole tokens (table 3) on the papers' machines
- `replay`: a trace replayed on a twin on disk, measured; `twin_bundles`: the twin; `reads`: what each technique saves
- `generation`: text from a real model whose neurons come from disk
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.flash.cost_model import Reads, papers_tokens
    from toolkit.papers.flash.generation import PREDICTS_AND_KEEPS, Clock, Generation, model_bytes
    from toolkit.papers.flash.reads import measured_ways, modelled_reads, predictor_seconds, stage_bars
    from toolkit.papers.flash.replay import Replay, replay_spans
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "PREDICTS_AND_KEEPS",
    "Clock",
    "Generation",
    "Reads",
    "Replay",
    "measured_ways",
    "model_bytes",
    "modelled_reads",
    "papers_tokens",
    "predictor_seconds",
    "replay_spans",
    "stage_bars",
]
