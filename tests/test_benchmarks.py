"""Every benchmark runs to its end at a small size; goals of speed are not judged here."""

import importlib
import json
import os
import subprocess
import sys
import time
from argparse import Namespace

import pandas as pd
import pytest
import torch

from tests.kernels.families import needs_numba_cuda
from tests.models.test_twins import TOYS
from tests.offload.test_gguf_file import random_file
from toolkit import paths
from toolkit.models import shapes
from toolkit.models.twins import twin_model
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

FOLDER = paths.root() / "benchmarks"
SKIPPED = 77  # the status without a GPU, fio or compressed-tensors
HELPERS = {"bare", "fio", "folder_twins", "gguf_files", "gguf_twins", "gpu_checks", "gpu_texts", "limited", "reports"}
SMALL = {
    "blocks": "--types Q4_K Q8_0 F16 --shapes qwen2.5-1.5b --vectors 1 2 --repetitions 1",
    "bitmap": "--rows 64 --columns 64 --repetitions 1",
    "compare_results": "{tmp}/before {tmp}/after",
    "contexts": "{tmp}/model.gguf --limits 900 --contexts 8 --turns 1 --tokens 4",
    "decode_step": "--folder {tmp}/store --tokens 6 --turns 1 --ways dense endor_packed spqr_packed",
    "disk_places": "--folder {tmp} --file-mib 4 --places 2 --repetitions 1 --markdown",
    "draft": "{tmp}/packed {tmp}/packed --draft-method endor_packed --drafted 2 --tokens 6 --prompts 1",
    "gguf_logits": "--cases llama",
    "gguf_processes": "--ours",
    "gpu": "--only outliers --repetitions 1",
    "drawing": "--neurons 4096 --tokens 8 --repetitions 1",
    "int8": "--rows 64 --columns 64 --repetitions 1",
    "kv_types": "{tmp}/model.gguf --texts 2 --tokens 60 --corpora python-sources",
    "memory_limits": "{tmp}/packed --limits 900 --first 1",
    "neuron_records": "--hidden 256 --neurons 64 --bits 2 --repetitions 1",
    "neurons": "--hidden 64 --neurons 256 --dtype float32 --repetitions 1",
    "neurons_held": "{tmp}/bundled --limits 1GB --prompts 2 --tokens 4 --windows 1 --length 16 --turns 1",
    "offload": "--folder {tmp} --layers 3 --repetitions 1",
    "packs": "model wanda",
    "process_parts": "{tmp}/packed --dram 100MB --prompt-tokens 8 --runs 1",
    "prompts": "--models {tmp}/model.gguf --tokens 40 --turns 1",
    "sparse_bitmask": "--rows 64 --columns 64 --repetitions 1",
    "spqr": "--shapes 64x64 --repetitions 1 --pause-ms 0",
    "storage_fio": "--folder {tmp} --file-mib 64 --read-s 0.01 --repetitions 1",
    "storage_read": "--folder {tmp} --layer-mib 16 --repetitions 1",
}
SIZES = {  # constants of the scripts
    "blocks": {"COLD_BYTES": 1, "SHAPES": {"qwen2.5-1.5b": [(64, 256)]}},
    "neurons": {"COLD_BYTES": 1},
    "prompts": {"STEPS": 8, "SHAPE": (4, 8, 8)},
    "neuron_records": {"COLD_BYTES": 1},
    "spqr": {"OTHER_BYTES": 1},
    "decode_step": {"RIVALS": (), "LAYERS": 2, "VOCABULARY": 512, "READ_BYTES": 1 << 20},
}
NEEDS = {
    "gguf_logits",
    "gguf_processes",
    "gpu",
    "memory_limits",
    "packs",
    "sparse_bitmask",
    "storage_fio",
    "storage_read",
}


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
    if name in ("draft", "memory_limits", "process_parts"):
        model = twin_model("tinyllama-1.1b", 2, torch.bfloat16, vocabulary=512)
        pack_model(model, small / "packed", Linears(("dense", "endor")), "twin")
    if name == "neurons_held":
        pack_model(
            twin_model("tinyllama-1.1b", 2, torch.bfloat16, vocabulary=512), small / "bundled", Neurons(), "twin"
        )
    if name == "offload":  # llama.cpp's environment would have to be made first
        monkeypatch.setattr(module, "LLAMA_CPP", ())
    if name in ("contexts", "kv_types", "prompts"):
        random_file("qwen2", "Q4_K", small / "model.gguf")
    if name in ("contexts", "kv_types"):  # a corpus takes seconds for a tokenizer that is new
        monkeypatch.setattr(module, "load_tokens", lambda corpus, tokenizer, split: torch.arange(150) % 50)
    if name == "contexts":
        monkeypatch.setattr(module, "rivals_of", lambda name, file: [])
    if name in ("gguf_logits", "prompts"):  # so would these
        monkeypatch.setattr(module.llama_cpp, "missing", lambda: "no llama.cpp")
    if name in ("gguf_processes", "packs"):  # they would run whole processes for minutes
        monkeypatch.setattr(module, "missing", lambda: "no cgroup")
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].format(tmp=small).split()])
    status = module.main()
    printed = capsys.readouterr().out
    if status == SKIPPED:
        assert name in NEEDS
        assert "skipped" in printed or "not installed" in printed
    else:
        assert status in (None, 0, 1)
        assert name == "compare_results" or (small / "results" / "benchmarks" / f"{name}.json").is_file()


