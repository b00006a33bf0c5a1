"""Hit rates: the share of a token's experts, and of its FFN neurons, that memory holds, from texts of real models.

    expert_hits(shape, held=0.4)         # the share of needed experts that are found
    window_of(zeros=0.8, share=0.3)      # the shares of neurons that memory holds, and that a token reads

The neurons in a window of tokens are counted by replay of recorded text, once for all machines:
`python -m toolkit.planner.hits` writes `data/quality/windows.csv`. Columns: model, zeros (share of FFN outputs that
thresholds cut), memory (share of the neurons that fit), needed, held and loaded (shares of the neurons, a token).
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from toolkit import paths
from toolkit.errors import run_command
from toolkit.files import replacing
from toolkit.models.architectures import ModelShape
from toolkit.offload.options import WINDOW
from toolkit.papers.corm.cost_model import expert_weights
from toolkit.papers.corm.routing import RoutedModel, every, own_policies, policy_table, routing_of
from toolkit.planner.sizes import used_weights
from toolkit.planner.target import open_target
from toolkit.planner.ways import ZEROS
from toolkit.residency.policies import SlidingWindow
from toolkit.residency.replay import replay, units_of
from toolkit.sparsity.route_traces import ROUTE_TRACES
from toolkit.sparsity.trace import Trace
from toolkit.studies.thresholded import ThresholdedModel, trace

READS = ("data/quality/windows.csv",)
FEW_EXPERTS = 16  # mixtures up to this size route as the small one does, larger ones as those of the traces
SMALL = "smollm2-135m-moe-upcycled"
STEP = 8  # of the traces' layers
DENSE, RECOVERED = "smollm2-135m", "smollm2-135m-sparse90"
MEMORY = (0.12, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # shares of the neurons that fit
DIGITS = "%.4g"


def expert_hits(shape: ModelShape, held: float) -> float:
    """The share of needed experts that an LRU cache by layer finds if it holds this share of a layer's experts.

    Some layers hold an expert more than others, as the runtime shares memory out. It is the median over the traces of
    `ROUTE_TRACES`, or that of the small mixture for one of few experts.
    """
    slots, few = max(held * shape.experts, shape.experts_per_token), shape.experts <= FEW_EXPERTS
    if slots >= shape.experts:
        return 1.0
    least = int(slots)
    fewer, more = (_hits(few, count / shape.experts) for count in (least, least + 1))
    return fewer + (slots - least) * (more - fewer)


def unmapped_share(shape: ModelShape, held: float) -> float:
    """The least share of a token's weights that llama.cpp reads from disk if memory holds this share of its file.

    Pages that are used for each token stay. In a mixture those are all but the routed experts; the rest of the memory
    holds the experts used last.
    """
    if held >= 1 or not shape.experts:
        return max(0.0, 1 - held)
    one, layers = expert_weights(shape), shape.routed_layers
    whole, routed = sum(shape.parameters.values()), layers * shape.experts * one
    missing = max(0.0, whole - routed - held * whole)
    hits = expert_hits(shape, max(0.0, held * whole - (whole - routed)) / routed)
    used = layers * shape.experts_per_token * one
    return min(1.0, (missing + used * (1 - hits)) / used_weights(shape))


@cache
def _hits(few: bool, share: float) -> float:
    if few:
        tables = [own_policies(RoutedModel(SMALL), [share], ["lru"])]
    else:
        tables = [policy_table(every(routing_of(name), STEP), [share], ["lru"]) for name in ROUTE_TRACES]
    return float(sorted(table["expert_hits"].iloc[0] for table in tables)[len(tables) // 2])


def window_of(zeros: float, share: float) -> tuple[float, float]:
    """The shares of the neurons that a window of tokens holds and that a token reads, if this share of them fits.

    They are those of the recorded model with the nearest share of zeros, and between two sizes of memory on a line.
    """
    table = load_windows()
    rows = table[table["zeros"] == min(table["zeros"], key=lambda known: abs(known - zeros))]
    held, loaded = (float(np.interp(share, rows["memory"], rows[name])) for name in ("held", "loaded"))
    return held, loaded


def windows_file() -> Path:
    """Where the counts of windows are."""
    return paths.root() / "data" / "quality" / "windows.csv"


@cache
def load_windows() -> pd.DataFrame:
    """The counts, by zeros and memory."""
    return pd.read_csv(windows_file())


def window_table(found: Trace, memory: Sequence[float]) -> pd.DataFrame:
    """A row for each share of memory: what a window of `WINDOW` tokens holds and reads of a trace's neurons.

    Columns: memory, needed, held, loaded, shares of all neurons. A layer holds at least what one token needs. The first
    half of the tokens of the first sequence fills the memory and does not count.
    """
    half, rows = found.tokens.shape[1] // 2, []
    layers = [units_of(found.active(layer)[0].numpy()) for layer in range(found.layers)]
    needed = sum(len(units) for tokens in layers for units in tokens[half:]) / (found.tokens.shape[1] - half)
    for share in memory:
        held = loaded = 0.0
        for neurons, tokens in zip(found.units, layers, strict=True):
            room = max(int(share * neurons), *map(len, tokens))
            counts = replay(tokens, SlidingWindow(neurons, WINDOW, room))[half:]
            held, loaded = held + counts["held"].mean(), loaded + counts["loaded"].mean()
        counted = {"needed": needed, "held": held, "loaded": loaded}
        rows.append({"memory": share} | {name: count / sum(found.units) for name, count in counted.items()})
    return pd.DataFrame(rows)


def write_windows() -> Path:
    """Count again, with the embedded models, which takes some minutes."""
    tables = []
    for setting in [*(ThresholdedModel(DENSE, zeros=zeros) for zeros in ZEROS), ThresholdedModel(RECOVERED)]:
        rows = window_table(trace(setting, 1), MEMORY)
        own = open_target(setting.model).zeros
        tables.append(rows.assign(model=setting.model, zeros=setting.zeros if own is None else own))
    with replacing(windows_file()) as temporary:
        pd.concat(tables)[["model", "zeros", "memory", "needed", "held", "loaded"]].to_csv(
            temporary, index=False, float_format=DIGITS
        )
    return windows_file()


def main() -> int:
    """Write the counts and print where."""
    return run_command(lambda: print(write_windows()))


if __name__ == "__main__":
    sys.exit(main())
