"""On how many sets of assumptions a paper's conclusion holds: one that holds on some only speaks of the assumptions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pandas as pd

Numbers = TypeVar("Numbers")


def count_sets(conclusions: Mapping[str, Callable[[Numbers], bool]], sets: Sequence[Numbers]) -> pd.DataFrame:
    """A row for each conclusion. Columns: conclusion, holds_on (so many of the sets), sets, evidence.

    Args:
        conclusions: whether each holds, by its words, given the modelled numbers of one set.
        sets: the modelled numbers of each set, such as a function from a way to its seconds.
    """
    rows = [(words, sum(map(holds, sets)), len(sets)) for words, holds in conclusions.items()]
    return pd.DataFrame(rows, columns=["conclusion", "holds_on", "sets"]).assign(evidence="modelled")
