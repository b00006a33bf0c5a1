"""A clone is small: it travels to machines that take few megabytes."""

import subprocess

import pytest

from toolkit import paths

MOST_BYTES = 45_000_000


def test_what_git_tracks_is_small():
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=paths.root(), check=True, capture_output=True, text=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here, or no checkout of it")
    files = [file for name in listed if name and (file := paths.root() / name).is_file()]
    largest = sorted(files, key=lambda file: -file.stat().st_size)[:5]
    assert files
    assert sum(file.stat().st_size for file in files) < MOST_BYTES, f"the largest: {', '.join(map(str, largest))}"
