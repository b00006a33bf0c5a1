"""Signed files of any contents are refused or can be used; none ends the process. `hostile.py` says how.

`HOSTILE_CASES=100000` in the environment makes it long.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from toolkit import paths

CASES = int(os.environ.get("HOSTILE_CASES", "450"))
SEED = int(os.environ.get("HOSTILE_SEED", "0"))


def test_signed_files_of_any_contents():
    command = [sys.executable, "-P", str(Path(__file__).with_name("hostile.py")), str(SEED), str(CASES)]
    done = subprocess.run(command, cwd=paths.root(), capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert sum(told.values()) == CASES
    assert told.keys() >= {"file refused", "file used", "store refused", "store verified", "store not verified"}
