"""The memoised way in: made once, read back to the bit, keyed by whatever changes the result."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import UserError
from toolkit.pruning import METHODS, Calibration, LayerStatistics, load_pruned, prune, pruned
from toolkit.pruning.sparsegpt import SparseGPT

LENGTH = 16
CALIBRATION = Calibration(windows=3, sequence_length=LENGTH)
CALIBRATED = {"calibration": CALIBRATION, "dtype": torch.float32}


@pytest.fixture
def bench(tiny, tokens, tmp_path, monkeypatch):
    """A tiny model and text in place of the real ones, an empty cache, and a count of how often `prune` ran."""
    runs = []

    def counted(*args, **kwargs):
        runs.append(args[1])
        return prune(*args, **kwargs)

    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pruned, "load_model", lambda name, dtype: (tiny(name, blocks=2).to(dtype), "tokenizer"))
    monkeypatch.setattr(pruned, "load_tokens", lambda corpus, tokenizer, split: tokens)
    monkeypatch.setattr(pruned, "prune", counted)
    return runs


def same(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_call_reads_what_the_first_made(bench, tiny, tokens, method, dtype):
    first, tokenizer, records = load_pruned("llama", method, **CALIBRATED | {"dtype": dtype})
    second, _, again = load_pruned("llama", method, **CALIBRATED | {"dtype": dtype})
    assert bench == [method]
    assert tokenizer == "tokenizer"
    assert same(first, second)
    assert records == again
    assert isinstance(again[0], LayerStatistics)

    expected = tiny("llama", blocks=2).to(dtype)
    prune(expected, method, calibration=CALIBRATION.draw(tokens) if METHODS[method].statistic else None)
    assert same(first, expected)


def test_dense_is_the_model_as_it_is(bench, tiny):
    model, _, records = load_pruned("opt", "dense", dtype=torch.float32)
    assert same(model, tiny("opt", blocks=2))
    assert records == []
    assert bench == []


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "opt"},
        {"method": "sparsegpt"},
        {"sparsity": 0.6},
        {"pattern": "2:4"},
        {"calibration": replace(CALIBRATION, corpus="other")},
        {"calibration": replace(CALIBRATION, windows=2)},
        {"calibration": replace(CALIBRATION, sequence_length=8)},
        {"calibration": replace(CALIBRATION, seed=1)},
        {"dtype": torch.float16},
    ],
)
def test_whatever_changes_the_result_makes_it_anew(bench, change):
    load_pruned(**{"model_name": "llama", "method": "wanda"} | CALIBRATED)
    load_pruned(**{"model_name": "llama", "method": "wanda"} | CALIBRATED | change)
    assert len(bench) == 2


def test_magnitude_does_not_depend_on_calibration_settings(bench):
    for calibration in (Calibration(windows=3, seed=0), Calibration("other", windows=2, seed=1)):
        load_pruned("llama", "magnitude", calibration=calibration, dtype=torch.float32)
    assert bench == ["magnitude"]


def test_other_weights_under_the_same_name_are_pruned_anew(bench, tiny, monkeypatch):
    load_pruned("llama", **CALIBRATED)
    other = LlamaForCausalLM(LlamaConfig(**tiny("llama", blocks=2).config.to_dict()))
    monkeypatch.setattr(pruned, "load_model", lambda name, dtype: (other, None))
    load_pruned("llama", **CALIBRATED)
    assert len(bench) == 2


def test_a_file_that_was_cut_is_made_anew(bench, tmp_path, caplog):
    first, _, _ = load_pruned("llama", **CALIBRATED)
    (file,) = tmp_path.glob("pruned/*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        second, _, _ = load_pruned("llama", **CALIBRATED)
    assert len(bench) == 2
    assert file.name in caplog.text
    assert same(first, second)


def test_only_the_pruned_linears_are_kept(bench, tmp_path):
    from safetensors import safe_open

    _, _, records = load_pruned("llama", **CALIBRATED)
    (file,) = tmp_path.glob("pruned/*/*.safetensors")
    with safe_open(file, framework="pt") as kept:
        assert set(kept.keys()) == {record.name for record in records}
    statistics = json.loads(file.with_name(pruned.STATISTICS).read_text())
    assert [LayerStatistics(**record) for record in statistics] == records


def test_draw_is_seeded_and_without_overlap(tokens):
    four = Calibration(windows=4, sequence_length=LENGTH)
    drawn = four.draw(tokens).tolist()
    every = tokens.view(-1, LENGTH).tolist()
    places = [every.index(window) for window in drawn]
    assert len(set(places)) == 4
    assert places != sorted(places)
    assert drawn == four.draw(tokens).tolist()
    assert drawn != replace(four, seed=1).draw(tokens).tolist()
    assert sorted(replace(four, windows=None).draw(tokens).tolist()) == sorted(every)
    assert len(four.draw(tokens[:-1])) == 4  # the rest that fills no window is unused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"method": "wonder"},
            "unknown pruning method .wonder.; choose from: dense, .*magnitude, .*wanda",
        ),
        ({"sparsity": float("nan")}, "sparsity nan"),
        ({"pattern": "4:2"}, "pattern '4:2'"),
        ({"windows": 7}, "calibration has 96 tokens, 7 windows of 16 need 112"),
        ({"sequence_length": 32, "windows": 4}, "4 windows of 32 need 128"),
        ({"windows": 0}, "windows is 0; expected a whole number, at least 1"),
        ({"windows": 2.5}, "windows is 2.5; expected a whole number"),
        ({"windows": True}, "windows is True; expected a whole number"),
        ({"sequence_length": 0}, "sequence_length is 0; expected a whole number, at least 1"),
        ({"sequence_length": 97, "windows": None}, "calibration has 96 tokens"),
    ],
)
def test_bad_input_leaves_nothing_behind(bench, tmp_path, arguments, message):
    drawn = {name: value for name, value in arguments.items() if name in ("windows", "sequence_length")}
    others = {name: value for name, value in arguments.items() if name not in drawn}
    with pytest.raises(UserError, match=message):
        load_pruned("llama", **CALIBRATED | {"calibration": replace(CALIBRATION, **drawn)} | others)
    assert bench == []
    assert not list(tmp_path.rglob("*.safetensors"))


def files(method):
    return {path.stem for path in pruned.made_by("toolkit.pruning.pruned", METHODS[method])}


@pytest.mark.parametrize("method", METHODS)
def test_a_kept_model_hangs_on_its_own_methods_code(method):
    """And on the walk and the linears that are pruned, but not on the registry or on other methods."""
    modules = {name: METHODS[name].__module__.split(".")[-1] for name in METHODS}
    assert files(method) & set(modules.values()) == {modules[method]}
    assert files(method) >= {"layerwise", "calibration", "patterns", "pruned", "blocks"}
    assert not files(method) & {"methods", "loading", "cache", "files", "__init__"}


def test_a_new_method_leaves_kept_models_valid(bench, monkeypatch):
    load_pruned("llama", "wanda", **CALIBRATED)
    monkeypatch.setitem(METHODS, "other", METHODS["magnitude"])
    load_pruned("llama", "wanda", **CALIBRATED)
    assert bench == ["wanda"]


def test_other_settings_of_a_method_make_it_anew(bench, monkeypatch):
    load_pruned("llama", "sparsegpt", **CALIBRATED)
    monkeypatch.setitem(METHODS, "sparsegpt", SparseGPT(damping=0.2))
    load_pruned("llama", "sparsegpt", **CALIBRATED)
    assert len(bench) == 2


class Mine:
    """A method outside the toolkit."""

    statistic = None

    def __call__(self, weight, gram, sparsity, pattern):
        return METHODS["magnitude"](weight, gram, sparsity, pattern)


def test_a_method_from_elsewhere_hangs_on_its_own_file(bench, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Mine())
    for _ in range(2):
        load_pruned("llama", "mine", dtype=torch.float32)
    assert bench == ["mine"]
    monkeypatch.setattr(pruned, "file_sha256", lambda file: f"another {file.name}")
    load_pruned("llama", "mine", dtype=torch.float32)
    assert bench == ["mine", "mine"]


def test_a_method_without_a_file_prunes_anew_each_time(bench, monkeypatch):
    """In a notebook it may change from one run of its cell to the next."""
    monkeypatch.setattr(Mine, "__module__", "no_such_module")
    monkeypatch.setitem(METHODS, "mine", Mine())
    for _ in range(2):
        load_pruned("llama", "mine", dtype=torch.float32)
    assert bench == ["mine", "mine"]
