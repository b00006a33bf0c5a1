import numpy as np
import pytest

from tests.notebook_code import functions_of


def test_misses_by_hand(monkeypatch):
    """Units 0 and 1 take turns with 2 in four tokens; the last two count. With room for all, nothing is missed then."""
    active = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1]], dtype=bool)
    replay_table = functions_of("beyond/residency").replay_table
    monkeypatch.setitem(replay_table.__globals__, "window", 1)
    table = replay_table([active], [np.array([0.5, 0.5, 0.4])], [0.1, 0.7, 1])
    found = table.pivot(index="memory", columns="policy", values="missed")
    assert found.loc[0.1].equals(found.loc[0.7])  # a tenth holds no token's units: there is room for two
    assert found.loc[0.7].to_dict() == pytest.approx(
        {"window": 1, "lru": 2 / 3, "hot_table": 2 / 3, "static": 2 / 3, "belady": 2 / 3}
    )
    assert found.loc[1].to_dict() == {"window": 1, "lru": 0, "hot_table": 0, "static": 0, "belady": 0}