PLAIN = """
import runpy, sys

sys.modules.update(dict.fromkeys("{missing}".split()))  # what a plain GPU image may lack
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # nor is the toolkit installed

from tests.kernels import simulator  # Numba's, without its waits

simulator.install()


def run(operations):
    sys.argv = ["{script}", "--simulate", "--only", operations]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code


assert run("outliers as csr") == 0

from toolkit.kernels.csr import cuda

kernel = cuda.add_matvec


def planted(outliers, x, out):
    if len(x) > 1:
        raise RuntimeError("a planted error")
    kernel(outliers, x, out)
    out += 1


cuda.add_matvec = planted
assert run("outliers as csr") == 1
"""
MISSING = "pydantic zstandard gguf hqq jaxtyping filelock pandas psutil accelerate datasets mwparserfromhell"


@needs_numba_cuda
def test_a_gpu_s_checks_run_from_a_bare_checkout_and_see_a_wrong_kernel(tmp_path):
    code = PLAIN.format(missing=MISSING, script=FOLDER / "gpu.py")
    changes = {"TOOLKIT_RESULTS_DIR": str(tmp_path), "PYTHONPATH": str(paths.root()), "NUMBA_ENABLE_CUDASIM": "1"}
    settings = {"env": os.environ | changes, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-P", "-c", code], **settings)
    assert done.returncode == 0, done.stderr
    assert "2 checks, 0 wrong" in done.stdout
    assert "| outliers as csr, 1 | 3x20 | **WRONG** by 1 |" in done.stdout
    assert "| outliers as csr, 3 | 3x20 | **FAILED**: RuntimeError: a planted error |" in done.stdout
    assert "2 checks, 2 wrong" in done.stdout
    kept = json.loads((tmp_path / "benchmarks" / "gpu.json").read_text())
    assert [row["right"] for row in kept["rows"]] == [False, False]


WORKER = """
import json, os, sys, time

def tell(**line):
    print(json.dumps(line), flush=True)

def begin(group, check, name):
    tell(begins=[group, check], operation=name, shape="")

start = tuple(map(int, sys.argv[1:3]))
if start == (0, 0):
    begin(0, 0, "good")
    tell(operation="good", shape="", right=True)
    begin(0, 1, "crash")
    os.kill(os.getpid(), 9)
if start == (0, 2):
    begin(0, 2, "breaks the GPU")
    tell(operation="breaks the GPU", shape="", right=False, failed="an illegal address")
    sys.exit(3)
if start == (0, 3):
    sys.exit("no memory for the matrices")
begin(1, 0, "hangs")
time.sleep(100)
"""


def test_checks_on_a_gpu_go_on_after_one_that_ends_their_process(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "WORKER", [sys.executable, "-I", "-S", "-c", WORKER])
    options = Namespace(only="", repetitions=1, patience=60)
    rows = list(gpu.checked(gpu.groups(False, True)[:3], options, time.monotonic() + 2))
    assert [(row.get("operation"), row.get("right"), row.get("failed")) for row in rows[:-1]] == [
        ("good", True, None),
        ("crash", False, "status -9: nothing said"),
        ("breaks the GPU", False, "an illegal address"),
        ("all", False, "status 1: no memory for the matrices"),
    ]
    assert rows[-1] == {"left_out": ["the rest of spqr 3x20", "neurons 3x64"]}
    rows = list(gpu.told([*gpu.WORKER, "1", "0"], "", 1, time.monotonic() + 60))
    assert rows[-1] == {"ended": "nothing for 1 s"}
