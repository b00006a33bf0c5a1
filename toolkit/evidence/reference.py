"""Kept results and README's tables, made from them: `python -m toolkit.evidence.reference`."""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.claims import MET
from toolkit.formats import FORMATS
from toolkit.timeline.tables import model_error

BEGIN, END = "<!-- begin generated: python -m toolkit.evidence.reference -->", "<!-- end generated -->"
KEPT = ("table.csv", "comparison.csv", "meta.json", "*.png")


def save(machine: str) -> Path:
    """Copy the tables, figures and circumstances of every notebook's last results to `results/reference/<machine>/`.

    Raises `UserError` if there are none.
    """
    folder = reference_dir() / machine
    metas = {id: paths.results_dir() / id / "meta.json" for id in notebooks()}
    present = {id: meta for id, meta in metas.items() if meta.is_file()}
    if not present:
        raise UserError(f"no results in {paths.results_dir()}; run ./papermill_runs.sh first")
    for id, meta in present.items():
        shutil.rmtree(folder / id, ignore_errors=True)
        (folder / id).mkdir(parents=True)
        for file in (file for pattern in KEPT for file in meta.parent.glob(pattern)):
            shutil.copyfile(file, folder / id / file.name)
    return folder


def reference_dir() -> Path:
    """Where kept results are, one folder a machine."""
    return paths.root() / "results" / "reference"


def readme_tables(folder: Path) -> str:
    """README's results as Markdown, from one machine's kept results."""
    sizes, quality = _table(folder, "endor/fig04"), _table(folder, "endor/tab_perplexity")
    meta = json.loads((folder / "endor/tab_perplexity/meta.json").read_text())
    used = meta["parameters"]
    rows = json.loads((folder / "endor/fig04/meta.json").read_text())["parameters"]["twin_rows"]
    passed = json.loads((folder / "endor/tab_e2e/meta.json").read_text())["parameters"]
    relative = folder.relative_to(paths.root())
    return "\n".join(
        [
            f"Measured on {meta['cpu']} (no GPU), {meta['finished'][:10]}; all of it in `{relative}/`.",
            "",
            f"**What pruning costs** `{used['model']}` on `{used['corpus']}`: perplexity over "
            f"{used['evaluation_windows']} windows of {used['sequence_length']} tokens, "
            f"{used['calibration_windows']} calibration windows; accuracy on "
            f"{used['task_limit'] or 'all'} items a task (± standard error).",
            "",
            markdown(_quality(quality)),
            "",
            "**What packing saves**, bytes over dense bytes at 50 % sparsity: a random twin of ENDOR's first FFN "
            f"matrix (36864 × 9216), scaled up from {rows} of its rows, so modelled; the same on the real model is in "
            "the report.",
            "",
            markdown(_sizes(sizes)),
            "",
            f"![Bytes over sparsity, by format]({relative}/endor/fig04/sizes.png)",
            "",
            f"**What it buys**, one token through {passed['measured_layers']} layers of `{passed['measured_model']}`'s "
            "shapes with half zeros, all on disk, run on the CPU; measured. Sequential: one thing after the other. "
            "Pipelined: the next layer is read meanwhile, the fair rival.",
            "",
            markdown(_passes(_table(folder, "endor/tab_e2e"))),
            "",
            "**What the cost model is worth.** On the paper's machine: how many published numbers it comes close "
            "to, by the tolerances in `data/claims/`. On this one: its median error beside what was measured; the disk "
            "alone drifts by as much within minutes.",
            "",
            markdown(_model(folder)),
        ]
    )


def write_readme(folder: Path) -> None:
    """Put the tables between README's markers. Raises `UserError` if the markers are not there."""
    readme = paths.root() / "README.md"
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme}: the lines {BEGIN!r} and {END!r} are not there")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{readme_tables(folder)}\n{END}{after}", encoding="utf-8")


def markdown(table: pd.DataFrame) -> str:
    """A data frame as a Markdown table."""
    rows = [table.columns.tolist(), ["---"] * len(table.columns), *table.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _quality(table: pd.DataFrame) -> pd.DataFrame:
    table = table[~table["metric"].str.endswith("by length")]
    shown = table.assign(
        shown=[
            f"{row.value:.1f} ± {row.standard_error:.1f}"
            if row.metric == "perplexity"
            else f"{row.value:.1%} ± {row.standard_error:.1%}"
            for row in table.itertuples()
        ]
    )
    wide = shown.pivot_table(index=["pattern", "method"], columns="metric", values="shown", aggfunc="first", sort=False)
    return wide.reset_index().rename(columns=str)


def _sizes(table: pd.DataFrame) -> pd.DataFrame:
    kept = table["format"].isin(FORMATS) & table["sparsity"].eq(0.5)
    half = table[kept & table["source"].str.startswith("opt-66b")]
    half = half.assign(ratio=half["ratio"].map("{:.1%}".format))
    return half.pivot_table(index="format", columns="dtype", values="ratio", aggfunc="first", sort=False).reset_index()


def _passes(table: pd.DataFrame) -> pd.DataFrame:
    total = table[(table["stage"] == "total") & (table["evidence"] == "measured") & (table["mapping"] == "storage")]
    fair = total[(total["method"] == "dense") & (total["policy"] == "pipelined")]["seconds"].item()
    total = total.assign(
        times=(fair / total["seconds"]).map("{:.2f}".format), took=total["seconds"].map("{:.3f}".format)
    )
    named = total.sort_values("seconds")[["method", "policy", "took", "times"]]
    return named.rename(columns={"took": "seconds", "times": "times as fast as dense, pipelined"})


def _model(folder: Path) -> pd.DataFrame:
    present = {id: _table(folder, id) for id in notebooks() if (folder / id / "comparison.csv").is_file()}
    predicted = {id: table for id, table in present.items() if "modelled_over_measured" in table}
    compared = {id: pd.read_csv(folder / id / "comparison.csv") for id in predicted}
    together = "all together"
    predicted[together] = pd.concat(predicted.values())
    compared[together] = pd.concat(compared.values())
    rows = []
    for id, table in predicted.items():
        of_paper = compared[id]["evidence"].eq("modelled") & compared[id]["stand_in"].eq(False)
        verdicts = compared[id]["verdict"][of_paper]
        met = f"{verdicts.eq(MET).sum()} of {len(verdicts)}" if len(verdicts) else "–"
        off = {f"error here, {name}": f"{share:.0%}" for name, share in model_error(table).items()}
        rows.append({"figure": id, "published numbers met": met} | off)
    return pd.DataFrame(rows)


def _table(folder: Path, id: str) -> pd.DataFrame:
    return pd.read_csv(folder / id / "table.csv")


def main(arguments: list[str] | None = None) -> int:
    """Keep the last results and write README's tables from them."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.evidence.reference", description=__doc__)
    parser.add_argument("machine", help="a short name for this machine, such as epyc-milan-2c")
    options = parser.parse_args(arguments)
    try:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", options.machine):
            raise UserError(f"machine {options.machine!r}: expected small letters, digits, dots and dashes")
        write_readme(save(options.machine))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
