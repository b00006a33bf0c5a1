"""Accuracy of mixtures that go on with what is foretold."""

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.studies import expert_accuracy
from toolkit.studies.expert_accuracy import CORM, IN_16_BITS, OWN, accuracy_table
from toolkit.studies.routing import RoutedModel


def test_variants_in_16_bits():
    assert set(IN_16_BITS) == {OWN, "foretold experts", "skipped neurons", CORM}
    with pytest.raises(UserError, match="unknown variant '4 bits'"):
        accuracy_table(RoutedModel(), ("4 bits",), ("local_agreement",))


def test_differences_by_hand(monkeypatch):
    values = {OWN: (0.8, 0.03), CORM: (0.7, 0.04)}

    def measured(_, variant, tasks, limit):
        value, error = values[variant]
        rows = {"task": tasks, "metric": "acc", "value": value, "standard_error": error, "chance": 0.5, "items": limit}
        return pd.DataFrame(rows).assign(variant=variant)

    monkeypatch.setattr(expert_accuracy, "_accuracy", measured)
    table = accuracy_table(RoutedModel("tiny"), (CORM,), ("a", "b"), 10).set_index(["variant", "task"])
    assert table.loc[(OWN, "b"), "accuracy_difference"] == 0
    assert table.loc[(CORM, "a"), "accuracy_difference"] == pytest.approx(-0.1)
    assert table.loc[(CORM, "a"), "accuracy_error"] == pytest.approx(0.05)
