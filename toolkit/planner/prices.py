"""The price of a way in quality: a model's perplexity with it over that without it.

    price_of(open_target("llama2-70b"), way)                   # of qwen2.5-coder-1.5b, and says so
    price_of(open_target("smollm2-135m"), way, measure=True)   # measured now, and kept

A measurement of the model itself on this machine comes first, then its price in the kept results. The price of another
model, the embedded one of the nearest size, is a guess, and says so. A price with a packed head stands in for one
without, which is not higher. `python -m toolkit.planner.prices` writes `data/quality/prices.csv` from the tables of
`results/reference`, a row for each measurement of a perplexity. Columns: model, treatment
(`toolkit.planner.treatments`), bits (a weight of the decoder linears; NaN if the source does not say), perplexity,
dense_perplexity (of the same text and windows), ratio_error (standard error of the logarithm of their ratio, window by
window), corpus, sequence_length, windows, source (notebook), machine.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import exp, isnan, log, log2, nan
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError, run_command
from toolkit.files import make_folder, replacing
from toolkit.models import MODELS
from toolkit.papers.corm.routing import RoutedModel
from toolkit.planner.ranges import make_ranges, ranges_file
from toolkit.planner.target import Target
from toolkit.planner.treatments import EXACT, EXPERTS, FEW_BITS, VARIANTS, measured
from toolkit.planner.ways import NEURONS, RIVAL, PlannedWay
from toolkit.records import line
from toolkit.studies.forms import HEAD_TOO
from toolkit.studies.quality import EvaluationSettings
from toolkit.studies.variants import SECOND_PERPLEXITY

READS = ("data/quality/prices.csv",)
DIGITS = "%.7g"
COLUMNS = (
    *("model", "treatment", "bits", "perplexity", "dense_perplexity", "ratio_error"),
    *("corpus", "sequence_length", "windows", "source", "machine"),
)
TEXT, SEQUENCE_LENGTH, WINDOWS = "wiki-slice", 512, 2  # of a measurement here
UNDER_A_LIMIT = {  # names of `beyond/real_model`: treatments
    "int8": f"int8{HEAD_TOO}",
    "Endor, 50 %": "sparsegpt 0.5",
    "Endor, 50 %, int8": f"sparsegpt 0.5 int8{HEAD_TOO}",
    "SpQR": f"spqr{HEAD_TOO}",
    "neurons, 80 %": "few_bits 0.8",
    "llama.cpp Q8_0": "gguf Q8_0",
}
FORMER = {"smollm2-135m-moe-split": "smollm2-135m"}  # models of kept tables that are gone, and one of their size
SAME_BITS = 0.1  # share by which the bits of a measurement may differ from those of the way

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quality:
    """The price of a way.

    `ratio` is perplexity over that of the model as it is published, NaN if nobody has measured it; `low` and `high` are
    the range over machines, with the standard error window by window where that is known. `model` is the measured
    model, or the reason why its measurement does not count. `bits`: per decoder weight of the measured model, if known.
    `guess`: the price is that of another model.
    """

    ratio: float
    low: float
    high: float
    model: str
    bits: float | None = None
    guess: bool = False


def price_of(target: Target, way: PlannedWay, text: str = TEXT, measure: bool = False) -> Quality:
    """The price of a way, measured at about as many bits a weight.

    With `measure` it is measured now, on a few windows of the corpus `text`; if that is impossible, a warning says why.
    llama.cpp stores rows whose length is no multiple of 256 in larger types, so a small model may have more bits.
    """
    if way.treatment in EXACT or (way.kind == NEURONS and target.own_thresholds):  # a sparse model has these zeros
        return Quality(1.0, 1.0, 1.0, target.name)
    found = _measured_here(target, way, text, measure) if target.loadable else None
    found = found or _in_kept_results(target.name, sum(target.shape.parameters.values()), way.treatment)
    if way.kind == RIVAL and found.bits and abs(found.bits / way.bits - 1) > SAME_BITS:
        return Quality(nan, nan, nan, f"– ({found.model}: {found.bits:.1f} bits)")
    return found


def _measured_here(target: Target, way: PlannedWay, text: str, measure: bool) -> Quality | None:
    try:
        settings = EvaluationSettings(target.name, text, SEQUENCE_LENGTH, WINDOWS)
        table = measured(target.name, way.treatment, settings, make=measure)
    except UserError as error:
        logger.warning("%s: quality with %s is not measured: %s", target.name, way.treatment, line(error))
        return None
    if table is None:
        return None
    difference, error = table.fillna(0).iloc[0]
    ratio = exp(difference)
    return Quality(ratio, ratio * exp(-error), ratio * exp(error), target.name)


@cache  # the same for all machines of a map; looking it up takes 6 ms
def _in_kept_results(target: str, weights: int, treatment: str) -> Quality:
    """The price in the source with most text, of this model or of the one nearest in size.

    It is the median of the ratios of all machines; the range has the least and the largest, their errors included.
    """
    prices, least = load_prices(), treatment.removesuffix(HEAD_TOO)
    with_head, without = (prices[prices["treatment"] == name] for name in (least + HEAD_TOO, least))
    prices = with_head
    if treatment == least:
        prices = pd.concat([without, with_head[~with_head["model"].isin(without["model"])]])
    elif target in set(without["model"]) - set(with_head["model"]):
        prices = prices[:0]  # the model's own price without the head may be higher than another model's with it
    if prices.empty:
        return Quality(nan, nan, nan, "")
    by_distance = {name: abs(log2(MODELS[FORMER.get(name, name)].weights / weights)) for name in prices["model"]}
    model = target if target in by_distance else min(by_distance, key=by_distance.__getitem__)
    texts = prices[prices["model"] == model].groupby(["source", "corpus", "sequence_length", "windows"])
    rows = max((rows for _, rows in texts), key=_weight)
    ratios, errors = rows["perplexity"] / rows["dense_perplexity"], rows["ratio_error"].fillna(0).map(exp)
    low, high, bits = (ratios / errors).min(), (ratios * errors).max(), rows["bits"].median()
    guess = model != target
    return Quality(float(ratios.median()), float(low), float(high), model, None if isnan(bits) else float(bits), guess)


def _weight(rows: pd.DataFrame) -> tuple[int, int]:
    """Tokens that were evaluated, and measurements with an error."""
    tokens = (rows["sequence_length"] * rows["windows"]).iloc[0]
    return int(tokens), int(rows["ratio_error"].notna().sum())


def prices_file() -> Path:
    """Where the prices are."""
    return paths.root() / "data" / "quality" / "prices.csv"


@cache  # a plan asks for the price of each way
def load_prices() -> pd.DataFrame:
    """The measured prices."""
    return pd.read_csv(prices_file())


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
    table = table[table["metric"].isin(["perplexity", SECOND_PERPLEXITY])]
    dense = table[(table["method"] == "dense") & (table["form"] == "fp16")].set_index("model")["value"]
    for row in table.itertuples():
        method = "dense" if row.method == row.form else row.method
        name = names.get((row.form, method, row.sparsity, row.pattern))
        if name:
            text = (row.corpus, int(row.sequence_length), int(row.items))
            error = getattr(row, "difference_error", None)
            yield _row(row.model, name, row.value, dense[row.model], text, error) | {"bits": row.bits_per_weight}


def _of_zeros(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in a table of `toolkit.papers.beyond.sparse_curve`, of the first of its models."""
    if "model" in table:  # kept tables of one model alone lack it
        table = table[table["model"].eq(parameters["model"])]
    if "part" in table:  # other sections have parts of their own
        table = table[table["part"].isna()]
    dense = table.loc[table["family"] == "dense", "perplexity"].item()
    text = (parameters["corpus"], parameters["sequence_length"], parameters["evaluation_windows"])
    rows = table.set_index(["family", "asked"])["perplexity"]
    for name, zeros in FEW_BITS.items():
        if (zeros.way, zeros.share) in rows.index:
            yield _row(parameters["model"], name, rows[zeros.way, zeros.share], dense, text)


