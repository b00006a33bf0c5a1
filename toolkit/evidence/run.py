"""The results of a notebook: a tidy table, figures and the circumstances that made them.

run = Run("endor/fig04", globals())
...
run.evidence(table, "ENDOR takes 56 % of the dense bytes.", figures={"sizes": figure}, evidence="measured")
"""

import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from toolkit import paths
from toolkit.downloads import DOWNLOADS
from toolkit.errors import UserError, unknown
from toolkit.evidence.catalogue import find
from toolkit.evidence.columns import FILE as DICTIONARY
from toolkit.evidence.columns import column
from toolkit.evidence.comparison import compare, verdict_table
from toolkit.evidence.figures import note_disturbance, save_figure, use_style
from toolkit.evidence.meta import HEADLINES, MOST_BARS
from toolkit.evidence.page import three_digits
from toolkit.evidence.schema import check_parameters
from toolkit.evidence.scores import count_verdicts, score, score_sentence
from toolkit.evidence.stage_tables import rows_beside_measured
from toolkit.extras import extra
from toolkit.files import make_folder, write_csv, write_json
from toolkit.machines.provenance import provenance
from toolkit.measure.disturbance import count_disturbed, disturbance_words, load_between, read_counters, starred

with extra("lab"):
    from matplotlib.figure import Figure

EVIDENCE = ("measured", "modelled", "published")
ROUNDING = 1e-9  # by which a value may leave its range
STAGING = "TOOLKIT_STAGING_DIR"  # the sweep says by this variable where a notebook's results go


class Run:
    """One execution of a notebook, from its parameters to its results.

    `namespace` is the notebook's `globals()`: the values of the names that its `parameters` cell assigns are
    recorded, with a figure's own in the place of None, and `seed`, where it is among them, seeds Python, NumPy and
    torch. Figures get the toolkit's style.
    Under the sweep, results go to a staging folder, which becomes `results/<identifier>/` once all is written. Results
    of any other run, in JupyterLab say, go to `results/lab/<identifier>/`: the report never mixes the two.
    Raises `UserError` for a parameter that is missing, or has a value that it may not take.
    """

    def __init__(self, identifier: str, namespace: Mapping[str, object]):
        notebook = find(identifier)
        defaults = notebook.parameters
        if absent := [name for name in defaults if name not in namespace]:
            raise UserError(
                f"{identifier}: no value for {absent[0]}: run the cell tagged `parameters`, which assigns it"
            )
        self.identifier = identifier
        given = {name: namespace[name] for name in defaults}
        self.parameters = defaults | {name: value for name, value in given.items() if value is not None}
        check_parameters(notebook, self.parameters)
        self.started, self.counters = time.time(), read_counters()
        if "seed" in self.parameters:
            seed_everything(self.parameters["seed"])
        use_style()
        pd.set_option("display.max_colwidth", None)  # reasons stand in tables whole
        pd.set_option("display.float_format", three_digits)

    @property
    def folder(self) -> Path:
        """Where this run's results go."""
        return Path(os.environ[STAGING]) if self.in_sweep else paths.lab_dir() / self.identifier

    @property
    def in_sweep(self) -> bool:
        """Whether the sweep runs this notebook."""
        return bool(os.environ.get(STAGING))

    def compare(self, table: pd.DataFrame, null: pd.DataFrame | None = None) -> pd.DataFrame:
        """The paper's numbers of this notebook beside those of the table: `toolkit.evidence.comparison.compare`."""
        return compare(table, self.identifier, null)

    def evidence(
        self,
        table: pd.DataFrame,
        seen: str,
        *,
        figures: Mapping[str, Figure] = MappingProxyType({}),
        evidence: str | None = None,
        beside_measured: Sequence[str] = (),
        comparison: pd.DataFrame | None = None,
        card: tuple[str, Mapping[str, float]] | None = None,
        headline: Mapping[str, str] = MappingProxyType({}),
    ) -> pd.DataFrame | None:
        """Compare with the paper, save everything, print the score and what was seen; the last call of a notebook.

        Args:
            table: the results, a row a number or a way. Every row says its evidence.
            seen: what the results say, in sentences that cite a few numbers. The report shows them as the answer.
            figures: by the name of their file; the report shows the first one on top of the notebook's page.
            evidence: of all rows, where `table` has no column of that name.
            beside_measured: of a table of reads, the number that was both modelled for this machine and measured on it,
                then the columns that name its rows; `rows_beside_measured` adds their ratio.
            comparison: of `compare`, where a figure or sentence needed it before. Without it,
                the whole table is compared; if the paper prints no number of the figure, there is no comparison.
            card: a caption and the numbers that the report's index draws, see `Meta`; without it, the measured totals
                of a table of latencies, or the first figure.
            headline: what the results say of a whole system: sentences by `gain`, `cost` and `negative`, and under
                `system` the system's id if it is another than the notebook's paper.

        Returns the verdicts as a table to look at, for the cell to show; None without a comparison. Raises
        `UserError` for an empty table, an unknown kind of evidence, a value outside its own range, or an unknown key of
        the headline.
        """
        table = table if evidence is None else table.assign(evidence=evidence)
        table = rows_beside_measured(table, *beside_measured) if beside_measured else table
        _check(table, self.identifier)
        if stray := set(headline) - {*HEADLINES, "system"}:
            raise unknown("key of the headline", min(stray), (*HEADLINES, "system"))
        count, known = count_disturbed(table)
        if count:
            words = disturbance_words(count, known)
            seen = f"{seen} {words.capitalize()}."
            headline = {key: text if key == "system" else f"{text} ({words})" for key, text in headline.items()}
        if comparison is None:
            comparison = self.compare(table)
            comparison = comparison if len(comparison) else None
        caption, numbers = card or latency_card(table) or ("", {})
        bars = {str(label): float(value) for label, value in numbers.items() if value >= 0}
        said = {"card": {"caption": caption, "bars": bars} if bars else None, "headline": dict(headline), "seen": seen}
        self._write(table, figures, comparison, said)
        if comparison is not None:
            print(score_sentence(comparison))
        print(f"Seen: {seen}")
        return None if comparison is None else verdict_table(comparison)

    def _write(self, table, figures, comparison, said: dict) -> None:
        if not self.in_sweep:
            shutil.rmtree(self.folder, ignore_errors=True)  # no figure of an earlier run stays beside the new table
        make_folder(self.folder)
        for name, frame in {"table": table, "comparison": comparison}.items():
            if frame is not None:
                write_csv(self.folder / f"{name}.csv", frame)
        for name, figure in figures.items():
            note_disturbance(figure, table)
            save_figure(figure, self.folder / name)
        write_json(self.folder / "meta.json", self._meta(table, figures, comparison) | said)
        if nameless := [name for name in table if column(name) is None]:
            print(f"Without unit and meaning in {DICTIONARY}: {', '.join(nameless)}.")
        if not self.in_sweep:
            print(f"Saved to {self.folder}; the report shows what ./papermill_runs.sh --only {self.identifier} makes.")

    def _meta(self, table, figures, comparison) -> dict:
        return {
            "schema": paths.RESULTS_SCHEMA,
            "id": self.identifier,
            "parameters": self.parameters,
            "inputs": _inputs(self.parameters),
            "evidence": sorted(table["evidence"].unique()),
            "figures": list(figures),
            "verdicts": {} if comparison is None else count_verdicts(comparison),
            "score": {} if comparison is None else score(comparison),
            "disturbed": dict(zip(("rows", "of"), count_disturbed(table), strict=True)),
            "load": self._load(),
            "wall_s": round(time.time() - self.started, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **provenance(),
        }

    def _load(self) -> dict[str, float]:
        """The cores that others kept busy and that were stolen while it ran; the 1-minute load average."""
        load = load_between(self.counters, read_counters())
        cores = {"others_cores": round(load.others_cores, 3), "stolen_cores": round(load.stolen_cores, 3)}
        return cores | {"load_average": round(os.getloadavg()[0], 2)}


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries that we call still use it)
    torch.manual_seed(seed)


