import contextlib
import ctypes
import itertools
import json
import math
import mmap
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.measure.test_accelerate import resident_pages
from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.interchange.gguf import layer_bytes, layer_span, write_gguf
from toolkit.measure import llama_cpp, llama_cpp_driver, llama_cpp_process
from toolkit.measure.child import Child
from toolkit.measure.llama_cpp import PROMPT, LlamaCpp, pinned_ranges
from toolkit.measure.llama_cpp_process import WARM_TOKENS, NoRoom, TooSlow, run_process
from toolkit.measure.turns import take_turns
from toolkit.models import shapes
from toolkit.models.twins import twin_model

# answers as the driver does, from a file that lies beside the model's
STAND_IN = """
import json, pathlib, sys
answers = json.loads(pathlib.Path(sys.argv[1]).with_name("answers.json").read_text())
print(json.dumps({"build": f"SIMD, {sys.argv[4]}"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("tokens") == [13]:
        sys.exit("out of luck")
    with open(sys.argv[1] + ".requests", "a") as log:
        print(line, end="", file=log)
    found = {"seconds": 0.25, "first_s": 0.5, "read_bytes": 12 * len(request.get("tokens", ""))}
    print(json.dumps(found | {"log_probabilities": answers[: request.get("probabilities", 0)]}), flush=True)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    (tmp_path / "driver.py").write_text(STAND_IN)
    monkeypatch.setattr(llama_cpp, "interpreter", lambda: sys.executable)
    monkeypatch.setattr(llama_cpp, "which", lambda: "a stand-in")
    monkeypatch.setattr(llama_cpp_driver, "__file__", str(tmp_path / "driver.py"))
    model = twin_model("toy-llama", 2)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].float()
    (tmp_path / "answers.json").write_text(json.dumps(torch.log_softmax(logits, 0).tolist()))
    return model


def test_a_pass_is_one_read_of_the_disk_that_takes_all_of_it(model, tmp_path):
    with closing(LlamaCpp("llama.cpp F16", model, tmp_path)) as runtime:
        spans = take_turns([runtime], repetitions=2)
        with pytest.raises(UserError, match=r"llama.cpp F16 ended: out of luck"):
            runtime._child.ask(tokens=[13])
    assert spans["stage"].tolist() == ["read", "read"]
    assert (spans["end_s"] - spans["start_s"]).tolist() == [0.25, 0.25]
    assert spans["nbytes"].tolist() == [12, 12]
    requests = (tmp_path / "F16.gguf.requests").read_text().splitlines()
    first, end = layer_span(tmp_path / "F16.gguf")  # without a limit its pages are dropped before each pass
    assert all(json.loads(request)["drop"] == [first, end] for request in requests)


class Group:
    """Stands in for a memory cgroup of a process that needs 1000 bytes beside weights."""

    other_bytes = 1000

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def test_a_limit_is_what_it_needs_and_as_many_bytes_of_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "MemoryGroup", Group)
    with closing(LlamaCpp("llama.cpp F16", model, tmp_path, memory_bytes=5000)) as runtime:
        spans = take_turns([runtime], repetitions=2)
        assert runtime._group.calls == [("add", runtime._child.process.pid), ("limit", 6000)]
    assert runtime._group.calls[-1] == ("close",)
    assert set(spans["mode"]) == {"mmap, memory cgroup"}
    assert set(spans["build"]) == {"a stand-in; SIMD, mapped"}
    assert set(spans["memory_bytes"]) == {5000}
    requests = [json.loads(line) for line in (tmp_path / "F16.gguf.requests").read_text().splitlines()]
    assert not any(request["drop"] for request in requests)
    untimed = [request for request in requests if request["tokens"] == [7] and "probabilities" not in request][:-2]
    assert len(untimed) == 2  # before the limit, and after it: as much is read


def test_other_logits_are_refused_of_f16_and_nan_of_every_type(model, tmp_path):
    file = tmp_path / "answers.json"
    right = json.loads(file.read_text())
    with torch.no_grad():
        largest = float(model(torch.tensor([PROMPT])).logits[0, -1].abs().max())
    for off, refused in ((0.5, []), (2.0, ["F16"]), (float("nan"), ["F16", "Q4_0"])):
        file.write_text(json.dumps([right[0] + off * llama_cpp.TOLERANCE * largest, *right[1:]]))
        for kind in ("F16", "Q4_0"):
            if kind not in refused:
                LlamaCpp(f"llama.cpp {kind}", model, tmp_path).close()
                continue
            with pytest.raises(UserError, match=f"llama.cpp {kind} gives another output than"):
                LlamaCpp(f"llama.cpp {kind}", model, tmp_path)


def test_a_file_of_ones_own_is_run_as_it_is(model, tmp_path):
    """Its logits need not be the model's; they stay the same."""
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "own.gguf"
    write_gguf(model, file, "Q4_0")
    (tmp_path / "mine" / "answers.json").write_text(json.dumps([-3.0, *[-9.0] * (model.config.vocab_size - 1)]))
    with closing(LlamaCpp("llama.cpp F16", model, tmp_path, gguf=file)) as runtime:
        assert runtime.nbytes == layer_bytes(file)
        take_turns([runtime], repetitions=2)
    assert file.with_name("own.gguf.requests").exists()
    assert not (tmp_path / "F16.gguf").exists()


