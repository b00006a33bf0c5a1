"""JupyterLab on copies of the notebooks: `results/lab/<id>.ipynb`, beside what they save in `results/lab/<id>/`.

Trials there change neither the repository nor the sweep's results.
"""

import os
import sys
from urllib.parse import quote

from toolkit import paths
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.copies import copy_notebooks, write_contents
from toolkit.files import make_folder, write_json
from toolkit.sweep import explorers
from toolkit.sweep.forecast import duration, forecast
from toolkit.sweep.jobs import Job, cores

QUIET = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}  # no pop-up


def start(options: list[str], preset: str = "standard") -> None:
    """Bring the copies up to date and become JupyterLab, which opens their contents; `options` go to it.

    Raises `UserError` for an unknown preset.
    """
    lab, root = paths.lab_dir().resolve(), paths.root()
    for line in copy_notebooks(lab, preset):
        print(line)
    if not lab.is_relative_to(root):  # `$TOOLKIT_RESULTS_DIR` is elsewhere
        root = lab.parent
    contents = write_contents(lab, preset, _durations(preset))
    print(f"Notebooks to try things in: {lab} (copies with preset {preset}; the sweep runs notebooks/)", flush=True)
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # in a container, as a rule
    url = f"/lab/tree/{quote(contents.relative_to(root).as_posix())}"
    places = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url={url}"]
    write_json(make_folder(lab / ".settings") / "overrides.json", QUIET)
    places.append(f"--LabApp.app_settings_dir={lab / '.settings'}")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "jupyterlab", *places, *as_root, *options])


def _durations(preset: str) -> dict[str, str]:
    """How long each notebook takes, in words, where that is known; else how long it takes in `quick`."""
    known = {id: f"{words} in quick" for id, words in _durations("quick").items()} if preset != "quick" else {}
    jobs = [
        Job(each.id, each.title, str(each.path), each.preset(preset), "", cores(), each.alone)
        for each in notebooks().values()
    ]
    seconds = explorers.seconds() | forecast(jobs, 1).seconds
    return known | {id: duration(each) for id, each in seconds.items()}
