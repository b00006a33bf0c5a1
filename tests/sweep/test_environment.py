"""The set-up of `.venv`, without installing anything."""

import shutil
import subprocess

import pytest

from toolkit import paths

PROBE = """
set -euo pipefail
. ./environment.sh
find_python() { echo fake_python; }
fake_python() {
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "$@" >> pip.log\\n' > .venv/bin/python
    chmod +x .venv/bin/python
}
make_venv dev
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "first place"
    folder.mkdir()
    shutil.copyfile(paths.root() / "toolkit" / "sweep" / "environment.sh", folder / "environment.sh")
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).write_text(name)
    return folder


def set_up(folder) -> str:
    done = subprocess.run(["bash", "-c", PROBE], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def installs(folder) -> int:
    return (folder / "pip.log").read_text().count(" install ")


def test_an_environment_is_made_once(checkout):
    assert "Setting up" in set_up(checkout)
    assert set_up(checkout) == ""
    assert installs(checkout) == 1
    (checkout / "requirements.lock").write_text("another")
    assert "Setting up" in set_up(checkout)
    assert installs(checkout) == 2


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_a_moved_or_copied_checkout_makes_its_own(checkout, how):
    set_up(checkout)
    (checkout / ".venv" / "of the first place").touch()
    other = checkout.with_name("second place")
    how(checkout, other)
    assert "moved or copied" in set_up(other)
    assert not (other / ".venv" / "of the first place").exists()
    assert installs(other) == 2
    assert set_up(other) == ""