def test_ways_of_loading(model, tmp_path, monkeypatch):
    """As much is pinned as the limit holds, but for room to read the rest; each way asks the driver for its own."""
    monkeypatch.setattr(llama_cpp, "MemoryGroup", Group)
    monkeypatch.setattr(llama_cpp, "PASSING_BYTES", 1000)
    file = tmp_path / "F16.gguf"
    asked = {"pinned": lambda: [{"pin": [list(part) for part in pinned_ranges(file, 4000)]}]}
    asked |= {"random": lambda: [{"random": True}], "repacked": list}
    for load, expected in asked.items():
        with closing(LlamaCpp("llama.cpp F16", model, tmp_path, load=load, memory_bytes=5000)) as runtime:
            assert runtime.mode == f"mmap {load}, memory cgroup"
            assert runtime.build.endswith("repacked" if load == "repacked" else "mapped")
        log = tmp_path / "F16.gguf.requests"
        requests = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        assert [request for request in requests if {"pin", "random"} & request.keys()] == expected()
    with pytest.raises(UserError, match=r"unknown way of llama.cpp to load a file 'maped'.*did you mean 'mapped'"):
        LlamaCpp("llama.cpp F16", None, tmp_path, load="maped")


def test_what_each_token_needs_is_pinned_first(monkeypatch):
    """An embedding beside a head is never pinned, experts come last."""
    sizes = {"token_embd.weight": 50, "blk.0.ffn_up_exps.weight": 30, "blk.0.attn_q.weight": 7, "output.weight": 20}
    ends = list(itertools.accumulate(sizes.values(), initial=100))
    tensors = {
        name: SimpleNamespace(offset=first, nbytes=size)
        for (name, size), first in zip(sizes.items(), ends, strict=False)
    }
    header = SimpleNamespace(tensors=tensors, files=("a",))
    monkeypatch.setattr(llama_cpp, "read_header", lambda file: header)
    assert pinned_ranges(Path("a"), 30) == [(180, 187), (187, 207), (150, 153)]
    assert pinned_ranges(Path("a"), 7) == [(180, 187)]
    assert sum(end - first for first, end in pinned_ranges(Path("a"), 10**9)) == 57
    del tensors["output.weight"]  # then the embedding is the head
    assert pinned_ranges(Path("a"), 52) == [(100, 150), (180, 182)]
    header.files = ("a", "b")
    with pytest.raises(UserError, match="one of 2 pieces"):
        pinned_ranges(Path("a"), 30)


