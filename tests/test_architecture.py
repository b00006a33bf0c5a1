"""The floors of the house: imports go from a higher one to a lower one only. One name, one class."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict

import pytest

from toolkit import paths

LINT = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as run; run()"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the sources with the kernels where they are imported from, `toolkit.kernels`."""
    folder = tmp_path_factory.mktemp("house")
    ignore = shutil.ignore_patterns("__pycache__", "kernels")
    shutil.copytree(paths.root() / "toolkit", folder / "toolkit", ignore=ignore)
    shutil.copytree(paths.root() / "kernels", folder / "toolkit" / "kernels")
    shutil.copyfile(paths.root() / "pyproject.toml", folder / "pyproject.toml")
    return folder


def lint(folder) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [*LINT, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_imports_keep_the_contract(house):
    found = lint(house)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 kept, 0 broken" in found.stdout


def test_an_import_of_a_higher_floor_breaks_it(house, tmp_path):
    copy = tmp_path / "house"
    shutil.copytree(house, copy)
    higher = {
        "toolkit/timeline.py": "def later():\n    from toolkit.sweep import jobs\n",
        "toolkit/kernels/bitmap/layout.py": "from toolkit.storage import store\n",
        "toolkit/offload/plan.py": "from toolkit.machines import machine\n",
    }
    for module, line in higher.items():
        (copy / module).write_text((copy / module).read_text() + line)
    found = lint(copy)
    assert found.returncode == 1
    assert all(module.removesuffix(".py").replace("/", ".") in found.stdout for module in higher)


def test_every_module_of_the_root_is_on_a_floor():
    contract = tomllib.loads((paths.root() / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = {name.strip(" ()") for layer in contract["layers"] for name in re.split("[:|]", layer)}
    modules = {path.stem for path in (paths.root() / "toolkit").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {f"toolkit.{name}" for name in modules - {"__init__", "__pycache__"}} | {"toolkit.kernels"} == floors


def test_every_package_is_installed(monkeypatch):
    listed = []
    monkeypatch.setattr("setuptools.setup", lambda packages: listed.extend(packages))
    runpy.run_path(str(paths.root() / "setup.py"))
    folders = {"toolkit": paths.root() / "toolkit", "toolkit.kernels": paths.root() / "kernels"}
    found = {
        ".".join([name, *marker.parent.relative_to(folder).parts])
        for name, folder in folders.items()
        for marker in folder.rglob("__init__.py")
    }
    assert sorted(found | {"toolkit.notebooks", "toolkit.data"}) == sorted(listed)
    assert {"toolkit.kernels", "toolkit.kernels.engine", "toolkit.storage.readers"} <= found


def test_no_public_class_has_the_name_of_another():
    """A reader who knows one of them would take the other for it."""
    places = defaultdict(list)
    for folder in ("toolkit", "kernels"):
        for file in sorted((paths.root() / folder).rglob("*.py")):
            classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
            for node in classes:
                places[node.name].append(str(file.relative_to(paths.root())))
    assert not {name: files for name, files in places.items() if len(files) > 1 and not name.startswith("_")}
