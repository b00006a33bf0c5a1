"""Kept results, their scores, and the pages that cite them: `python -m toolkit.evidence.reference`."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError, run_command
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.cite import reference_dir, refresh_all
from toolkit.evidence.comparison import compare, count_verdicts, score
from toolkit.evidence.tables import read_results, write_scores
from toolkit.files import make_folder, replacing_folder, write_csv, write_json

KEPT = ("table.csv", "comparison.csv", "meta.json", "*.png")


def save(machine: str) -> Path:
    """Copy the tables, figures and circumstances of every notebook's last results to `results/reference/<machine>/`.

    Raises `UserError` if there are none, or if they are not all of one commit with a clean working tree: it names the
    notebooks that differ.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", machine):
        raise UserError(f"machine {machine!r}: expected small letters, digits, dots and dashes")
    folder = reference_dir() / machine
    metas = {id: paths.results_dir() / id / "meta.json" for id in notebooks()}
    present = {id: meta for id, meta in metas.items() if meta.is_file()}
    if not present:
        raise UserError(f"no results in {paths.results_dir()}; run ./papermill_runs.sh first")
    _check_one_commit({id: json.loads(meta.read_text()) for id, meta in present.items()})
    for id, meta in present.items():
        make_folder((folder / id).parent)
        with replacing_folder(folder / id) as made:
            for file in (file for pattern in KEPT for file in meta.parent.glob(pattern)):
                shutil.copyfile(file, made / file.name)
    return folder


def compare_again(machine: str) -> Path:
    """Compare the kept tables of a machine with the claims as they are now.

    The null model's numbers stay, since no table has them. Raises `UserError` if nothing is kept of that machine.
    """
    folder = reference_dir() / machine
    tables = dict(read_results(folder, "table"))
    if not tables:
        raise UserError(f"no tables in {folder}; keep results first, without --again")
    for id, table in tables.items():
        file = folder / id / "comparison.csv"
        found = compare(table, id)
        if found.empty:
            continue
        before = pd.read_csv(file) if file.is_file() else {}
        if "null" in before:
            keys = ["claim", "profile"]
            null = before.astype({"profile": object}).set_index(keys)["null"]
            null = null.reindex(pd.MultiIndex.from_frame(found[keys])).to_numpy()
            found = found.assign(null=null, null_ratio=null / found["published"])
        write_csv(file, found)
        meta = json.loads(file.with_name("meta.json").read_text(encoding="utf-8"))
        write_json(file.with_name("meta.json"), meta | {"verdicts": count_verdicts(found), "score": score(found)})
    return folder


def _check_one_commit(metas: Mapping[str, dict]) -> None:
    """Refuse results that one commit cannot make again."""
    commits = [meta["git"] for meta in metas.values()]
    usual = max(commits, key=commits.count)
    odd = [
        f"{id} ({'changed files' if meta['git_dirty'] else meta['git'][:10]})"
        for id, meta in metas.items()
        if meta["git_dirty"] or meta["git"] != usual
    ]
    if odd:
        raise UserError(
            f"kept results must come from one commit with no changed files, {usual[:10]} say; "
            f"commit all changes and run these again: {', '.join(odd)}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Keep the last results, and write their scores and the numbers that pages cite."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.evidence.reference", description=__doc__)
    parser.add_argument("machine", help="a short name for this machine, such as epyc-milan-2c")
    parser.add_argument("--again", action="store_true", help="compare what is kept with changed claims; copy nothing")
    options = parser.parse_args(arguments)
    keep = compare_again if options.again else save

    def run() -> None:
        write_scores(keep(options.machine))
        refresh_all(reference_dir())

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
