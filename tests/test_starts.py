"""Packages that are imported late or never: those that take a second, and those that only the extras bring."""

import re
import subprocess
import sys
import tomllib

import torch

from tests.families import write_family
from toolkit import paths

LINES = {  # in one process, so what an earlier one imports counts for the later ones, too
    "import toolkit.sweep.execute": ["lark", "torch"],
    "from toolkit.sweep.jobs import make_jobs; make_jobs(['quickstart'])": ["torch"],
    "import toolkit.sweep.driver": ["seaborn", "torch"],
    "from toolkit.evidence.run import Run": ["torch"],
    "import toolkit.planner.plan": ["transformers", "toolkit.offload.model"],
    "from toolkit.kernels import csr, spqr; spqr.BACKENDS.available()": ["numba.cuda", "toolkit.kernels.engine.gpu"],
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


PROJECT = tomllib.loads((paths.root() / "pyproject.toml").read_text())["project"]
MODULES = {"lm-eval": "lm_eval", "jupyterlab": "jupyter_client"}  # by package, where the names differ
OF_LAB = {re.split(r"[\[<>=]", wanted)[0] for wanted in PROJECT["optional-dependencies"]["lab"]} | {"accelerate"}
ENGINE = """
import sys
sys.modules.update(dict.fromkeys({absent}))  # as if they were not installed
import toolkit as tk
model, tokenizer = tk.load_model("model")
tk.prune(model, windows=2, sequence_length=64)
tk.perplexity(model, tokenizer, 64, 1)
tk.pack(model, "packed")
with tk.open("packed") as opened:
    opened.generate_text("5", tokens=2)
tk.plan, tk.machine("endor-rtx4080")
import toolkit.planner.plan, toolkit.machines.probe, toolkit.quantization.spqr
from toolkit.__main__ import main
assert main(["notebooks"]) == 0
try:
    tk.encode("zstd", model.lm_head.weight)
except ValueError as error:
    assert str(error).endswith("pip install 'sparse-offload-toolkit[lab]' installs it"), error
else:
    raise AssertionError("zstandard is there")
"""


def test_the_engine_needs_few_packages_and_none_of_the_lab(tmp_path):
    assert len(PROJECT["dependencies"]) <= 12
    write_family("Llama, tied", tmp_path / "model", torch.float32)
    code = ENGINE.replace("{absent}", repr({MODULES.get(name, name) for name in OF_LAB}))
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
