"""What treatments cost the embedded models, out of kept results: `python -m toolkit.planner.curves`.

It writes `data/quality/curves.csv` from the tables of `results/reference`, a row for each measurement of a perplexity.
Columns: model, treatment, level (`toolkit.planner.treatments`), bits (a weight of the decoder linears; NaN if the
source does not say), perplexity, dense_perplexity (of the same text and windows), standard_error (of the perplexity),
ratio_error (standard error of the logarithm of their ratio, window by window), corpus, sequence_length, windows,
source (notebook), machine.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError, run_command
from toolkit.files import make_folder, replacing
from toolkit.planner.treatments import EXPERTS, ZEROS, treatment_of
from toolkit.studies.routing import RoutedModel

READS = ("data/quality/curves.csv",)
DIGITS = "%.7g"
COLUMNS = (
    *("model", "treatment", "level", "bits", "perplexity", "dense_perplexity", "standard_error", "ratio_error"),
    *("corpus", "sequence_length", "windows", "source", "machine"),
)


def curves_file() -> Path:
    """Where the curves are."""
    return paths.root() / "data" / "quality" / "curves.csv"


@cache  # a plan asks for the price of each way
def load_curves() -> pd.DataFrame:
    """The measured curves; levels are text. Raises `UserError` if they are not there."""
    file = curves_file()
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; write it with `python -m toolkit.planner.curves`")
    return pd.read_csv(file, dtype={"level": str})


def make_curves(folder: Path) -> pd.DataFrame:
    """The curves of the kept results in a folder, which has one folder a machine. The table is empty without any."""
    rows = []
    for meta in sorted(folder.glob("*/*/*/meta.json")):
        source = meta.parent.relative_to(meta.parents[2]).as_posix()
        if source in SOURCES:
            table = pd.read_csv(meta.with_name("table.csv"), low_memory=False)
            parameters = json.loads(meta.read_text(encoding="utf-8"))["parameters"]
            shared = {"source": source, "machine": meta.parents[2].name}
            rows += [row | shared for row in SOURCES[source](table, parameters)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.sort_values(["model", "treatment", "level", "source", "machine"], ignore_index=True)


def _variants(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """Of a table of `toolkit.studies.variants`."""
    table = table[table["metric"] == "perplexity"]
    dense = table[(table["method"] == "dense") & (table["form"] == "fp16")].set_index("model")["value"]
    for row in table.itertuples():
        found = treatment_of(row.form, row.method, row.sparsity, row.pattern)
        if found is not None:
            yield _named(row.model, found, row.value, dense[row.model], row.corpus, row.sequence_length, row.items) | {
                "bits": row.bits_per_weight,
                "standard_error": row.standard_error,
                "ratio_error": getattr(row, "difference_error", None),
            }


def _zeros(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """Of a table of `toolkit.studies.sparse_curve`."""
    model, dense = parameters["model"], table.loc[table["family"] == "dense", "perplexity"].item()
    text = (parameters["corpus"], parameters["sequence_length"], parameters["evaluation_windows"])
    for treatment, family in ZEROS.items():
        for row in table[table["family"] == family].itertuples():
            yield _named(model, (treatment, f"{row.asked:g}"), row.perplexity, dense, *text)


def _experts(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """Of a table with that of `toolkit.studies.expert_quality`."""
    table = table.dropna(subset="perplexity").set_index("variant")
    text = (RoutedModel().corpus, parameters["sequence_length"], parameters["evaluation_windows"])
    for found, variant in EXPERTS.items():
        if variant in table.index:
            row = table.loc[variant]
            dense = row["perplexity"] / row["relative"]
            yield _named(row["model"], found, row["perplexity"], dense, *text) | {
                "ratio_error": row["difference_error"]
            }


SOURCES: dict[str, Callable[[pd.DataFrame, dict], Iterator[dict]]] = {
    "beyond/bytes_quality": _variants,
    "beyond/sparse_curve": _zeros,
    "corm/tab01": _experts,
    "endor/tab_perplexity": _variants,
    "spqr/tab_perplexity": _variants,
}


def _named(
    model: str,
    treatment: tuple[str, str],
    perplexity: float,
    dense: float,
    corpus: str,
    sequence_length: float,
    windows: float,
) -> dict:
    return {
        "model": model,
        "treatment": treatment[0],
        "level": treatment[1],
        "perplexity": perplexity,
        "dense_perplexity": dense,
        "corpus": corpus,
        "sequence_length": int(sequence_length),
        "windows": int(windows),
    }


def write_curves(file: Path | None = None) -> Path:
    """Write the curves of all kept results. Raises `UserError` if there are none."""
    from toolkit.evidence.reference import reference_dir

    table = make_curves(reference_dir())
    if table.empty:
        raise UserError(f"no measured perplexities in {reference_dir()}: keep the results of a sweep first")
    file = file or curves_file()
    make_folder(file.parent)
    with replacing(file) as temporary:
        table.to_csv(temporary, index=False, float_format=DIGITS)
    return file


def main() -> int:
    """Write the curves and print where; exit status 2 without kept results."""
    return run_command(lambda: print(write_curves()))


if __name__ == "__main__":
    sys.exit(main())
