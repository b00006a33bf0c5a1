"""The dictionary of columns holds every table that is kept."""

import re

import pandas as pd
import pytest

from toolkit.evidence.columns import SECONDS, column, dictionary, unknown_columns
from toolkit.evidence.reference import reference_dir

TABLES = sorted(reference_dir().glob("**/table.csv"))
SUFFIXES = {"gb_s": "GB/s", "_ops_s": "ops/s", "_per_s": "tokens/s", "_ms": "ms", "_us": "µs", "_ns": "ns", "_s": "s"}
SUFFIXES |= {"_mb": "MB", "_gb": "GB", "_kib": "KiB", "_percent": "percent", "_bytes": "bytes"}


@pytest.mark.parametrize("file", TABLES, ids=lambda file: "/".join(file.parts[-4:-1]))
def test_every_column_of_a_kept_table_has_a_unit_and_a_meaning(file):
    table = pd.read_csv(file, low_memory=False)
    assert unknown_columns(table) == []
    notebook = "/".join(file.relative_to(reference_dir()).parts[1:-1])
    texts = [name for name in table if table[name].dtype == object or pd.api.types.is_string_dtype(table[name])]
    named = {name: column(name, notebook) for name in texts if table[name].notna().any()}
    numbers = [name for name, known in named.items() if known.unit not in ("text", "flag") and name != "predicted"]
    assert numbers == []  # what is said to be a number is one


def test_a_name_that_ends_in_a_unit_has_it():
    for entry in dictionary():
        end = next((unit for end, unit in SUFFIXES.items() if entry["column"].endswith(end)), None)
        assert end in (None, entry["unit"]), entry["column"]
        assert re.search(r"[a-z]", entry["meaning"])


def test_a_statistic_is_of_a_time():
    for entry in dictionary():
        known = column(entry["column"], entry["notebook"] or None)
        assert (known.quantity is None) == (known.statistic is None)
        assert known.quantity is None or known.unit in SECONDS


def test_a_column_may_mean_something_else_in_one_notebook():
    assert column("most", "flash/tab06").unit == "count"
    assert column("most").unit == "share"
    assert column("nothing of this name") is None
