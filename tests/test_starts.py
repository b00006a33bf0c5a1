"""What every notebook waits for before it starts: packages that take a second to import and that nothing here uses."""

import subprocess
import sys

import pytest
import torch

from tests.families import write_family

STARTS = {
    "loading a model": (
        "from toolkit.models import load_model; load_model('model')",
        ["hqq", "torch._inductor.compile_fx"],
    ),
    "running a notebook": ("import toolkit.sweep.execute", ["lark", "torch"]),
    "a notebook's first line": ("from toolkit.evidence.run import Run", ["torch"]),
    "a sweep": ("import toolkit.sweep.driver", ["seaborn", "torch"]),
}


@pytest.mark.parametrize("start", STARTS)
def test_no_package_is_imported_for_nothing(start, tmp_path):
    code, unused = STARTS[start]
    if start == "loading a model":
        write_family("Llama, tied", tmp_path / "model", torch.float32)
    check = f"{code}\nimport sys\nprint([name for name in {unused} if sys.modules.get(name)])"
    command = [sys.executable, "-P", "-c", check]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"
