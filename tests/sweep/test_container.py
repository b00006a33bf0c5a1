"""The Containerfile, as far as it can be tried without a container: its instructions name what is there."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from toolkit import paths

ROOT = paths.root()


def instructions() -> list[tuple[str, str]]:
    """Keyword and words of each instruction; comments are left out, continued lines joined as a shell joins them."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", "")
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


def of(keyword: str) -> list[str]:
    return [words for found, words in instructions() if found == keyword]


def test_what_it_copies_and_starts_is_there():
    for words in of("COPY"):
        assert all((ROOT / source).exists() for source in words.split()[:-1])
    (start,) = json.loads(of("ENTRYPOINT")[0])
    assert os.access(ROOT / start, os.X_OK)
    (home,) = of("WORKDIR")
    kept = {Path(home) / place.relative_to(ROOT) for place in (ROOT / "data" / "cache", ROOT / "results")}
    assert set(map(Path, json.loads(of("VOLUME")[0]))) == kept


def test_it_installs_the_dependencies_of_the_project_within_the_lock():
    install = next(words for words in of("RUN") if "--requirement" in words)
    assert "--constraint requirements.lock" in install
    listing = install.split(" > ")[0].replace("python", sys.executable, 1)
    listed = subprocess.run(["sh", "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, *cluster = project["optional-dependencies"]["cluster"]
    assert own == f"{project['name']}[lab]"
    assert listed.splitlines() == [*project["dependencies"], *project["optional-dependencies"]["lab"], *cluster]


def test_the_image_leaves_out_only_what_git_ignores():
    left_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = [line.removeprefix("**/").replace("*", "") for line in left_out if line != "results/*"]
    assert not [file for file in tracked if any(file.startswith(f"{name}/") for name in names)]
    assert all(file.startswith("results/reference/") for file in tracked if file.startswith("results/"))
