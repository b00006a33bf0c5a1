"""Kept results, their scores, and the pages that cite them: `python -m toolkit.evidence.reference`."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError, run_command
from toolkit.evidence import cite
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.cite import reference_dir
from toolkit.evidence.comparison import compare
from toolkit.evidence.headlines import headlines, machine_headlines
from toolkit.evidence.scores import count_verdicts, score
from toolkit.evidence.tables import comparisons, read_results, score_table, write_scores
from toolkit.files import make_folder, replacing, replacing_folder, write_csv, write_json

KEPT = ("table.csv", "comparison.csv", "meta.json", "*.png")


def save(machine: str, ids: Collection[str] | None = None) -> Path:
    """Copy the tables, figures and circumstances of every notebook's last results to `results/reference/<machine>/`.

    `ids` are the notebooks; by default all that have results. Raises `UserError` if there are none, or if they are not
    all of one commit with a clean working tree: it names the notebooks that differ.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", machine):
        raise UserError(f"machine {machine!r}: expected small letters, digits, dots and dashes")
    folder = reference_dir() / machine
    metas = {id: paths.results_dir() / id / "meta.json" for id in notebooks()}
    present = {id: meta for id, meta in metas.items() if meta.is_file()}
    if absent := sorted(set(ids or ()) - present.keys()):
        raise UserError(f"{absent[0]}: no results in {paths.results_dir()}; run ./papermill_runs.sh --only {absent[0]}")
    if not present:
        raise UserError(f"no results in {paths.results_dir()}; run ./papermill_runs.sh first")
    if ids is not None:
        present = {id: present[id] for id in ids}
    _check_one_commit({id: json.loads(meta.read_text()) for id, meta in present.items()})
    for id, meta in present.items():
        make_folder((folder / id).parent)
        with replacing_folder(folder / id) as made:
            for file in (file for pattern in KEPT for file in meta.parent.glob(pattern)):
                (copy_picture if file.suffix == ".png" else shutil.copyfile)(file, made / file.name)
    return folder


def copy_picture(file: Path, target: Path) -> None:
    """Copy a picture with a palette of 256 colours, a third of the bytes. Drawn lines keep their colours."""
    from PIL import Image

    with Image.open(file) as picture:
        palette = picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    palette.save(target, optimize=True)


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


def keep_only(machine: str, ids: Collection[str], preset: str | None = None) -> Path:
    """Keep these notebooks alone of a machine; the others leave their headline numbers in `headlines.csv`.

    So does the machine, whose scores no longer follow from what is kept. `preset` is the one of what goes. Raises
    `UserError` for a notebook that is not kept.
    """
    folder, file = reference_dir() / machine, reference_dir() / "headlines.csv"
    kept = [meta.parent.relative_to(folder).as_posix() for meta in sorted(folder.rglob("meta.json"))]
    if absent := sorted(set(ids) - set(kept)):
        raise UserError(f"{absent[0]}: nothing is kept of it in {folder}; expected one of {', '.join(kept)}")
    names, out = cite.read_names(), [id for id in kept if id not in ids]
    rows = [machine_headlines(folder), *(headlines(folder, id, names, preset) for id in out)]
    before = [pd.read_csv(file)] if file.is_file() else []
    table = pd.concat([*before, *(found for found in rows if len(found))], ignore_index=True)
    table = table.drop_duplicates(["machine", "notebook", "quantity"], keep="last")
    with replacing(file) as temporary:
        table.to_csv(temporary, index=False, float_format="%.7g")
    for path in [*(folder / id for id in out), *(folder.glob("*") if not ids else ())]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for scores in folder.glob("*.csv"):
        scores.unlink()
    return folder


def cite_from_now(machine: str, ids: Collection[str]) -> None:
    """Have pages cite this machine's results of some notebooks. The ones that they cited before are removed.

    It changes `data/cells.yaml` and the pages' pictures, and writes anew the scores of machines that lose results.
    """
    names, cells = cite.read_names(), cite.names_file()
    for id in ids:
        before = cite.machine_of(id, names)
        if before == machine:
            continue
        _edit(cells, rf"^{id}: .*\n", "")
        _edit(cells, r"^machine: .*\n", rf"\g<0>{id}: {machine}\n")
        for page in cite.pages():
            _edit(page, f"reference/{before}/{id}/", f"reference/{machine}/{id}/")
        if (lost := reference_dir() / before / id).is_dir():
            shutil.rmtree(lost)
            write_scores(reference_dir() / before)


def _edit(file: Path, pattern: str, replacement: str) -> None:
    text = file.read_text(encoding="utf-8")
    changed = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    if changed != text:
        with replacing(file) as temporary:
            temporary.write_text(changed, encoding="utf-8")


def write_kept_scores(reference: Path) -> None:
    """Write `scores.csv` of all kept results: of each notebook those of the machine that `data/cells.yaml` names."""
    names = cite.read_names()
    found = [comparisons(reference / cite.machine_of(id, names), [id]) for id in notebooks()]
    table = pd.concat([one for one in found if len(one)], ignore_index=True)
    scores = score_table(table).dropna(subset=["n"])  # a paper without predictions has no score
    scores = scores.fillna({"null_n": 0})  # the null model may have no number of a paper's quantities
    write_csv(reference / "scores.csv", scores.astype({"n": int, "null_n": int}))


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
    only = "of what is kept, keep these notebooks alone; of all others their headline numbers"
    parser.add_argument("--keep", metavar="ID", nargs="*", help=only)
    parser.add_argument("--only", metavar="ID", nargs="+", help="copy the results of these notebooks, not of all")
    cited = "with --only: pages cite this machine for them; what they cited before is removed"
    parser.add_argument("--cite", action="store_true", help=cited)
    parser.add_argument("--preset", help="with --keep: the preset that the others were run at")
    parser.add_argument("--again", action="store_true", help="compare what is kept with changed claims; copy nothing")
    options = parser.parse_args(arguments)
    if options.cite and not options.only:
        parser.error("--cite needs --only ID ...")
    if options.only and (options.again or options.keep is not None):
        parser.error("--only copies results, which --again and --keep do not")

    def run() -> None:
        if options.keep is not None:
            keep_only(options.machine, options.keep, options.preset)
        else:
            write_scores(compare_again(options.machine) if options.again else save(options.machine, options.only))
        if options.cite:
            cite_from_now(options.machine, options.only)
        write_kept_scores(reference_dir())
        cite.refresh_all(reference_dir())

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
