"""What it costs to change which neurons are in memory: rows swapped in place, or the whole matrix built anew.

    rewriting(Rewriting("opt-6.7b", windows=(1, 2, 4, 8)))

Nothing is read from a disk here: new rows are left as they are, and only the rows that stay are copied.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from toolkit.activations.synthetic import UsageLaw, draw
from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.machines.probe import describe
from toolkit.measure.disturbance import Guard, Load
from toolkit.measure.twin_bundles import DTYPE, neuron_shape
from toolkit.offload.neuron_store import NeuronStore
from toolkit.policies.residency import Change
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.simulation.replay import most_held, units_of

MANAGER, REALLOCATION = "swap and append", "reallocation"


@dataclass(frozen=True)
class Rewriting:
    """One layer of `model`, and a drawn trace: the shares of `Replay`, `new` for a window of 4 tokens."""

    model: str
    windows: Sequence[int] = (1, 2, 4, 8)
    active: float = 0.10
    new: float = 0.024
    tokens: int = 24
    seed: int = 0

    def __post_init__(self):
        """Refuse numbers that make no sense."""
        if self.tokens < 1 or not self.windows or min(self.windows) < 1:
            raise UserError(f"tokens={self.tokens}, windows={list(self.windows)}: expected 1 or more of each")


@kept("rewriting", key=lambda: {"machine": describe()})
def rewriting(setting: Rewriting) -> pd.DataFrame:
    """A row for each way, window and timed token: held, changed and rewritten (rows), row_bytes, seconds, disturbed.

    `changed` counts the rows that go; `disturbed` is 1 where other work disturbed the token, else 0. Two ways: the
    manager of LLM in a flash (section 3.3), and a new matrix into which the rows that stay are copied. The first
    `window` tokens fill the window and are left out.
    """
    guard = Guard()
    rows = list(_rows(setting, guard))
    guard.close()
    return pd.DataFrame([row | {"disturbed": float(load.disturbed)} for row, load in rows])


def _rows(setting: Rewriting, guard: Guard) -> Iterator[tuple[dict, Load]]:
    count, hidden, gated = neuron_shape(setting.model)
    width, warm = hidden * (3 if gated else 2), max(setting.windows)
    law = UsageLaw.fit(setting.active, exponent=1, new=setting.new, tokens=5)
    active = draw(setting.model, [law], count, warm + setting.tokens, setting.seed).active(0)[0].numpy()
    needed = units_of(active)
    for window in setting.windows:
        rows = most_held(needed, SlidingWindow(count, window))
        store = NeuronStore(SlidingWindow(count, window, rows), width, DTYPE, lambda neurons, rows: None)
        matrix, stays = torch.zeros(rows, width, dtype=DTYPE), SlidingWindow(count, window, rows)
        for number, token in enumerate(needed):
            with guard.turn() as load:
                moved, begun_s = store.rows_moved, time.perf_counter()
                change = store.advance(token)
                managed_s = time.perf_counter() - begun_s
                begun_s = time.perf_counter()
                matrix, copied = _reallocated(matrix, stays, token)
                rebuilt_s = time.perf_counter() - begun_s
            if number >= warm:
                labels = {"model": setting.model, "window": window, "neurons": count, "held": store.num_used}
                labels |= {"changed": len(change.dropped), "row_bytes": width * DTYPE.itemsize}
                yield labels | {"way": MANAGER, "rewritten": store.rows_moved - moved, "seconds": managed_s}, load
                yield labels | {"way": REALLOCATION, "rewritten": copied, "seconds": rebuilt_s}, load


def _reallocated(matrix: torch.Tensor, window: SlidingWindow, token: np.ndarray) -> tuple[torch.Tensor, int]:
    """A new matrix for what is held after this token, with the rows that stay copied into it, and their number."""
    held = window.held.copy()
    change: Change = window.step(token)
    stay = held.copy()
    stay[change.dropped] = False
    places = torch.from_numpy(np.flatnonzero(stay[np.flatnonzero(held)]))  # a row for each neuron held, in rising order
    rebuilt = torch.empty(len(places) + len(change.loaded), matrix.shape[1], dtype=matrix.dtype)
    torch.index_select(matrix, 0, places, out=rebuilt[: len(places)])
    return rebuilt, len(places)