def test_a_whole_process_within_a_limit(model, tmp_path, monkeypatch):
    group = Group()
    monkeypatch.setattr(llama_cpp_process, "MemoryGroup", lambda: contextlib.nullcontext(group))
    monkeypatch.setattr(llama_cpp, "PASSING_BYTES", 1000)
    write_gguf(model, file := tmp_path / "F16.gguf", "F16")
    process = run_process(file, 9000, "pinned", prompt=[7, 8], tokens=4)
    assert process.tokens_per_s == 4
    assert process.read_bytes == 24 / 4
    assert process.own_bytes == Group.other_bytes
    assert process.build == "a stand-in; SIMD, mapped"
    assert group.calls[0] == ("limit", 9000)
    requests = [json.loads(line) for line in (tmp_path / "F16.gguf.requests").read_text().splitlines()]
    assert [request.get("generate") for request in requests] == [WARM_TOKENS, None, WARM_TOKENS, 4]
    assert requests[1] == {"pin": [list(part) for part in pinned_ranges(file, 9000 - 1000 - 1000)]}
    (tmp_path / "driver.py").write_text("import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(NoRoom, match=r"llama.cpp, read, needs more than 0 MB"):
        run_process(file, 9000, "read", prompt=[7], tokens=4)
    (tmp_path / "driver.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(TooSlow, match=r"llama.cpp, mapped, was ended after 0 s"):
        run_process(file, 9000, "mapped", prompt=[7], tokens=4, most_s=0.1)


def test_it_is_missing_where_it_cannot_be_installed_and_says_why(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess((), 1, "", "much ado\nno such package")
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: failed)
    caches = llama_cpp._wheel, llama_cpp._not_installed
    for each in caches:
        each.cache_clear()
    assert "no such package" in llama_cpp.missing()
    assert not [*tmp_path.glob("environments/*/bin")]
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: pytest.fail("tried again"))
    assert "no such package" in llama_cpp.missing(limited=True)
    for each in caches:
        each.cache_clear()


def test_a_program_that_ended_says_why_and_leaves_nothing_open():
    child = Child("a program", [sys.executable, "-c", "import sys; print('{}', flush=True); sys.exit('too old')"])
    assert child.answer() == {}
    child.process.wait()
    with pytest.raises(UserError, match="a program ended: too old"):
        child.ask(tokens=[7])
    child.close()
    assert child.process.stdin.closed
    assert child.process.returncode == 1


class Server:
    """llama.cpp's, which touches each page of its file once a pass."""

    def __init__(self, pages):
        self.pages = pages

    def handle_completions(self, request):
        assert request["n_predict"] == 1
        assert sum(self.pages[:: mmap.PAGESIZE]) == 0
        ranked = [{"id": token, "logprob": -float(token)} for token in (2, 0, 1)]
        return {"choices": [{"logprobs": {"content": [{"top_logprobs": ranked}]}}]}


def test_every_pass_of_the_driver_reads_the_disk(tmp_path):
    file = tmp_path / "model.gguf"
    with open(file, "wb") as stream:
        stream.write(bytes(64 * mmap.PAGESIZE))
        stream.flush()
        os.fsync(stream.fileno())
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
        engine = object.__new__(llama_cpp_driver.ServerInProcess)
        engine.server = Server(pages)
        for _ in range(2):
            found = llama_cpp_driver.answer(
                engine, str(file), {"tokens": [7], "probabilities": 3, "drop": [0, file.stat().st_size]}
            )
            assert found["log_probabilities"] == [0, -1, -2]
            assert found["seconds"] > 0
            assert found["read_bytes"] in (0, 64 * mmap.PAGESIZE)  # 0 where the file is in memory only
        if not resident_pages(file):
            pytest.skip("this file system keeps no pages")
        llama_cpp_driver.drop_pages(str(file), 10 * mmap.PAGESIZE - 1, 20 * mmap.PAGESIZE + 1)
        assert resident_pages(file) == 64 - 10
        llama_cpp_driver.drop_pages(str(file), 0, 64 * mmap.PAGESIZE)
        assert resident_pages(file) == 0
        assert llama_cpp_driver.answer(engine, str(file), {"random": True}) == {}
        sum(pages[: 3 * mmap.PAGESIZE : mmap.PAGESIZE])
        assert resident_pages(file) == 3  # none is read ahead
        assert llama_cpp_driver.answer(engine, str(file), {"pin": [[5 * mmap.PAGESIZE + 1, 7 * mmap.PAGESIZE]]}) == {}
        llama_cpp_driver.drop_pages(str(file), 0, 5 * mmap.PAGESIZE)
        assert resident_pages(file) == 2


class Functions(SimpleNamespace):
    """llama.cpp's C functions, whose next token is always the last one plus one, of 5."""

    llama_token = ctypes.c_int32
    LLAMA_DEFAULT_SEED = 0
    passes: ClassVar[list] = []

    def __getattr__(self, name):
        return lambda *arguments: 0

    def llama_batch_get_one(self, array, count):
        return list(array)

    def llama_decode(self, context, batch):
        self.passes.append(batch)
        return 0

    def llama_sampler_sample(self, sampler, context, position):
        return (self.passes[-1][-1] + 1) % 5

    def llama_get_logits_ith(self, context, position):
        return [0.0, math.log(2), math.log(4), 0.0, 0.0, 99.0]


def test_llama_cpp_by_its_c_functions():
    engine = object.__new__(llama_cpp_driver.CFunctions)
    engine._llama, engine._context, engine._words = Functions(), 1, 5
    assert engine.text([3, 4], 3) == [0, 1, 2]
    assert Functions.passes == [[3, 4], [0], [1], [2]]
    found = engine.one_pass([3], 3)["log_probabilities"]
    assert found == pytest.approx([math.log(1 / 9), math.log(2 / 9), math.log(4 / 9)])
    assert engine.generate([3], 2, 0.5).keys() == {"first_s", "seconds", "tokens"}
