"""The dictionary of columns holds every table that is kept."""

import re

import pandas as pd

from toolkit.evidence.columns import SECONDS, column, dictionary, unknown_columns
from toolkit.evidence.reference import reference_dir

TABLES = sorted(reference_dir().glob("**/table.csv"))
UNITS = [
    *("text", "flag", "number", "index", "count", "share", "ratio", "percent", "perplexity", *SECONDS, "tokens"),
    *("tokens/s", "bits", "bytes", "KiB", "MB", "GB", "GB/s", "ops/s", "ops/byte"),
]
SUFFIXES = {"gb_s": "GB/s", "_ops_s": "ops/s", "_per_s": "tokens/s", "_ms": "ms", "_us": "µs", "_ns": "ns", "_s": "s"}
SUFFIXES |= {"_mb": "MB", "_gb": "GB", "_kib": "KiB", "_percent": "percent", "_bytes": "bytes"}


def test_every_column_of_a_kept_table_has_a_unit_and_a_meaning():
    assert TABLES
    for file in TABLES:
        table = pd.read_csv(file, low_memory=False)
        assert unknown_columns(table) == [], file
        notebook = "/".join(file.relative_to(reference_dir()).parts[1:-1])
        texts = [name for name in table if table[name].dtype == object or pd.api.types.is_string_dtype(table[name])]
        named = {name: column(name, notebook) for name in texts if table[name].notna().any()}
        numbers = [name for name, known in named.items() if known.unit not in ("text", "flag") and name != "predicted"]
        assert numbers == [], file  # text in a column whose unit is that of a number


def test_a_column_has_the_unit_that_its_name_ends_with_and_only_times_have_a_statistic():
    for (name, _), known in dictionary().items():
        end = next((unit for end, unit in SUFFIXES.items() if name.endswith(end)), None)
        assert known.unit in UNITS, name
        assert end in (None, known.unit), name
        assert re.search(r"[a-z]", known.meaning)
        assert known.statistic in (None, "median", "mean", "low", "high"), name
        assert (known.quantity is None) == (known.statistic is None)
        assert known.quantity is None or known.unit in SECONDS


def test_a_column_may_mean_something_else_in_one_notebook():
    assert column("most", "flash/tab06").unit == "count"
    assert column("most").unit == "share"
    assert column("nothing of this name") is None
