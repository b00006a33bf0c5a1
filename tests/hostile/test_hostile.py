"""Signed files of any contents are refused or can be used; none ends the process. The scripts beside this say how.

`HOSTILE_CASES=100000` in the environment makes it long.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import paths

CASES = os.environ.get("HOSTILE_CASES")
SEED = os.environ.get("HOSTILE_SEED", "0")
STATES = ("PredictorFiles", "AdapterFiles")


@pytest.mark.parametrize(
    ("script", "cases", "ends"),
    [
        ("stores", "80", {"verified", "not verified"}),
        ("states", "160", {f"{kind} {end}" for kind in STATES for end in ("refused", "used")} | {"Kernels used"}),
    ],
)
def test_signed_files_of_any_contents(script, cases, ends):
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), SEED, CASES or cases]
    done = subprocess.run(command, cwd=paths.root(), capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert "failed" not in told, done.stderr[-3000:]
    assert sum(told.values()) == int(CASES or cases)
    assert told.keys() >= ends
