import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit import formats
from toolkit.__main__ import UNITS, _bytes, main
from toolkit.errors import UserError
from toolkit.interchange import load_dense_model
from toolkit.models import load_model
from toolkit.pruning import load_pruned
from toolkit.quantization import smoothed
from toolkit.quantization.smoothed import load_smoothed
from toolkit.quantization.smoothquant import round_to_int8
from toolkit.storage.store import Store

PROMPT = "The library of"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = load_model("smollm2-135m")[1]
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, eos_token_id=tokenizer.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """What `load_pruned` keeps of tiny models is worth nothing later."""
    monkeypatch.setattr("toolkit.paths.cache_dir", lambda: tmp_path / "cache")


def pack(model, out, *more):
    return main(["pack", str(model), "--method", "magnitude", "--dtype", "float32", "--out", str(out), *more])


def test_pack_and_run_give_what_the_pruned_model_gives(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--format", "endor", "dense") == 0
    assert "endor" in capfd.readouterr().out
    pruned, tokenizer, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    tokens = pruned.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "6"]
    for more in ([], ["--method", "dense", "--policy", "sequential"], ["--dram", "20MB"]):
        assert main([*command, *more]) == 0
        found = capfd.readouterr()
        assert found.out.strip() == tokenizer.decode(tokens[0]).strip()
        assert "6 tokens in" in found.err


def test_int8_weights_give_what_the_rounded_model_gives(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(smoothed, "load_tokens", lambda corpus, tokenizer, split: torch.arange(500))
    calibration = ["--windows", "2", "--sequence-length", "32"]
    assert pack(model, tmp_path / "packed", "--int8", "--format", "endor", "dense", *calibration) == 0
    capfd.readouterr()
    expected, tokenizer = load_smoothed(str(model), "magnitude", dtype=torch.float32, windows=2, sequence_length=32)
    round_to_int8(expected)
    tokens = expected.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    for method in ("endor", "dense", "endor_packed"):
        command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "6", "--method", method]
        assert main(command) == 0
        assert capfd.readouterr().out.strip() == tokenizer.decode(tokens[0]).strip()
    assert Store.open(tmp_path / "packed").model["int8"] is True


def test_a_sparse_bitmask_checkpoint(model, tmp_path):
    assert pack(model, tmp_path / "checkpoint", "--format", "sparse-bitmask") == 0
    pruned, _, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    again = load_dense_model(tmp_path / "checkpoint")
    for name, parameter in pruned.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pack", "MODEL", "--out", "OUT", "--format", "gzip"], "unknown format 'gzip'"),
        (["pack", "MODEL", "--out", "OUT", "--format", "endor", "sparse-bitmask"], "a folder of its own"),
        (["pack", "MODEL", "--out", "OUT", "--format", "sparse-bitmask", "--int8"], "no place for scales"),
        (["pack", "MODEL", "--out", "OUT", "--method", "guess"], "unknown pruning method 'guess'"),
        (["pack", "MODEL", "--out", "OUT", "--dtype", "int4"], "unknown dtype 'int4'"),
        (["pack", "MODEL", "--out", "OUT", "--method", "magnitude", "--sparsity", "1.5"], "sparsity"),
        (["pack", "MODEL", "--out", "MODEL"], "exists already"),
        (["pack", "no/such/model", "--out", "OUT"], "unknown model"),
        (["run", "OUT", "--prompt", "x"], "no folder"),
        (["run", "MODEL", "--prompt", "x"], "index.json"),
        (["run", "MODEL", "--prompt", "x", "--max-new-tokens", "0"], "from 1"),
        (["run", "MODEL", "--prompt", "x", "--dram", "much"], "--dram much: expected a size such as 500MB"),
        (["run", "MODEL", "--prompt", "x", "--device-memory", "all"], "--device-memory all: expected a size"),
        (["run", "MODEL", "--prompt", "x", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(model, tmp_path, capfd, arguments, words):
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in arguments]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "out").exists()


def test_an_interruption_while_packing_leaves_nothing(model, tmp_path, monkeypatch):
    calls, encode = [], formats.encode

    def interrupted(name, weight):
        calls.append(name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(name, weight)

    monkeypatch.setattr(formats, "encode", interrupted)
    (tmp_path / "here").mkdir()
    assert pack(model, tmp_path / "here" / "packed") == 130
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("500MB", 500_000_000), ("1.5GiB", 3 << 29), ("2 KiB", 2048)])
def test_sizes_with_units(text, size):
    assert _bytes("--dram", text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1e", "nan", "infGB", "1 2MB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="expected a size"):
        _bytes("--dram", text)


def test_units_are_told_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    assert "500MB" in capsys.readouterr().out
    assert "GiB" in UNITS
