"""Still pictures of the explorers, for the report: each runs without a front end, anew once its code has changed."""

import subprocess
import sys
import time

from toolkit import paths
from toolkit.evidence.catalogue import Notebook, explorers
from toolkit.evidence.page import last_image, read_book
from toolkit.files import make_folder, put_in_place, read_json, scratch_folder, write_json
from toolkit.sweep import state
from toolkit.sweep.jobs import STAMP


def draw_explorers() -> None:
    """Run the explorers whose picture is missing or older than their code: `results/explore/<name>/notebook.ipynb`.

    One that fails is told in a line, and keeps the picture that it had. Their kernels' messages go to a log.
    """
    stale = [about for about in explorers().values() if not _is_drawn(about)]
    for about in stale:
        with (make_folder(state.folder()) / "explorers.log").open("a") as log:
            command = [sys.executable, "-P", "-m", "toolkit.sweep.explorers", about.id]
            told = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False).stdout.strip()
        if told:
            print(f"{about.id}: no new picture for the report: {told}", flush=True)


def seconds() -> dict[str, float]:
    """How long each explorer took to run, by id, where it was drawn."""
    stamps = {id: read_json(paths.results_dir() / id / STAMP) for id in explorers()}
    return {id: stamp["seconds"] for id, stamp in stamps.items() if "seconds" in stamp}


def _is_drawn(about: Notebook) -> bool:
    folder = paths.results_dir() / about.id
    return (folder / "notebook.ipynb").is_file() and read_json(folder / STAMP).get("key") == about.code


def draw(id: str) -> str | None:
    """Draw one explorer. Returns the first line of its error, or None."""
    from toolkit.sweep.execute import run_notebook

    about, folder = explorers()[id], paths.results_dir() / id
    with scratch_folder(make_folder(folder.parent)) as scratch:
        staging = scratch / folder.name
        staging.mkdir()
        start = time.perf_counter()
        error = run_notebook(id, about.path, staging / "notebook.ipynb")
        if error or not last_image(read_book(staging / "notebook.ipynb")):
            return error or "it shows no figure"
        write_json(staging / STAMP, {"key": about.code, "seconds": time.perf_counter() - start})
        put_in_place(staging, folder)
    return None


if __name__ == "__main__":
    print(draw(sys.argv[1]) or "")