def _inputs(parameters: Mapping[str, object]) -> dict[str, str]:
    """Checksums of the embedded models and text that the parameters name."""
    named = {parameters.get(kind) for kind in ("model", "second_model", "corpus")}
    return {name: f"sha256:{DOWNLOADS[name].sha256}" for name in sorted(named & DOWNLOADS.keys())}


def latency_card(table: pd.DataFrame) -> tuple[str, dict[str, float]] | None:
    """A caption and the measured totals of this machine, a bar a way of running; None for fewer than two.

    In a table with several models or maps of layers, the first one's numbers. `table` holds rows of `Timeline.stages()`
    with the column `way`.
    """
    if not {"stage", "evidence", "seconds", "way", "model"} <= set(table):
        return None
    totals = table[table["stage"].eq("total") & table["evidence"].eq("measured")]
    for name in ("model", "mapping"):
        if name in totals and len(totals):
            totals = totals[totals[name].eq(totals[name].iloc[0])]
    totals = totals[totals["way"].notna()].head(MOST_BARS)
    if len(totals) < 2:
        return None
    unit, factor = ("s", 1.0) if totals["seconds"].max() >= 1 else ("ms", 1e3)
    what, model = totals[["op", "model"]].iloc[0]
    labels, shared = _without_shared_start(starred(totals, "way").tolist())
    about = [
        f"{unit} a {what if what in ('layer', 'pass') else 'product'} of {model}",
        "measured",
        *(word for word in shared if word != model),
    ]
    return ", ".join(about), dict(zip(labels, (totals["seconds"] * factor).tolist(), strict=True))


def _without_shared_start(names: list[str]) -> tuple[list[str], list[str]]:
    """The names without the words that all of them begin with, and those words: `storage, dense`, `storage, endor`."""
    words, shared = [name.split(", ") for name in names], []
    while all(len(each) > 1 for each in words) and len({each[0] for each in words}) == 1:
        shared.append(words[0][0])
        words = [each[1:] for each in words]
    return [", ".join(each) for each in words], shared


def _check(table: pd.DataFrame, identifier: str) -> None:
    if table.empty:
        raise UserError(f"{identifier}: the table to save is empty")
    if "evidence" not in table:
        raise UserError(f"{identifier}: no column 'evidence'; pass evidence= one of {', '.join(EVIDENCE)}")
    if unknown := set(table["evidence"]) - set(EVIDENCE):
        raise UserError(f"{identifier}: evidence {sorted(map(str, unknown))}; expected one of {', '.join(EVIDENCE)}")
    if wrong := outside_ranges(table):
        raise UserError(
            f"{identifier}: values of {', '.join(wrong)} lie outside their own ranges; expected low <= value <= high: "
            "make all three from the same repetitions"
        )


def outside_ranges(table: pd.DataFrame) -> list[str]:
    """Columns with a value outside its own range: below <column>_low or above <column>_high.

    The range of `value` is low to high.
    """
    ranges = [
        (name.removesuffix("_low"), name, name.removesuffix("low") + "high") for name in table.columns.astype(str)
    ]
    ranges = [names for names in ranges if names[1].endswith("_low")]
    ranges += [("value", "low", "high")]
    wrong = []
    for value, low, high in ranges:
        if {value, low, high} <= set(table):
            slack = ROUNDING * table[value].abs()
            if ((table[value] < table[low] - slack) | (table[value] > table[high] + slack)).any():
                wrong.append(value)
    return wrong
