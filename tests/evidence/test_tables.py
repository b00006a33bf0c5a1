"""Tables over all notebooks, by hand and from what is kept; the dictionary of columns holds every kept table."""

import itertools
import json
import re

import pandas as pd
import pytest

from toolkit import paths
from toolkit.evidence.columns import FILE, SECONDS, column, dictionary
from toolkit.evidence.reference import reference_dir
from toolkit.evidence.tables import COLUMNS, combined_tables

META = {"cpu": "A CPU", "memory_gb": 8, "git": "0123456789abcdef", "finished": "2026-01-02T03:04:05Z"}


@pytest.fixture
def save(tmp_path):
    """`save(id, table, **parameters)` leaves a table as a notebook does."""

    def write(id: str, table: pd.DataFrame, **parameters: object) -> None:
        folder = tmp_path / id
        folder.mkdir(parents=True)
        table.to_csv(folder / "table.csv", index=False)
        (folder / "meta.json").write_text(json.dumps(META | {"id": id, "parameters": parameters}))

    return write


def test_times_are_in_seconds_with_the_statistic_beside_them(save, tmp_path):
    stages = {"stage": ["read", "total"], "seconds": [1.0, 2.0], "seconds_low": [0.5, None], "evidence": "modelled"}
    save("endor/fig02", pd.DataFrame(stages | {"profile": "paper", "model": "opt", "method": "dense"}))
    ours = {"way": ["all", "naive"], "total_ms": [250.0, 500.0], "total_ms_low": 200.0, "io_ms": [100.0, None]}
    save("flash/tab02", pd.DataFrame(ours | {"profile": "this-machine", "evidence": "measured", "layers": [1, 3]}))
    found = combined_tables(tmp_path)["latency"]
    assert found.columns.tolist() == COLUMNS
    numbers = found[["notebook", "quantity", "statistic", "value", "method", "settings", "machine"]]
    cpu = "A CPU, 8 GB of memory, no GPU"
    assert numbers.to_numpy().tolist() == [
        ["endor/fig02", "read", "value", 1.0, "dense", "", "paper"],
        ["endor/fig02", "total", "value", 2.0, "dense", "", "paper"],
        ["endor/fig02", "read", "low", 0.5, "dense", "", "paper"],
        ["flash/tab02", "total", "median", 0.25, "all", "layers=1", cpu],
        ["flash/tab02", "total", "median", 0.5, "naive", "layers=3", cpu],
        ["flash/tab02", "total", "low", 0.2, "all", "layers=1", cpu],
        ["flash/tab02", "total", "low", 0.2, "naive", "layers=3", cpu],
        ["flash/tab02", "read", "median", 0.1, "all", "layers=1", cpu],
    ]
    assert set(found["unit"]) == {"s"}
    assert set(found["commit"]) == {"0123456789"}


def test_perplexity_and_accuracy_have_their_errors_and_name_their_text(save, tmp_path):
    rows = {"metric": ["perplexity", "a task"], "value": [20.0, 0.75], "standard_error": [1.0, 0.05]}
    rows |= {"chance": [None, 0.5], "method": "wanda", "evidence": "measured"}
    save("endor/tab_perplexity", pd.DataFrame(rows), corpus="a text", sequence_length=512, model="tiny")
    found = combined_tables(tmp_path)
    perplexity = found["perplexity"].set_index("statistic")
    assert perplexity["value"].to_dict() == {"value": 20.0, "standard error": 1.0}
    assert set(perplexity["settings"]) == {"corpus=a text; sequence_length=512"}
    assert set(perplexity["model"]) == {"tiny"}
    accuracy = found["accuracy"].set_index("statistic")
    assert accuracy["value"].to_dict() == {"value": 0.75, "chance": 0.5, "standard error": 0.05}
    assert set(accuracy["quantity"]) == {"a task"}
    assert found["latency"].empty


@pytest.mark.parametrize("machine", sorted(path.name for path in reference_dir().iterdir() if path.is_dir()))
def test_what_is_kept_gives_one_number_a_row(machine):
    for name, table in combined_tables(reference_dir() / machine).items():
        labels = [column for column in COLUMNS if column != "value"]
        twice = table[table.duplicated(labels, keep=False) & table["evidence"].ne("published")]
        assert twice["notebook"].unique().tolist() == [], name
        assert table["value"].notna().all()
        assert table[["notebook", "quantity", "statistic", "unit", "evidence", "cpu", "commit"]].notna().all(axis=None)


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
        assert [name for name in table if column(name) is None] == [], file
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


def test_the_ends_of_a_range_need_no_entry_and_no_column_stands_twice():
    low = column("io_ms_low")
    assert (low.meaning.split(":")[0], low.unit, low.statistic) == ("the lower end of io_ms", "ms", "low")
    assert column("limit_mb_low", "beyond/real_model").key
    lines = re.findall(r"^  (.+?):", (paths.root() / FILE).read_text(encoding="utf-8"), re.MULTILINE)
    pairs = [(names.split(", "), ids.split(", ")) for names, _, ids in (line.partition(" in ") for line in lines)]
    assert sorted(place for pair in pairs for place in itertools.product(*pair)) == sorted(dictionary())
