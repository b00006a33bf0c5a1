"""The time to change which neurons are in memory: rows swapped in place, or the whole matrix built anew.

    rewriting(Rewriting("opt-6.7b", windows=(1, 2, 4, 8)))

Nothing is read from a disk here: new rows are left as they are, and only the rows that stay are copied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64

from toolkit.activations.synthetic import UsageLaw, draw
from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.machines.probe import describe
from toolkit.measure.contestant import Contestant
from toolkit.measure.turns import take_turns
from toolkit.offload.neuron_store import NeuronStore
from toolkit.papers.flash.twin_bundles import DTYPE, neuron_shape
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

    `changed` counts the rows that go; `disturbed` says whether other work disturbed the turn. Two ways take turns: the
    manager of LLM in a flash (section 3.3), and a new matrix into which the rows that stay are copied. The first tokens
    fill the window and are left out.
    """
    count, hidden, gated = neuron_shape(setting.model)
    width, warm = hidden * (3 if gated else 2), max(setting.windows)
    law = UsageLaw.fit(setting.active, exponent=1, new=setting.new, tokens=5)
    active = draw(setting.model, [law], count, warm + setting.tokens, setting.seed).active(0)[0].numpy()
    needed = units_of(active)
    racing = [kind(needed, count, width, window) for window in setting.windows for kind in (Swapping, Reallocating)]
    spans = take_turns(racing, 1, setting.tokens, skipped=warm)
    counts = [way.labels | {"token": token} | found for way in racing for token, found in way.counts.items()]
    keys = ["way", "window", "token"]
    table = spans.assign(seconds=spans["end_s"] - spans["start_s"])[[*keys, "seconds", "disturbed"]]
    shared = {"model": setting.model, "neurons": count, "row_bytes": width * DTYPE.itemsize}
    table = table.merge(pd.DataFrame(counts), on=keys).drop(columns="token")
    return table.assign(**shared).astype({"disturbed": float})


class _Rows(Contestant):
    """A layer's neurons in the rows of a matrix, for one window. `counts` has those of each token."""

    def __init__(self, needed: Sequence[Int64[np.ndarray, " needed"]], count: int, width: int, window: int):
        self.needed, self.count, self.width, self.window_tokens = needed, count, width, window
        self.rows = most_held(needed, SlidingWindow(count, window))
        self.labels, self.counts = {"way": self.name, "window": window}, dict[int, dict[str, int]]()

    def policy(self) -> SlidingWindow:
        """The window, with nothing in it."""
        return SlidingWindow(self.count, self.window_tokens, self.rows)


class Swapping(_Rows):
    """The manager: a neuron that goes is overwritten with the last one, and new ones are appended."""

    name = MANAGER

    @contextmanager
    def open(self) -> Iterator[None]:
        """An empty store."""
        self.store = NeuronStore(self.policy(), self.width, DTYPE, lambda neurons, rows: None)
        yield

    def token(self, number: int) -> None:
        """Hold what the token needs."""
        moved = self.store.rows_moved
        change = self.store.advance(self.needed[number])
        counts = {"held": self.store.num_used, "changed": len(change.dropped)}
        self.counts[number] = counts | {"rewritten": self.store.rows_moved - moved}


class Reallocating(_Rows):
    """A new matrix for each token, into which the rows that stay are copied."""

    name = REALLOCATION

    @contextmanager
    def open(self) -> Iterator[None]:
        """A matrix of zeros, and nothing that is held."""
        self.matrix, self.stays = torch.zeros(self.rows, self.width, dtype=DTYPE), self.policy()
        yield

    def token(self, number: int) -> None:
        """Hold what the token needs."""
        held = self.stays.held.copy()
        change = self.stays.step(self.needed[number])
        stay = held.copy()
        stay[change.dropped] = False
        places = torch.from_numpy(np.flatnonzero(stay[np.flatnonzero(held)]))  # rows of those held, in rising order
        rebuilt = torch.empty(len(places) + len(change.loaded), self.width, dtype=DTYPE)
        torch.index_select(self.matrix, 0, places, out=rebuilt[: len(places)])
        self.matrix = rebuilt
        self.counts[number] = {"held": len(rebuilt), "changed": len(change.dropped), "rewritten": len(places)}
