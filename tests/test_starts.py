"""What every notebook waits for before it starts: packages that take a second to import and that nothing here uses."""

import subprocess
import sys

import pytest

STARTS = {
    "loading a model": (
        "from toolkit.models import load_model; load_model('smollm2-135m')",
        ["hqq", "torch._inductor.compile_fx"],
    ),
    "running a notebook": ("import toolkit.sweep.execute", ["lark", "torch"]),
    "a notebook's first line": ("from toolkit.evidence.run import Run", ["torch"]),
    "a sweep": ("import toolkit.sweep.driver", ["seaborn", "torch"]),
}


@pytest.mark.parametrize("start", STARTS)
def test_no_package_is_imported_for_nothing(start):
    code, unused = STARTS[start]
    check = f"{code}\nimport sys\nprint([name for name in {unused} if sys.modules.get(name)])"
    done = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"