def _of_experts(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in a table with that of `toolkit.papers.corm.expert_quality`."""
    rows = table.dropna(subset="perplexity").set_index("variant")
    text = (RoutedModel().corpus, parameters["sequence_length"], parameters["evaluation_windows"])
    for name, rounded in EXPERTS.items():
        variant = f"{rounded.bits} bits, attention in {rounded.attention}"
        if variant in rows.index:
            row = rows.loc[variant]
            dense = row["perplexity"] / row["relative"]
            yield _row(row["model"], name, row["perplexity"], dense, text, row["difference_error"])


def _of_limits(table: pd.DataFrame, parameters: dict) -> Iterator[dict]:
    """The prices in the table of `beyond/real_model`. The file that the model came as is left out: it is the model."""
    rows = table.drop_duplicates("way").set_index("way")
    text = (parameters["corpus"], parameters["sequence_length"], parameters["evaluation_windows"])
    for way, name in UNDER_A_LIMIT.items():
        if way in rows.index:
            row = rows.loc[way]
            error = log(row["relative_high"] / row["relative"]) if "relative_high" in row else None
            yield _row(parameters["model"], name, row["perplexity"], row["perplexity"] / row["relative"], text, error)


SOURCES: dict[str, Callable[[pd.DataFrame, dict], Iterator[dict]]] = {
    "beyond/bytes_quality": _of_variants,
    "beyond/real_model": _of_limits,
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


def write(folder: Path | None = None) -> list[Path]:
    """Write the prices, and beside them the ranges of speeds, of all kept results. Raises `UserError` without any."""
    from toolkit.evidence.reference import reference_dir

    kept = reference_dir()
    tables = {prices_file(): make_prices(kept), ranges_file(): make_ranges(kept)}
    for file, table in tables.items():
        if table.empty:
            raise UserError(f"nothing for {file.name} in {kept}: keep the results of a sweep first")
    files = {(folder or file.parent) / file.name: table for file, table in tables.items()}
    for file, table in files.items():
        make_folder(file.parent)
        with replacing(file) as temporary:
            table.to_csv(temporary, index=False, float_format=DIGITS)
    return list(files)


def main() -> int:
    """Write both files and print where; exit status 2 without kept results."""
    return run_command(lambda: print(*write(), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
