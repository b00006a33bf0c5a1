"""Hot neurons by a table of states: a neuron gains by each token that uses it, and loses by others (Hermes, IV-C).

residency = HotTable(units=4096, rows=800)     # what a token needs is loaded, and the coldest goes
change = swap(state, hot, threshold=10, moves=20)   # between tokens: hot neurons of the DIMMs against the GPU's
"""

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from toolkit.errors import UserError
from toolkit.kernels.common.tally import pick, tally
from toolkit.kernels.states import HIGHEST
from toolkit.policies.residency import Change, Residency
from toolkit.predictors.token_state import TokenState


class HotTable(Residency):
    """Memory stays full, and units of the lowest state go first; of equal ones the first goes."""

    def clear(self) -> None:
        """Hold nothing; all states are 0."""
        super().clear()
        self.table = TokenState(self.units, hidden=0)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.table.observe(needed)

    def _order(self) -> UInt8[np.ndarray, " units"]:
        return self.table.states


def swap(state: UInt8[np.ndarray, " neurons"], hot: Bool[np.ndarray, " neurons"], threshold: int, moves: int) -> Change:
    """The online adjustment: neurons above `threshold` that are not on the GPU replace the coldest ones there.

    The hottest goes first, for the coldest, as long as it is the hotter one; at most `moves` of them.

    Args:
        state: of each neuron, 0 to 15.
        hot: the neurons on the GPU.
        threshold: a neuron with more is hot.
        moves: how many are copied while the GPU computes something else.

    Returns what leaves the GPU and what comes, as many. `hot` stays as it is. Raises `UserError` for numbers that
    cannot be.
    """
    if len(state) != len(hot) or state.max(initial=0) > HIGHEST:
        raise UserError(f"{len(state)} states up to {state.max(initial=0)}: expected {len(hot)} from 0 to {HIGHEST}")
    if not 0 <= threshold <= HIGHEST or moves < 0:
        raise UserError(f"threshold {threshold}, moves {moves}: expected 0 to {HIGHEST}, and 0 or more")
    counts = tally(hot, state, 2, HIGHEST + 1)
    quota = np.zeros_like(counts)
    coming, leaving = counts[0].tolist(), counts[1].tolist()
    high, low = HIGHEST, 0
    while moves and high > max(threshold, low):
        count = min(coming[high], leaving[low], moves)
        quota[0, high] += count
        quota[1, low] += count
        coming[high], leaving[low], moves = coming[high] - count, leaving[low] - count, moves - count
        high, low = high - (not coming[high]), low + (not leaving[low])
    moved = pick(hot, state, quota)
    return Change(moved[hot[moved]], moved[~hot[moved]])
