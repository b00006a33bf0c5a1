"""The cost of treatments for the embedded models, out of kept results: `python -m toolkit.planner.prices`.

It writes `data/quality/prices.csv` from the tables of `results/reference`, a row for each measurement of a perplexity.
Columns: model, treatment (`toolkit.planner.treatments`), bits (a weight of the decoder linears; NaN if the source does
not say), perplexity, dense_perplexity (of the same text and windows), ratio_error (standard error of the logarithm of
their ratio, window by window), corpus, sequence_length, windows, source (notebook), machine.
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
from toolkit.planner.treatments import EXPERTS, FEW_BITS, VARIANTS
from toolkit.studies.routing import RoutedModel

READS = ("data/quality/prices.csv",)
DIGITS = "%.7g"
COLUMNS = (
    *("model", "treatment", "bits", "perplexity", "dense_perplexity", "ratio_error"),
    *("corpus", "sequence_length", "windows", "source", "machine"),
)


def prices_file() -> Path:
    """Where the prices are."""
    return paths.root() / "data" / "quality" / "prices.csv"


@cache  # a plan asks for the price of each way
def load_prices() -> pd.DataFrame:
    """The measured prices. Raises `UserError` if they are not there."""
    file = prices_file()
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; write it with `python -m toolkit.planner.prices`")
    return pd.read_csv(file)


def make_prices(folder: Path) -> pd.DataFrame:
    """The prices in the kept results of a folder, which has one folder a machine. The table is empty without any."""
    rows = []
    for meta in sorted(folder.glob("*/*/*/meta.json")):
        source = meta.parent.relative_to(meta.parents[2]).as_posix()
        if source in SOURCES:
            table = pd.read_csv(meta.with_name("table.csv"), low_memory=False)
            parameters = json.loads(meta.read_text(encoding="utf-8"))["parameters"]
            shared = {"source": source, "machine": meta.parents[2].name}
            rows += [row | shared for row in SOURCES[source](table, parameters)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.sort_values(["model", "treatment", "source", "machine"], ignore_index=True)


def _of_variants(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in a table of `toolkit.studies.variants`."""
    names = {(v.form, v.method, v.sparsity, v.zeros_pattern): name for name, v in VARIANTS.items()}
    table = table[table["metric"] == "perplexity"]
    dense = table[(table["method"] == "dense") & (table["form"] == "fp16")].set_index("model")["value"]
    for row in table.itertuples():
        method = "dense" if row.method == row.form else row.method
        name = names.get((row.form, method, row.sparsity, row.pattern))
        if name:
            text = (row.corpus, int(row.sequence_length), int(row.items))
            error = getattr(row, "difference_error", None)
            yield _row(row.model, name, row.value, dense[row.model], text, error) | {"bits": row.bits_per_weight}


def _of_zeros(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in a table of `toolkit.studies.sparse_curve`."""
    dense = table.loc[table["family"] == "dense", "perplexity"].item()
    text = (parameters["corpus"], parameters["sequence_length"], parameters["evaluation_windows"])
    rows = table.set_index(["family", "asked"])["perplexity"]
    for name, zeros in FEW_BITS.items():
        if (zeros.way, zeros.share) in rows.index:
            yield _row(parameters["model"], name, rows[zeros.way, zeros.share], dense, text)


def _of_experts(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in a table with that of `toolkit.studies.expert_quality`."""
    rows = table.dropna(subset="perplexity").set_index("variant")
    text = (RoutedModel().corpus, parameters["sequence_length"], parameters["evaluation_windows"])
    for name, rounded in EXPERTS.items():
        variant = f"{rounded.bits} bits, attention in {rounded.attention}"
        if variant in rows.index:
            row = rows.loc[variant]
            dense = row["perplexity"] / row["relative"]
            yield _row(row["model"], name, row["perplexity"], dense, text, row["difference_error"])


SOURCES: dict[str, Callable[[pd.DataFrame, dict], Iterator[dict]]] = {
    "beyond/bytes_quality": _of_variants,
    "beyond/sparse_curve": _of_zeros,
    "corm/tab01": _of_experts,
    "endor/tab_perplexity": _of_variants,
    "spqr/tab_perplexity": _of_variants,
}


def _row(
    model: str,
    treatment: str,
    perplexity: float,
    dense: float,
    text: tuple[str, int, int],
    error: float | None = None,
) -> dict:
    """`text` is corpus, sequence length and windows."""
    about = {"model": model, "treatment": treatment, "perplexity": perplexity, "dense_perplexity": dense}
    return about | {"ratio_error": error} | dict(zip(("corpus", "sequence_length", "windows"), text, strict=True))


def write_prices(file: Path | None = None) -> Path:
    """Write the prices of all kept results. Raises `UserError` if there are none."""
    from toolkit.evidence.reference import reference_dir

    table = make_prices(reference_dir())
    if table.empty:
        raise UserError(f"no measured perplexities in {reference_dir()}: keep the results of a sweep first")
    file = file or prices_file()
    make_folder(file.parent)
    with replacing(file) as temporary:
        table.to_csv(temporary, index=False, float_format=DIGITS)
    return file


def main() -> int:
    """Write the prices and print where; exit status 2 without kept results."""
    return run_command(lambda: print(write_prices()))


if __name__ == "__main__":
    sys.exit(main())
