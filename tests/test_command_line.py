import json
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.families import WORDS, write_tokenizer
from tests.offload.pretend import PretendGpu
from toolkit import formats, paths
from toolkit.__main__ import main
from toolkit.commands import packers, run
from toolkit.commands.packers import PACKERS, SPARSE_BITMASK
from toolkit.commands.run import UNITS, bytes_of
from toolkit.commands.text import method_of
from toolkit.errors import UserError
from toolkit.formats import FORMATS, decode
from toolkit.formats.scaled import Scaled
from toolkit.interchange import load_dense_model
from toolkit.models import load_model
from toolkit.models.head import head_parts, rows_of_part, untied_head
from toolkit.models.plain import plain
from toolkit.offload.neuron_folder import KINDS
from toolkit.policies.ways import POLICIES
from toolkit.predictors import load_predictors, predicted
from toolkit.quality import perplexity
from toolkit.quantization import smoothquant
from toolkit.quantization.smoothquant import load_smoothed, round_to_int8
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import METHODS, Calibration, load_changed, load_pruned
from toolkit.sparsity.recording import record_routing
from toolkit.storage.experts import bits_of, op_name
from toolkit.storage.readers import READERS
from toolkit.storage.store import Store

PROMPT = "7 31 5"
TEXT = torch.arange(2100) % WORDS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model, whose words are numbers."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, initializer_range=0.5, eos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """What `load_pruned` keeps of tiny models is worth nothing later."""
    monkeypatch.setattr("toolkit.paths.cache_dir", lambda: tmp_path / "cache")


def pack(model, out, *more):
    given = ["--method", "magnitude", "--dtype", "float32", "--no-evaluate", "--out", str(out)]
    return main(["pack", str(model), *given, *more])


def test_pack_and_run_give_what_the_pruned_model_gives(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--format", "endor", "dense") == 0
    # 4352 weights, and a block on disk for each of 14 matrices
    sizes = "329.4%; 32.00 bits a weight, 105.41 on disk with padding"
    assert f"dense 0.1 MB ({sizes})" in capfd.readouterr().out
    pruned, tokenizer, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    tokens = pruned.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "6"]
    draft = ["--draft", str(tmp_path / "packed"), "--draft-tokens", "2"]
    read = ["--reader", "aio", "--no-verify"]
    for more in ([], ["--format", "dense", "--policy", "sequential"], ["--dram", "20MB"], read, draft):
        assert main([*command, *more]) == 0
        found = capfd.readouterr()
        assert found.out.strip() == tokenizer.decode(tokens[0]).strip()
        assert "6 tokens in" in found.err
    assert main([*command, "--sample", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    ("trouble", "status"), [(UserError("other logits: off by 5.2"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_folder_with_other_logits_is_not_left_behind(model, tmp_path, capfd, monkeypatch, trouble, status):
    def check(folder, packed):
        assert (folder / "index.json").is_file()
        raise trouble

    monkeypatch.setattr("toolkit.offload.logit_check.check_logits", check)
    assert pack(model, tmp_path / "packed") == status
    assert not (tmp_path / "packed").exists()
    assert (str(trouble) or "nothing was left behind") in capfd.readouterr().err


def test_int8_weights_give_what_the_rounded_model_gives(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(smoothquant, "load_tokens", lambda corpus, tokenizer, split: TEXT[:500])
    calibration = ["--windows", "2", "--sequence-length", "32"]
    assert pack(model, tmp_path / "packed", "--int8", "--format", "endor", "dense", *calibration) == 0
    capfd.readouterr()
    settings = {"calibration": Calibration(windows=2, sequence_length=32), "dtype": torch.float32}
    expected, tokenizer = load_smoothed(str(model), "magnitude", **settings)
    round_to_int8(expected)
    tokens = expected.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    for how in (["--format", "endor"], ["--format", "dense"], ["--weights", "packed"]):
        command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "6", *how]
        assert main(command) == 0
        assert capfd.readouterr().out.strip() == tokenizer.decode(tokens[0]).strip()
    assert Store.open(tmp_path / "packed").model["int8"] is True


def test_spqr_is_packed_and_run_without_a_flag(model, tmp_path, capfd, monkeypatch):
    for module in ("toolkit.sparsity.changed", "toolkit.quality"):
        monkeypatch.setattr(f"{module}.load_tokens", lambda corpus, tokenizer, split: TEXT)
    folder, calibration = tmp_path / "packed", Calibration(windows=2, sequence_length=32)
    command = ["pack", str(model), "--method", "spqr", "--outliers", "0.02", "--head", "int8", "--dtype", "float32"]
    assert main([*command, "--windows", "2", "--sequence-length", "32", "--out", str(folder)]) == 0
    found = load_changed(str(model), SpQR(0.02), calibration, torch.float32)
    for part in head_parts(untied_head(found.model), rows_of_part(found.model)):
        part.weight.data.copy_(decode(Scaled.encode("dense", part.weight)))
    tokens, dense = TEXT, load_model(str(model), dtype=torch.float32)[0]
    before, after = (perplexity(each, tokens, 512, 4) for each in (dense, found.model))
    told = capfd.readouterr().out
    assert f"perplexity {before:.1f} dense, {after:.1f} packed" in told
    store, weights = Store.open(folder), sum(of.rows * of.columns for of in found.statistics)
    weights += found.model.get_output_embeddings().weight.numel()
    assert store.variants == ("spqr",)
    assert f"; {8 * store.tensor_bytes('spqr') / weights:.2f} bits a weight, " in told
    assert {key: store.model[key] for key in ("method", "outliers")} == {"method": "spqr", "outliers": 0.02}
    given = found.tokenizer(PROMPT, return_tensors="pt")
    expected = found.tokenizer.decode(found.model.generate(**given, max_new_tokens=6, do_sample=False)[0])
    command = ["run", str(folder), "--prompt", PROMPT, "--max-new-tokens", "6"]
    for more in ([], ["--weights", "decoded"], ["--dram", "20MB"]):
        assert main([*command, *more]) == 0
        assert capfd.readouterr().out.strip() == expected.strip()


def test_the_quality_of_a_model_with_thresholds_is_not_called_dense(model, tmp_path, capfd, monkeypatch):
    for module in ("toolkit.offload.neuron_folder", "toolkit.quality"):
        monkeypatch.setattr(f"{module}.load_tokens", lambda corpus, tokenizer, split: TEXT)
    sparse = shutil.copytree(model, tmp_path / "sparse")
    config = json.loads((sparse / "config.json").read_text()) | {"activation_thresholds": [0.1, 0.1]}
    (sparse / "config.json").write_text(json.dumps(config))
    before = perplexity(load_model(str(sparse), dtype=torch.float32)[0], TEXT, 512, 4)
    command = ["pack", str(sparse), "--method", "neurons", "--dtype", "float32", "--out", str(tmp_path / "packed")]
    assert main([*command, "--windows", "2", "--sequence-length", "32", "--predictors", "gate"]) == 0
    assert f"perplexity {before:.1f} with its thresholds, " in capfd.readouterr().out
    monkeypatch.setattr("toolkit.offload.model.open_device", lambda name: PretendGpu())
    command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "3", "--device", "cuda"]
    assert main(command) == 0
    assert re.search(
        r"[1-9]\d*% of the neurons on the device, \d+% .* MB DRAM and .* MB device held", capfd.readouterr().err
    )
    assert main([*command, "--device-memory", "1KB"]) == 2
    assert re.search(r"a device budget of .* is too small: .* MB are needed", capfd.readouterr().err)


def test_git_ignores_what_the_documented_commands_write():
    """Else results say that they were made with uncommitted changes."""
    texts = [(paths.root() / name).read_text(encoding="utf-8") for name in ("README.md", "docs/commands.md")]
    folders = {folder for text in texts for folder in re.findall(r"--out (\S+)", text)}
    assert "packed" in folders
    for folder in folders:
        ignored = subprocess.run(["git", "-C", str(paths.root()), "check-ignore", "-q", f"{folder}/"], check=False)
        assert ignored.returncode == 0, f"{folder}: add it to .gitignore"


def test_compare_prints_a_row_for_each_way_and_why_others_take_no_part(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("toolkit.quality.load_tokens", lambda corpus, tokenizer, split: TEXT)
    monkeypatch.setattr("toolkit.measure.llama_cpp.missing", lambda: "it is not installed")
    assert pack(model, tmp_path / "packed") == 0
    capfd.readouterr()
    command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "3", "--compare"]
    for more in ([], ["--dram", "20MB", "--csv", str(tmp_path / "race.csv")]):
        assert main([*command, *more]) == 0
        found = capfd.readouterr()
        lines, phases = found.out.splitlines(), found.err.splitlines()
        assert phases.index("not raced: llama.cpp: it is not installed") < phases.index("reading the packed model")
        assert len([line for line in phases if line.startswith("endor_packed: ")]) == 3  # a line a turn
        rows = {line.split()[0]: line.split() for line in lines[1:5]}
        assert [*rows] == ["dense", "dense_packed", "endor", "endor_packed"]
        assert len({row[-2] for row in rows.values()}) == 1  # the perplexity of the same weights
        assert all(float(row[1 + (row[1] == "*")]) > 0 for row in rows.values())
        assert "llama.cpp: it is not installed" in lines
        assert lines[-1].startswith("3 tokens after the prompt")
        assert f"{model} as it was before it was packed: perplexity" in lines[-2]
        assert "llama.cpp" not in lines[-1], "nothing is said of the weights of one that took no part"
    kept = pd.read_csv(tmp_path / "race.csv").set_index("way")
    assert kept["limit"].eq("20MB").all()
    shown = rows["endor"][1 + (rows["endor"][1] == "*")]
    assert float(shown) == pytest.approx(kept["tokens_per_s"]["endor"], abs=0.06)
    assert main([*command[:-1], "--csv", "race.csv"]) == 2
    assert "add --compare" in capfd.readouterr().err
    assert main([*command, "--dram", "1MB"]) == 2
    assert "MB are needed" in capfd.readouterr().err
    assert main([*command, "--device", "cuda"]) == 2
    assert "--compare runs on the CPU" in capfd.readouterr().err
    assert main([*command[:-1], "--gguf", "file.gguf"]) == 2
    assert "add --compare" in capfd.readouterr().err


def test_a_model_by_neuron_is_packed_and_run_without_a_flag(model, tmp_path, capfd, monkeypatch):
    for module in ("toolkit.offload.neuron_folder", "toolkit.quality"):
        monkeypatch.setattr(f"{module}.load_tokens", lambda corpus, tokenizer, split: TEXT)
    folder = tmp_path / "packed"
    command = ["pack", str(model), "--method", "neurons", "--sparsity", "0.6", "--dtype", "float32"]
    command += ["--windows", "2", "--sequence-length", "32", "--predictors", "gate"]
    assert main([*command, "--out", str(folder)]) == 0
    assert "bundled" in capfd.readouterr().out
    thresholds = torch.tensor(json.loads((folder / "model" / "config.json").read_text())["activation_thresholds"])
    predictors = load_predictors(folder / "model" / "predictors.safetensors", str(model))
    dense, tokenizer = load_model(str(model), dtype=torch.float32)
    with predicted(dense, thresholds, predictors):
        tokens = dense.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    command = ["run", str(folder), "--prompt", PROMPT, "--max-new-tokens", "6"]
    for more in ([], ["--dram", "20MB"]):
        assert main([*command, *more]) == 0
        found = capfd.readouterr()
        assert found.out.strip() == tokenizer.decode(tokens[0]).strip()
        assert "of the neurons in DRAM" in found.err
    for more, words in (
        (["--dram", "1MB"], "MB are needed"),
        (["--weights", "packed"], "--weights: "),
        (["--policy", "sequential"], "--policy: "),
        (["--compare"], "--compare: "),
    ):
        assert main([*command, *more]) == 2
        assert words in capfd.readouterr().err


def test_a_mixture_is_packed_by_expert_and_run_without_a_flag(model, tmp_path, capfd, monkeypatch):
    """As it is, and with the experts that a text uses least in 2 bits."""
    monkeypatch.setattr("toolkit.quality.load_tokens", lambda corpus, tokenizer, split: TEXT)
    dense, tokenizer = load_model(str(model), dtype=torch.float32)
    config = dense.config.to_dict() | {"hidden_size": 64, "head_dim": 32, "sliding_window": None}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    del config["architectures"], config["model_type"]
    mixtral = MixtralForCausalLM(MixtralConfig(**config)).eval()
    mixtral.save_pretrained(tmp_path / "mixtral")
    tokenizer.save_pretrained(tmp_path / "mixtral")
    tokens = mixtral.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    calibration = ["--windows", "2", "--sequence-length", "32"]
    for name, more in {"whole": [], "mixed": ["--bits", "4", "--mixed", "0.25", *calibration]}.items():
        folder = tmp_path / name
        command = ["pack", str(tmp_path / "mixtral"), "--method", "experts", "--dtype", "float32", "--no-evaluate"]
        assert main([*command, *more, "--out", str(folder)]) == 0
        assert "experts" in capfd.readouterr().out
        command = ["run", str(folder), "--prompt", PROMPT, "--max-new-tokens", "6"]
        texts = []
        for limit in ([], ["--dram", "60MB"]):
            assert main([*command, *limit]) == 0
            found = capfd.readouterr()
            assert "% of the experts were there when needed" in found.err
            texts.append(found.out.strip())
        assert len(set(texts)) == 1
        if name == "whole":
            assert texts[0] == tokenizer.decode(tokens[0]).strip()
            assert main([*command, "--dram", "1MB"]) == 2
            assert "MB are needed" in capfd.readouterr().err
    usage = [trace_uses(mixtral, layer) for layer in range(2)]
    for layer, uses in enumerate(usage):
        stored = Store.open(tmp_path / "mixed").layer(layer, "experts").ops
        bits = [bits_of(stored[op_name(expert)], 64) for expert in range(4)]
        assert bits == [2 if expert == uses.argmin() else 4 for expert in range(4)]


def trace_uses(mixtral, layer):
    """How often each expert is used by the text of the test above."""
    trace = record_routing(plain(mixtral), "mixtral", torch.arange(64), "a text", 2, 32)
    return trace.active(layer).sum((0, 1))


def test_spqr_alone_is_multiplied_packed_unless_told_otherwise():
    for form, weights, device, expected in (
        ("spqr", None, "cpu", "spqr_packed"),
        ("spqr", "decoded", "cpu", "spqr"),
        ("spqr", None, "cuda", "spqr"),
        ("endor", None, "cpu", "endor"),
        ("endor", "packed", "cpu", "endor_packed"),
    ):
        assert method_of(form, weights, device) == expected


def test_a_sparse_bitmask_checkpoint(model, tmp_path, capfd):
    assert pack(model, tmp_path / "checkpoint", "--format", "sparse-bitmask") == 0
    pruned, tokenizer, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    again = load_dense_model(tmp_path / "checkpoint")
    for name, parameter in pruned.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    capfd.readouterr()
    command = ["run", str(tmp_path / "checkpoint"), "--prompt", PROMPT, "--max-new-tokens", "6"]
    assert main(command) == 0
    tokens = pruned.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert capfd.readouterr().out.strip() == tokenizer.decode(tokens[0]).strip()
    assert main([*command, "--dram", "1GB"]) == 2
    assert "--dram: " in capfd.readouterr().err


def test_every_format_that_is_packed_can_be_run(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--pattern", "2:4", "--format", *FORMATS) == 0
    texts = set()
    for form in FORMATS:
        capfd.readouterr()
        command = ["run", str(tmp_path / "packed"), "--prompt", PROMPT, "--max-new-tokens", "4", "--format", form]
        assert main(command) == 0
        texts.add(capfd.readouterr().out)
        told = main([*command, "--weights", "packed"])
        assert told == (0 if FORMATS[form].has_matvec else 2)
        assert told == 0 or f"--weights packed: {form} has no product" in capfd.readouterr().err
    assert len(texts) == 1


def test_quality_before_and_after_is_told(model, tmp_path, capfd, monkeypatch):
    def text(corpus, tokenizer, split):
        return TEXT

    monkeypatch.setattr("toolkit.quality.load_tokens", text)
    dense, _ = load_model(str(model), dtype=torch.float32)
    pruned, _, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    before, after = (perplexity(each, TEXT, 512, 4) for each in (dense, pruned))
    for form in ("csr", SPARSE_BITMASK):
        arguments = ["--method", "magnitude", "--dtype", "float32", "--out", str(tmp_path / form), "--format", form]
        assert main(["pack", str(model), *arguments]) == 0
        words = f"perplexity {before:.1f} dense, {after:.1f} packed (wiki-slice, 4 windows of 512 tokens)"
        assert words in capfd.readouterr().out
    monkeypatch.setattr("toolkit.quality.load_tokens", lambda *_: torch.arange(9))
    assert main(["pack", str(model), *arguments[:-4], "--out", str(tmp_path / "short")]) == 0
    assert "not evaluated: 9 tokens do not fill one window of 512" in capfd.readouterr().out


COMPLAINTS = [
    ["run", "FOLDER", "--prompt", "x"],
    ["run", "FOLDER", "--prompt", ""],
    ["pack", "m", "--out", "FOLDER/no/where"],
    ["pack", "m", "--out", "FOLDER/out", "--sparsity", "1.5"],
    ["pack", "m", "--out", "FOLDER/out", "--pattern", "4:2"],
    ["pack", "m", "--out", "FOLDER/out", "--windows", "0"],
    ["pack", "m", "--out", "FOLDER/out", "--dtype", "int4"],
    ["pack", "m", "--out", "FOLDER/out", "--method", "guess"],
    ["pack", "m", "--out", "FOLDER/out", "--format", "gzip"],
    ["pack", "m", "--out", "FOLDER/out", "--method", "spqr", "--outliers", "2"],
    ["pack", "m", "--out", "FOLDER/out", "--method", "spqr", "--pattern", "2:4"],
    ["pack", "m", "--out", "FOLDER/out", "--head", "int4"],
    ["pack", "m", "--out", "FOLDER/out", "--head", "int8", "--format", "sparse-bitmask"],
    ["pack", "m", "--out", "FOLDER/out", "--method", "neurons", "--predictors", "guess"],
]


def test_the_names_that_complaints_know_without_torch_are_those_that_there_are():
    assert set(packers.PRUNING_METHODS) == {"dense", *METHODS}
    assert set(packers.FORMATS) == {*FORMATS, SPARSE_BITMASK}
    assert packers.PREDICTORS == KINDS
    assert (set(run.POLICIES), set(run.READERS)) == (set(POLICIES), set(READERS))


def test_help_lists_every_packer(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["pack", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for packer in PACKERS.values():
        assert f"{packer.name} {packer.help}" in text


def test_complaints_come_before_slow_imports(tmp_path):
    complaints = [[word.replace("FOLDER", str(tmp_path)) for word in arguments] for arguments in COMPLAINTS]
    code = f"""if True:
        import sys
        from toolkit.__main__ import main
        assert [main(arguments) for arguments in {complaints!r}] == [2] * {len(complaints)}
        assert not {{"torch", "transformers", "pandas", "jsonschema"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pack", "MODEL", "--out", "OUT", "--format", "gzip"], "unknown format 'gzip'"),
        (["pack", "MODEL", "--out", "OUT", "--format", "endor", "sparse-bitmask"], "a folder of its own"),
        (["pack", "MODEL", "--out", "OUT", "--format", "sparse-bitmask", "--int8"], "no place for scales"),
        (["pack", "MODEL", "--out", "OUT", "--method", "guess"], "unknown method 'guess'"),
        (["pack", "MODEL", "--out", "OUT", "--dtype", "int4"], "unknown dtype 'int4'"),
        (["pack", "MODEL", "--out", "OUT", "--method", "magnitude", "--sparsity", "1.5"], "sparsity"),
        (["pack", "MODEL", "--out", "OUT", "--sequence-length", "0"], "--sequence-length 0: expected a whole number"),
        (["pack", "MODEL", "--out", "MODEL"], "exists already"),
        (["pack", "MODEL", "--out", "OUT/below/nothing"], "--out no folder"),
        (["pack", "MODEL", "--out", "MODEL/config.json/x"], "--out "),
        (["pack", "MODEL", "--out", "/proc/packed"], "--out "),
        (["pack", "MODEL", "--out", "OUT" + 300 * "x"], "--out "),
        (["pack", "MODEL", "--out", "OUT", "--format", "two_four"], "add --pattern 2:4"),
        (["pack", "MODEL", "--out", "OUT", "--format", "spqr"], "use --method spqr without --format"),
        (["pack", "MODEL", "--out", "OUT", "--method", "spqr", "--outliers", "2"], "--outliers 2.0: expected a share"),
        (
            ["pack", "MODEL", "--out", "OUT", "--method", "spqr", "--sparsity", "0.5"],
            "--sparsity 0.5: an option of --method wanda",
        ),
        (["pack", "MODEL", "--out", "OUT", "--method", "spqr", "--pattern", "2:4"], "leave --pattern out"),
        (["pack", "MODEL", "--out", "OUT", "--method", "spqr", "--format", "endor"], "--format endor: an option of"),
        (["pack", "MODEL", "--out", "OUT", "--method", "spqr", "--int8"], "dense, not of spqr; leave --int8 out"),
        (
            ["pack", "MODEL", "--out", "OUT", "--outliers", "0.01"],
            "--outliers 0.01: an option of --method spqr, not of wanda; ",
        ),
        (["pack", "MODEL", "--out", "OUT", "--predictors", "gate"], "--predictors gate: an option of --method neurons"),
        (["pack", "MODEL", "--out", "OUT", "--method", "neurons", "--predictors", "x"], "unknown predictors 'x'"),
        (["pack", "MODEL", "--out", "OUT", "--method", "neurons", "--int8"], "dense, not of neurons; leave --int8 out"),
        (["pack", "MODEL", "--out", "OUT", "--method", "neurons", "--sparsity", "1"], "sparsity"),
        (["pack", "MODEL", "--out", "OUT", "--method", "experts", "--bits", "3"], "unknown --bits 3"),
        (["pack", "MODEL", "--out", "OUT", "--method", "experts", "--mixed", "2"], "--mixed 2.0: expected a share"),
        (["pack", "MODEL", "--out", "OUT", "--method", "experts", "--mixed", "0.5"], "--bits 16: give --bits 4"),
        (["pack", "MODEL", "--out", "OUT", "--method", "experts"], "is no mixture of experts"),
        (["run", "MODEL", "--prompt", ""], "--prompt is empty"),
        (["run", "MODEL", "--prompt", "a\udcff"], "--prompt is not UTF-8: its character 2"),
        (["run", "MODEL", "--prompt", "x", "--seed", "-1"], "--seed -1: expected a whole number from 0"),
        (["run", "MODEL", "--prompt", "x", "--seed", str(2**32)], "from 0 to 4294967295"),
        (["pack", "no/such/model", "--out", "OUT"], "unknown model"),
        (["run", "OUT", "--prompt", "x"], "no folder"),
        (["run", "MODEL", "--prompt", "x"], "not a sparse-bitmask checkpoint"),
        (["run", ".", "--prompt", "x"], "holds no index.json"),
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


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise():
    """Threads that spin lose nearly all their speed beside another busy process."""
    code = """if True:
        import os, runpy, sys
        sys.argv = ["toolkit", "run", "--help"]
        try:
            runpy.run_module("toolkit", run_name="__main__")
        finally:
            print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
    """
    for given, expected in ((None, "passive"), ("active", "active")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment |= {"OMP_WAIT_POLICY": given} if given else {}
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
        assert done.stdout.splitlines()[-1] == f"{expected} False"


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
    assert bytes_of("--dram", text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1e", "nan", "infGB", "1 2MB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="expected a size"):
        bytes_of("--dram", text)


def test_units_are_told_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    assert "500MB" in capsys.readouterr().out
    assert "GiB" in UNITS
