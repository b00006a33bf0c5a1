import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.stage_tables import (
    beside_dense,
    error_words,
    model_error,
    relative_to,
    rows_beside_measured,
    way_names,
)

# op, method, path, stage, seconds, nbytes, gb_s
ROWS = [
    ("fc1", "dense", "host", "read", 4.0, 8, 2.0),
    ("fc1", "endor", "host", "read", 2.0, 4, 2.0),
    ("fc1", "endor", "direct", "read", 1.0, 4, 4.0),
    ("fc1", "endor", "host", "decode", 0.5, 8, 16.0),
    ("fc2", "dense", "host", "read", 8.0, 16, 2.0),
    ("fc2", "endor", "host", "read", 2.0, 8, 4.0),
]
TABLE = pd.DataFrame(ROWS, columns=["op", "method", "path", "stage", "seconds", "nbytes", "gb_s"])
TABLE = TABLE.assign(share_percent=50.0, evidence="measured")


def test_beside_dense_by_hand():
    table = beside_dense(TABLE)
    assert table["speedup"].fillna(-1).tolist() == [1, 2, 4, -1, 1, 4]
    assert table["time_over_dense"].fillna(-1).tolist() == [1, 0.5, 0.25, -1, 1, 0.25]
    assert table["bytes_over_dense"].fillna(-1).tolist() == [1, 0.5, 0.5, -1, 1, 0.5]
    assert table["bandwidth_over_dense"].fillna(-1).tolist() == [1, 1, 2, -1, 1, 2]


def test_what_was_modelled_is_set_beside_what_was_measured():
    modelled = TABLE.assign(evidence="modelled", seconds=TABLE["seconds"] * [1.1, 0.9, 1, 2, 1, 1])
    ratio = relative_to(pd.concat([TABLE, modelled], ignore_index=True), "seconds", evidence="measured")
    assert ratio.tolist() == pytest.approx([1] * 6 + [1.1, 0.9, 1, 2, 1, 1])


def test_reads_modelled_for_this_machine_are_set_beside_those_that_it_measured():
    """Not those of another machine, those that it did not measure, or rows without a name."""
    rows = [("measured", "a", 4.0), ("modelled", "a", 5.0), ("modelled", "b", 1.0)]
    rows += [("measured", None, 2.0), ("modelled", None, 2.0)]
    mine = pd.DataFrame(rows, columns=["evidence", "way", "io_ms"]).assign(profile="this-machine")
    table = pd.concat([mine, mine.assign(profile="paper", evidence="modelled")], ignore_index=True)
    ratio = rows_beside_measured(table, "io_ms", "way")["modelled_over_measured"]
    assert ratio.dropna().to_dict() == {1: 1.25}
    assert len(ratio) == 10


def test_rows_that_labels_do_not_tell_apart_are_refused():
    with pytest.raises(UserError, match=r"two rows .*'op': 'fc2', 'method': 'endor', 'path': 'host'"):
        relative_to(pd.concat([TABLE, TABLE.tail(1)]), "seconds", op="fc1")


def test_ways_are_named_by_labels_method_path_and_policy():
    assert way_names(TABLE).tolist() == ["dense", "endor", "endor, direct", "endor", "dense", "endor"]
    ahead = TABLE.assign(policy=["sequential"] * 2 + ["pipelined"] * 4)
    assert way_names(ahead).tolist()[1:4] == ["endor", "endor, direct, pipelined", "endor, pipelined"]
    assert way_names(TABLE, "op", "stage").tolist()[2:5] == [
        "fc1, read, endor, direct",
        "fc1, decode, endor",
        "fc2, read, dense",
    ]


def test_a_speed_up_has_the_range_of_its_repetitions():
    """Dense takes 8 to 12 s, packed 4 to 6: 8 / 6 = 1.33 to 12 / 4 = 3 times faster."""
    table = pd.DataFrame({"method": ["dense", "endor"], "path": "host", "stage": "total", "seconds": [10.0, 5.0]})
    table = table.assign(nbytes=1, gb_s=1.0, seconds_low=[8.0, 4.0], seconds_high=[12.0, 6.0])
    packed = beside_dense(table).iloc[1]
    assert (packed["speedup_low"], packed["speedup"], packed["speedup_high"]) == pytest.approx((8 / 6, 2, 3))
    assert (packed["time_over_dense_low"], packed["time_over_dense_high"]) == pytest.approx((1 / 3, 0.75))


def test_the_models_error_is_the_median_and_the_largest_over_stages_and_over_totals():
    rows = [("read", 1.1), ("decode", 0.7), ("compute", 1.2), ("transfer", 9.0), ("total", 0.95), ("total", None)]
    error = model_error(pd.DataFrame(rows, columns=["stage", "modelled_over_measured"]))
    largest = {"stages_largest": 0.3, "totals_largest": 0.05}
    assert error.to_dict() == pytest.approx({"stages": 0.2, "totals": 0.05} | largest)
    words = "stages by 20% (median; 30% at most) and totals by 5% (5% at most)"
    assert error_words(pd.DataFrame(rows, columns=["stage", "modelled_over_measured"])) == words
