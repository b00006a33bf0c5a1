"""Each kind of file that somebody else may have written, damaged in many ways: it is used, or refused in one line.

A traceback, a hang or two lines are faults. `tests/damaged.py` makes the damage, always the same. Tests beside the
modules say what is refused and why; `tests/hostile` has signed stores.
"""

import json
import signal
import warnings
from argparse import Namespace

import pandas as pd
import pytest
import torch
import yaml
from gguf_files import CASES, write
from safetensors.torch import save_file

from tests.damaged import damaged_bytes, damaged_json, damaged_safetensors, damaged_text
from tests.families import write_family
from tests.storage.conftest import make_ops
from toolkit import paths, tensor_files
from toolkit.commands.text import prompt_of
from toolkit.errors import UserError
from toolkit.evidence.claims import read_claims
from toolkit.evidence.limits import speed_figure
from toolkit.evidence.meta import read_meta
from toolkit.interchange import open_checkpoint
from toolkit.interchange.reading import load_tokenizer
from toolkit.machines import hardware
from toolkit.models import load_model
from toolkit.models.gguf_header import read_header
from toolkit.models.loading import check_model
from toolkit.models.skeleton import read_config, read_generation_config
from toolkit.offload.variant import variant_to_run
from toolkit.planner.target import open_target
from toolkit.records import load_csv
from toolkit.sparsity.route_traces import read_route_trace
from toolkit.storage.store import Store
from toolkit.storage.writing import write_store
from toolkit.sweep.profiles import find_profile

