"""Every benchmark runs to its end at a small size; goals of speed are not judged here."""

import importlib
import os
import subprocess
import sys

import pandas as pd
import pytest
import torch

from tests.kernels.families import needs_numba_cuda
from tests.models.test_twins import TOYS
from toolkit import paths
from toolkit.models import shapes
from toolkit.models.twins import twin_model
from toolkit.storage.packing import Linears, pack_model

FOLDER = paths.root() / "benchmarks"
SKIPPED = 77  # the status without a GPU, fio or compressed-tensors
HELPERS = {"fio", "gguf_files", "reports"}
SMALL = {
    "bitmap": "--rows 64 --columns 64 --repetitions 1",
    "compare_results": "{tmp}/before {tmp}/after",
    "decode_step": "--folder {tmp}/store --tokens 6 --turns 1 --ways dense endor_packed spqr_packed",
    "draft": "{tmp}/packed {tmp}/packed --draft-method endor_packed --drafted 2 --tokens 6 --prompts 1",
    "gguf_logits": "--cases llama",
    "gpu": "--only outliers --repetitions 1",
    "hot_cold": "--neurons 4096 --tokens 8 --repetitions 1",
    "int8": "--rows 64 --columns 64 --repetitions 1",
    "neuron_records": "--hidden 256 --neurons 64 --repetitions 1",
    "neurons": "--hidden 64 --neurons 256 --repetitions 1",
    "offload": "--folder {tmp} --layers 3 --repetitions 1",
    "sparse_bitmask": "--rows 64 --columns 64 --repetitions 1",
    "spqr": "--shapes 64x64 --repetitions 1 --pause-ms 0",
    "storage_fio": "--folder {tmp} --file-mib 64 --read-s 0.01 --repetitions 1",
    "storage_read": "--folder {tmp} --layer-mib 16 --repetitions 1",
}
SIZES = {  # constants of the scripts
    "neurons": {"COLD_BYTES": 1},
    "neuron_records": {"COLD_BYTES": 1},
    "spqr": {"OTHER_BYTES": 1},
    "decode_step": {"RIVALS": (), "LAYERS": 2, "VOCABULARY": 512, "READ_BYTES": 1 << 20},
}
NEEDS = {"gguf_logits", "gpu", "sparse_bitmask", "storage_fio", "storage_read"}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Results and stores go to `tmp_path`; the twin of TinyLlama has the toy's layers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    monkeypatch.setitem(shapes.SHAPES, "tinyllama-1.1b", TOYS["toy-llama"])
    for side, nbytes in (("before", 8), ("after", 9)):
        (tmp_path / side / "one").mkdir(parents=True)
        pd.DataFrame({"way": ["dense"], "nbytes": [nbytes]}).to_csv(tmp_path / side / "one" / "table.csv")
    return tmp_path


def test_every_benchmark_is_here():
    assert {file.stem for file in FOLDER.glob("*.py")} == SMALL.keys() | HELPERS


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(small, monkeypatch, capsys, name):
    module = importlib.import_module(name)
    for constant, value in SIZES.get(name, {}).items():
        monkeypatch.setattr(module, constant, value)
    if name == "draft":
        model = twin_model("tinyllama-1.1b", 2, torch.bfloat16, vocabulary=512)
        pack_model(model, small / "packed", Linears(("dense", "endor")), "twin")
    if name == "offload":  # llama.cpp's environment would have to be made first
        monkeypatch.setattr(module, "LLAMA_CPP", ())
    if name == "gguf_logits":  # so would this one's
        monkeypatch.setattr(module.llama_cpp, "missing", lambda: "no llama.cpp")
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].format(tmp=small).split()])
    status = module.main()
    printed = capsys.readouterr().out
    if status == SKIPPED:
        assert name in NEEDS
        assert "skipped" in printed or "not installed" in printed
    else:
        assert status in (None, 0, 1)
        assert name == "compare_results" or (small / "results" / "benchmarks" / f"{name}.json").is_file()


@needs_numba_cuda
def test_a_gpu_s_checks_run_in_the_simulator(tmp_path):
    """In the one without its waits (`tests/kernels/simulator.py`)."""
    arguments = [str(FOLDER / "gpu.py"), "--simulate", "--only", "by table, csr"]
    code = "import runpy; from tests.kernels import simulator; simulator.install(); import sys;"
    code += f"sys.argv = {arguments}; runpy.run_path(sys.argv[0], run_name='__main__')"
    changes = {"TOOLKIT_RESULTS_DIR": str(tmp_path), "PYTHONPATH": f"{paths.root()}:{FOLDER}"}
    environment = os.environ | changes | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 checks, 0 wrong" in done.stdout
