"""A wheel works without the checkout: it has every file that the code reads, and writes nothing beside the code."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from toolkit import paths, sources
from toolkit.evidence.catalogue import notebooks

FOLDERS = {"toolkit": "toolkit", "kernels": "toolkit/kernels", "notebooks": "toolkit/notebooks", "data": "toolkit/data"}
OF_THE_CHECKOUT = {"toolkit/sweep/environment.sh"}  # sets up its .venv
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
INSIDE = """
import json
from toolkit import paths, sources
from toolkit.sparsity.route_traces import load_route_trace
from toolkit.errors import UserError
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.claims import claims
from toolkit.evidence.reference import reference_dir
from toolkit.evidence.schema import check_parameters
from toolkit.machines.hardware import profile
from toolkit.machines.provenance import provenance
from toolkit.models.named import MODELS, parts_of

for notebook in notebooks().values():
    check_parameters(notebook, notebook.preset("quick") | {"seed": 5})
load_route_trace("gpt-oss-120b"), profile("endor-rtx4080"), claims("endor")
assert all(parts_of(name).is_file() for name, model in MODELS.items() if model.parts)
code = sources.dependencies("toolkit.kernels.bitmap", "toolkit.formats.endor")
try:
    reference_dir()
except UserError as error:
    refused = str(error)
print(json.dumps({
    "notebooks": len(notebooks()), "root": str(paths.root()), "cache": str(paths.cache_dir()),
    "results": str(paths.results_dir()), "git": provenance()["git"], "refused": refused,
    "fingerprint": sources.fingerprint(code),
    "code": [file.relative_to(paths.root()).as_posix() for file in code],
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout, built beside it. Large files are empty: compressing them takes ten seconds."""
    source = tmp_path_factory.mktemp("source")
    for name in ("toolkit", "kernels", "notebooks", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(paths.root() / name)
    for file in tracked("data", "--cached", "--others", "--exclude-standard"):  # new ones, too
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            (source / file).touch()
        else:
            (source / file).symlink_to(paths.root() / file)
    command = [sys.executable, "-P", "-c", BUILD, str(source)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(source.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """An installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def tracked(folder: str, *options: str) -> list[str]:
    command = ["git", "ls-files", "-z", *options, "--", folder]
    listed = subprocess.run(command, cwd=paths.root(), capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (paths.root() / name).is_file()]


def installed(site, place, *command: str) -> subprocess.CompletedProcess:
    """Run Python in an empty folder, with the wheel's toolkit in front of the checkout's."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "XDG_"))}
    environment = ours | {"PYTHONPATH": str(site), "HOME": str(place / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-P", *command], cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def test_every_file_of_the_checkout_that_the_code_may_read_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    names = [name for folder in FOLDERS for name in tracked(folder) if name not in OF_THE_CHECKOUT]
    assert len(names) > 400
    absent = [name for name in names if FOLDERS[name.split("/")[0]] + name[name.index("/") :] not in inside]
    assert not absent
    assert not [name for name in inside if name.startswith("toolkit/data/cache") or "__pycache__" in name]


def test_it_finds_its_files_and_keeps_nothing_beside_the_code(site, tmp_path):
    done = installed(site, tmp_path, "-c", INSIDE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["root"] == str(site / "toolkit")
    assert found["notebooks"] == len(notebooks())
    assert found["cache"] == str(tmp_path / "home" / ".cache" / paths.NAME)
    assert found["results"] == str(tmp_path / "results")
    assert found["git"].startswith("v")
    assert "checkout" in found["refused"]
    assert {"formats/endor.py", "kernels/bitmap/__init__.py"} <= set(found["code"])
    code = sources.dependencies("toolkit.kernels.bitmap", "toolkit.formats.endor")
    assert found["fingerprint"] == sources.fingerprint(code)


def test_copies_of_the_notebooks_have_their_results_beside_them(site, tmp_path):
    before = sorted(site.rglob("*"))
    done = installed(site, tmp_path, "-m", "toolkit", "notebooks", "--copy", "mine")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "contents.ipynb").is_file()
    assert "# preset quick" in (tmp_path / "mine" / "quickstart.ipynb").read_text()
    where = "import os; from toolkit import paths; os.chdir('mine/endor'); print(paths.lab_dir())"
    assert installed(site, tmp_path, "-c", where).stdout.strip() == str(tmp_path / "mine" / "results" / "lab")
    assert sorted(site.rglob("*")) == before
