"""Packages that every notebook would wait for: they take a second to import, and nothing here uses."""

import subprocess
import sys

import torch

from tests.families import write_family

LINES = {  # in one process, so what an earlier one imports counts for the later ones, too
    "import toolkit.sweep.execute": ["lark", "torch"],
    "from toolkit.sweep.plan import make_jobs; make_jobs(['quickstart'])": ["torch"],
    "import toolkit.sweep.driver": ["seaborn", "torch"],
    "from toolkit.evidence.run import Run": ["torch"],
    "from toolkit.models import load_model; load_model('model')": ["hqq", "torch._inductor.compile_fx"],
}


def test_no_package_is_imported_for_nothing(tmp_path):
    write_family("Llama, tied", tmp_path / "model", torch.float32)
    code = "import sys\n"
    for line, unused in LINES.items():
        code += f"{line}\nfound = [name for name in {unused} if sys.modules.get(name)]\n"
        code += f"assert not found, ({line!r}, found)\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