SECONDS = 20  # a machine may be busy; most attempts take some milliseconds
MODEL = "Llama, tied"
LINE = 1500  # letters


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    write_family(MODEL, folder, torch.float32)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def model(family, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in family.items():
        (folder / name).write_bytes(data)
    return folder


def survive(file, damages, *uses):
    """Use a file with each damage. It is usable before and after."""
    sound, outcomes = file.read_bytes(), {"used": 0, "refused": 0}
    for words, data in (("none", sound), *damages, ("none", sound)):
        file.write_bytes(data)
        for use in uses:
            refusal = _attempt(use, f"{file.name}, {words}")
            outcomes["refused" if refusal else "used"] += 1
            assert words != "none" or refusal is None, refusal
    assert outcomes["refused"] > 0
    return outcomes


def _attempt(use, words):
    """The line of the refusal, or None."""

    def hangs(*_):
        raise AssertionError(f"{words}: takes more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except UserError as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(f"{words}: {type(error).__name__}, a traceback") from error
    else:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert "takes more than" not in refusal, words
    assert "\n" not in refusal, words
    assert len(refusal) < LINE, words
    return refusal


def read(file):
    return json.loads(file.read_text())


def short(damages):
    """Without deep lists, which one file of YAML is enough for: its parser takes seconds."""
    return (damage for damage in damages if len(damage[1]) < 20_000)


def test_a_model_s_config(model):
    file, name = model / "config.json", str(model)
    sizes = {key: value for key, value in read(file).items() if type(value) is int}
    large = [(key, json.dumps(read(file) | {key: 2**40}).encode()) for key in sizes for _ in range(2)]
    damages = [*damaged_json(read(file), 1), *large]
    survive(file, damages[::3], lambda: load_model(name))
    survive(file, damages[1::3], lambda: open_target(name))
    survive(file, damages[2::3], lambda: check_model(name), lambda: read_config(model, [(4, 4)] * 30))


def test_a_model_s_settings_of_generate(model):
    file = model / "generation_config.json"
    survive(file, damaged_json(read(file), 2), lambda: read_generation_config(model))


@pytest.mark.parametrize(("name", "seed"), [("tokenizer.json", 3), ("tokenizer_config.json", 4)])
def test_a_tokenizer(model, name, seed):
    config = read_config(model, [(4, 4)] * 30)

    def tokens():
        prompt_of(Namespace(folder=model, prompt="1 2 3", max_new_tokens=2), load_tokenizer(model), config)

    survive(model / name, damaged_json(read(model / name), seed), tokens)


def test_weights_in_safetensors_and_their_index(model):
    file, name = model / "model.safetensors", str(model)
    survive(file, damaged_safetensors(file.read_bytes(), 5, 20), lambda: load_model(name))
    index = model / "model.safetensors.index.json"
    with open(file, "rb") as source:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
    parts = {tensor: "model-1.safetensors" for tensor in header if tensor != "__metadata__"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    file.rename(model / "model-1.safetensors")
    survive(index, damaged_json(read(index), 6, 20), lambda: load_model(name))


def test_a_checkpoint_of_another_tool(tmp_path):
    tensors = {
        "a.compressed": torch.ones(6),
        "a.bitmask": torch.tensor([[7], [7]], dtype=torch.uint8),
        "a.row_offsets": torch.tensor([0, 3]),
        "a.shape": torch.tensor([2, 8]),
        "b": torch.ones(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"quantization_config": {"sparsity_config": {"format": "sparse-bitmask"}}}))

    def use():
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.shapes().keys() == dict(checkpoint.tensors()).keys()

    survive(config, damaged_json(read(config), 7, 20), use)
    weights = tmp_path / "model.safetensors"
    survive(weights, damaged_safetensors(weights.read_bytes(), 8), use)


def test_a_gguf_file(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "small.gguf")
    head = min(tensor.offset for tensor in read_header(file).tensors.values())
    name, damages = str(file), [*damaged_bytes(file.read_bytes(), 9, head, 120)]
    survive(file, damages[::2], lambda: read_header(file), lambda: check_model(name))
    survive(file, damages[1::2], lambda: open_target(name))
    survive(file, damages[::10], lambda: load_model(name))


def test_our_packed_folders(tmp_path):
    folder = tmp_path / "packed"
    write_store(folder, make_ops())

    def use():
        Store.open(folder).verify()

    index = folder / "index.json"
    survive(index, damaged_json(read(index), 10), use)
    for _, data in damaged_json(read(index), 11):
        index.write_bytes(data)
        _attempt(lambda: variant_to_run(folder), "variant")


def test_shards(tmp_path):
    folder = tmp_path / "packed"
    write_store(folder, make_ops())
    shard = min(folder.glob("*.safetensors"))
    survive(shard, damaged_safetensors(shard.read_bytes(), 12), lambda: Store.open(folder).verify())


def test_our_files_of_tensors(tmp_path):
    file = tmp_path / "trace.safetensors"
    tensor_files.save(file, "a kind", {"version": "1", "model": "m"}, {"a": torch.ones(3), "b": torch.ones(2, 2)})
    survive(
        file,
        damaged_safetensors(file.read_bytes(), 13),
        lambda: tensor_files.load(file, "a kind"),
        lambda: tensor_files.load_for(file, "a kind", ("1",), "m"),
    )


def test_profiles_of_machines(tmp_path):
    file = tmp_path / "machines.yaml"
    records = yaml.safe_load((paths.root() / "data" / "hardware" / "endor.yaml").read_text())[:1]
    file.write_text(json.dumps(records))  # which is YAML
    survive(file, damaged_json(records, 14, 25), lambda: hardware._profiles_of.__wrapped__(file, 0))


def test_claims_of_papers(tmp_path, monkeypatch):
    records = yaml.safe_load((paths.root() / "data" / "claims" / "endor.yaml").read_text())[:3]
    file = tmp_path / "data" / "claims" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(records))
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    survive(file, short(damaged_json(records, 15, 40)), lambda: read_claims.__wrapped__("mine"))


def test_profiles_of_clusters(tmp_path):
    file = tmp_path / "mine" / "config.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps({"executor": "local", "jobs": 4}))
    survive(file, short(damaged_json(read(file), 16, 20)), lambda: find_profile("mine", tmp_path))


def test_tables(tmp_path):
    file = tmp_path / "table.csv"
    columns = {"limit_mb": float, "way": str, "rival": bool, "tokens_per_s": float, "relative": float}
    rows = [(600, "as it is", False, 9.5, 1.0), (600, "llama.cpp", True, 1.2, 1.0)]
    pd.DataFrame(rows, columns=list(columns)).to_csv(file, index=False)
    odd = [("a limit without an end", b"inf"), ("words", b"fast"), ("nothing", b""), ("far too large", b"9" * 400)]
    damages = [(words, file.read_bytes().replace(b"9.5", number)) for words, number in odd]
    survive(file, [*damages, *damaged_text(file.read_text(), 17, 60)], lambda: speed_figure(load_csv(file, columns)))


def test_traces_of_routing(tmp_path):
    file = tmp_path / "trace.csv"
    lines = ["# route_trace v1", "# model=m.gguf n_layer=1 n_expert=4 n_expert_used=2"]
    numbers = ["turn,step,layer,expert,weight", "0,0,0,1,0.5", "0,0,0,2,0.5", "0,1,0,3,0.5", "0,1,0,0,0.5"]
    file.write_text("\n".join([*lines, *numbers]) + "\n")
    survive(file, damaged_text(file.read_text(), 18, 60), lambda: read_route_trace(file))


def test_records_of_results(tmp_path):
    file = tmp_path / "meta.json"
    file.write_text(json.dumps({"id": "a/b", "schema": 1, "figures": ["plot"], "score": {"a": 1.0}}))
    for _, data in damaged_json(read(file), 19):
        file.write_bytes(data)
        assert _attempt(lambda: read_meta(tmp_path), "meta") is None
