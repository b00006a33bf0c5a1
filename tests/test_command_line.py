import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import CASES, write
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.families import WORDS, write_tokenizer
from tests.offload.pretend import PretendGpu
from tests.refusals import refused_command as refused
from toolkit import formats, paths
from toolkit.__main__ import main
from toolkit.commands import packers, run
from toolkit.commands.folder import method_of
from toolkit.commands.packers import PACKERS, SPARSE_BITMASK
from toolkit.errors import UserError
from toolkit.formats import FORMATS, decode
from toolkit.formats.scaled import Scaled
from toolkit.interchange import load_dense_model
from toolkit.measure.memory_group import MemoryGroup, missing
from toolkit.models import load_model
from toolkit.models.head import head_parts, rows_of_part, untied_head
from toolkit.models.plain import plain
from toolkit.offload.neuron_folder import KINDS
from toolkit.predictors import load_predictors, predicted
from toolkit.quality import perplexity
from toolkit.quantization.smoothquant import load_smoothed, round_to_int8
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import METHODS, Calibration, load_changed, load_pruned
from toolkit.sparsity.recording import record_routing
from toolkit.storage.experts import bits_of, op_name
from toolkit.storage.store import Store

PROMPT = "7 31 5"
TEXT = torch.arange(2100) % WORDS
CALIBRATION, FEW = Calibration(windows=2, sequence_length=32), ["--windows", "2", "--sequence-length", "32"]


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
    """The tiny models that `load_pruned` keeps have no use later."""
    monkeypatch.setattr("toolkit.paths.cache_dir", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def _text(monkeypatch):
    """Models are calibrated and judged on `TEXT`."""
    for module in ("sparsity.calibration", "quality"):
        monkeypatch.setattr(f"toolkit.{module}.load_tokens", lambda corpus, tokenizer, split: TEXT)


def packing(model, out, *more):
    given = ["--method", "magnitude", "--dtype", "float32", "--no-evaluate", "--out", str(out)]
    return ["pack", str(model), *given, *more]


def pack(*given):
    return main(packing(*given))


def run_command(folder, *more, tokens=6):
    return ["run", str(folder), "--prompt", PROMPT, "--max-new-tokens", str(tokens), *more]


def generated(model, tokenizer):
    """The text of a model in memory after the prompt."""
    tokens = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    return tokenizer.decode(tokens[0]).strip()


def test_pack_and_run_give_what_the_pruned_model_gives(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--format", "endor", "dense") == 0
    # 4352 weights, and a block on disk for each of 14 matrices
    sizes = "329.4%; 32.00 bits a weight, 105.41 on disk with padding"
    assert f"dense 0.1 MB ({sizes})" in capfd.readouterr().out
    expected = generated(*load_pruned(str(model), "magnitude", dtype=torch.float32)[:2])
    draft = ["--draft", str(tmp_path / "packed"), "--draft-tokens", "2"]
    dense = ["--format", "dense", "--policy", "sequential", "--reader", "aio", "--no-verify"]
    for more in ([], dense, ["--dram", "20MB"], draft):
        assert main(run_command(tmp_path / "packed", *more)) == 0
        found = capfd.readouterr()
        assert found.out.strip() == expected
        assert "6 tokens in" in found.err
    assert main(run_command(tmp_path / "packed", "--temperature", "1", "--seed", "1")) == 0


@pytest.mark.parametrize(
    ("trouble", "status", "line"),
    [
        (UserError("other logits: off by 5.2"), 2, "other logits: off by 5.2"),
        (KeyboardInterrupt(), 130, "the same command goes on where it was"),
    ],
)
def test_a_folder_with_other_logits_is_not_left_behind(model, tmp_path, capfd, monkeypatch, trouble, status, line):
    def check(folder, packed, dram_bytes):
        assert (folder / "index.json").is_file()
        raise trouble

    monkeypatch.setattr("toolkit.offload.logit_check.check_logits", check)
    assert pack(model, tmp_path / "packed") == status
    assert not (tmp_path / "packed").exists()
    assert line in capfd.readouterr().err


def test_int8_weights_give_what_the_rounded_model_gives(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--int8", "--format", "endor", "dense", *FEW) == 0
    capfd.readouterr()
    expected, tokenizer = load_smoothed(str(model), "magnitude", calibration=CALIBRATION, dtype=torch.float32)
    round_to_int8(expected)
    for how in (["--format", "endor"], ["--format", "dense"], ["--weights", "packed"]):
        assert main(run_command(tmp_path / "packed", *how)) == 0
        assert capfd.readouterr().out.strip() == generated(expected, tokenizer)
    assert Store.open(tmp_path / "packed").model["int8"] is True


def test_spqr_is_packed_and_run_without_a_flag(model, tmp_path, capfd):
    folder = tmp_path / "packed"
    command = ["pack", str(model), "--method", "spqr", "--outliers", "0.02", "--head", "int8", "--dtype", "float32"]
    assert main([*command, *FEW, "--out", str(folder)]) == 0
    found = load_changed(str(model), SpQR(0.02), CALIBRATION, torch.float32)
    for part in head_parts(untied_head(found.model), rows_of_part(found.model)):
        part.weight.data.copy_(decode(Scaled.encode("dense", part.weight)))
    dense = load_model(str(model), dtype=torch.float32)[0]
    before, after = (perplexity(each, TEXT, 512, 4) for each in (dense, found.model))
    told = capfd.readouterr().out
    assert f"perplexity {before:.1f} dense, {after:.1f} packed" in told
    store, weights = Store.open(folder), sum(of.rows * of.columns for of in found.statistics)
    weights += found.model.get_output_embeddings().weight.numel()
    assert store.variants == ("spqr",)
    assert f"; {8 * store.tensor_bytes('spqr') / weights:.2f} bits a weight, " in told
    assert {key: store.model[key] for key in ("method", "outliers")} == {"method": "spqr", "outliers": 0.02}
    for more in ([], ["--weights", "decoded"], ["--dram", "20MB"]):
        assert main(run_command(folder, *more)) == 0
        assert capfd.readouterr().out.strip() == generated(found.model, found.tokenizer)


def test_the_quality_of_a_model_with_thresholds_is_not_called_dense(model, tmp_path, capfd, monkeypatch):
    sparse = shutil.copytree(model, tmp_path / "sparse")
    config = json.loads((sparse / "config.json").read_text()) | {"activation_thresholds": [0.1, 0.1]}
    (sparse / "config.json").write_text(json.dumps(config))
    before = perplexity(load_model(str(sparse), dtype=torch.float32)[0], TEXT, 512, 4)
    command = ["pack", str(sparse), "--method", "neurons", "--dtype", "float32", "--out", str(tmp_path / "packed")]
    assert main([*command, *FEW, "--predictors", "gate"]) == 0
    assert f"perplexity {before:.1f} with its thresholds, " in capfd.readouterr().out
    monkeypatch.setattr("toolkit.offload.model.open_device", lambda name: PretendGpu())
    command = run_command(tmp_path / "packed", "--device", "cuda", tokens=3)
    assert main(command) == 0
    told = r"[1-9]\d*% of the neurons on the device, \d+% .* MB DRAM and .* MB device held"
    assert re.search(told, capfd.readouterr().err)
    refused([*command, "--device-memory", "1KB"], "a device budget of ", capfd)


def test_git_ignores_what_the_documented_commands_write():
    """Without this, results say that they were made with uncommitted changes."""
    texts = [(paths.root() / name).read_text(encoding="utf-8") for name in ("README.md", "docs/commands.md")]
    folders = {folder for text in texts for folder in re.findall(r"--out (\S+)", text)}
    assert "packed" in folders
    for folder in folders:
        ignored = subprocess.run(["git", "-C", str(paths.root()), "check-ignore", "-q", f"{folder}/"], check=False)
        assert ignored.returncode == 0, f"{folder}: add it to .gitignore"


def test_a_model_by_neuron_is_packed_and_run_without_a_flag(model, tmp_path, capfd):
    folder = tmp_path / "packed"
    command = ["pack", str(model), "--method", "neurons", "--sparsity", "0.6", "--dtype", "float32"]
    assert main([*command, *FEW, "--predictors", "gate", "--out", str(folder)]) == 0
    assert "bundled" in capfd.readouterr().out
    thresholds = torch.tensor(json.loads((folder / "model" / "config.json").read_text())["activation_thresholds"])
    predictors = load_predictors(folder / "model" / "predictors.safetensors", str(model))
    dense, tokenizer = load_model(str(model), dtype=torch.float32)
    with predicted(dense, thresholds, predictors):
        expected = generated(dense, tokenizer)
    for more in ([], ["--dram", "20MB"], ["--neurons", "held"]):
        assert main(run_command(folder, *more)) == 0
        found, which = capfd.readouterr(), "held" if more[:1] == ["--neurons"] else "predicted"
        assert found.out.strip() == expected or which == "held"
        assert re.search(f"of the neurons in DRAM .* computed with the {which} ones", found.err)
    refused(run_command(folder, "--dram", "1MB"), "MB are needed", capfd)
    for more in (["--weights", "packed"], ["--policy", "sequential"]):
        refused(run_command(folder, *more), f"{more[0]}: ", capfd)


def test_a_mixture_is_packed_by_expert_and_run_without_a_flag(model, tmp_path, capfd):
    """As it is, and with the experts that a text uses least in 2 bits."""
    dense, tokenizer = load_model(str(model), dtype=torch.float32)
    config = dense.config.to_dict() | {"hidden_size": 64, "head_dim": 32, "sliding_window": None}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    del config["architectures"], config["model_type"]
    mixtral = MixtralForCausalLM(MixtralConfig(**config)).eval()
    mixtral.save_pretrained(tmp_path / "mixtral")
    tokenizer.save_pretrained(tmp_path / "mixtral")
    for name, more in {"whole": [], "mixed": ["--bits", "4", "--mixed", "0.25", *FEW]}.items():
        folder = tmp_path / name
        command = ["pack", str(tmp_path / "mixtral"), "--method", "experts", "--dtype", "float32", "--no-evaluate"]
        assert main([*command, *more, "--out", str(folder)]) == 0
        assert "experts" in capfd.readouterr().out
        texts = set()
        for limit in ([], ["--dram", "60MB", "--residency", "lfu"]):
            assert main(run_command(folder, *limit)) == 0
            found = capfd.readouterr()
            assert "% of the experts were there when needed" in found.err
            texts.add(found.out.strip())
        assert len(texts) == 1
        assert name == "mixed" or texts == {generated(mixtral, tokenizer)}
    for layer in range(2):
        uses = trace_uses(mixtral, layer)
        stored = Store.open(tmp_path / "mixed").layer(layer, "experts").ops
        bits = [bits_of(stored[op_name(expert)], 64) for expert in range(4)]
        assert bits == [2 if expert == uses.argmin() else 4 for expert in range(4)]


def trace_uses(mixtral, layer):
    """How often each expert is used by the text of the test above."""
    trace = record_routing(plain(mixtral), "mixtral", torch.arange(64), "a text", 2, 32)
    return trace.active(layer).sum((0, 1))


def test_formats_with_a_product_are_multiplied_packed_unless_told_otherwise():
    for form, weights, device, expected in (
        ("spqr", None, "cpu", "spqr_packed"),
        ("spqr", "decoded", "cpu", "spqr"),
        ("spqr", None, "cuda", "spqr"),
        ("zstd", None, "cpu", "zstd"),
    ):
        assert method_of(form, weights, device) == expected


def test_a_sparse_bitmask_checkpoint(model, tmp_path, capfd):
    assert pack(model, tmp_path / "checkpoint", "--format", "sparse-bitmask") == 0
    pruned, tokenizer, _ = load_pruned(str(model), "magnitude", dtype=torch.float32)
    again = load_dense_model(tmp_path / "checkpoint")
    for name, parameter in pruned.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    capfd.readouterr()
    assert main(run_command(tmp_path / "checkpoint")) == 0
    assert capfd.readouterr().out.strip() == generated(pruned, tokenizer)
    refused(run_command(tmp_path / "checkpoint", "--dram", "1GB"), "--dram: ", capfd)


def test_every_format_that_is_packed_can_be_run(model, tmp_path, capfd):
    assert pack(model, tmp_path / "packed", "--pattern", "2:4", "--format", *FORMATS) == 0
    texts = set()
    for form in FORMATS:
        capfd.readouterr()
        assert main(run_command(tmp_path / "packed", "--format", form, tokens=4)) == 0
        texts.add(capfd.readouterr().out)
    assert len(texts) == 1
    refused(run_command(tmp_path / "packed", "--format", "zstd", "--weights", "packed"), "zstd", capfd)


# what a command says of its arguments before it imports a large package
EARLY = [
    (["rnu", "OUT"], "unknown command 'rnu'"),
    (["pack", "MODEL", "--out", "OUT", "--format", "gzip"], "unknown --format 'gzip'"),
    (["pack", "MODEL", "--out", "OUT", "--sparsity", "1.5"], "sparsity"),
    (["pack", "MODEL", "--out", "OUT/below/nothing"], "--out "),
    (["pack", "MODEL", "--out", "OUT", "--outliers", "0.01"], "--outliers 0.01: an option of --method spqr"),
    (["pack", "MODEL", "--out", "OUT", "--method", "experts", "--mixed", "0.5"], "--bits 16: give --bits 4"),
    (["run", "OUT", "--prompt", "the", "--context", "512"], "--context 512: --memory"),
    (["run", "MODEL", "--prompt", ""], "--prompt is empty"),
    (["run", "MODEL", "--prompt", "a\udcff"], "--prompt is not UTF-8"),
    (["run", "OUT", "--prompt", "x"], "no folder"),
    (["run", "MODEL", "--prompt", "x", "--dram", "much"], "--dram much"),
]
LATE = [
    (["pack", "MODEL", "--out", "OUT", "--format", "two_four"], "add --pattern 2:4"),
    (["pack", "MODEL", "--out", "MODEL"], "exists already"),
    (["pack", "MODEL", "--out", "OUT", "--method", "experts"], "is no mixture of experts"),
    (["pack", "no/such/model", "--out", "OUT"], "unknown model"),
    (["run", "MODEL", "--prompt", "x"], "not a sparse-bitmask checkpoint"),
    (["run", "MODEL", "--prompt", "x", "--device-memory", "all"], "--device-memory all"),
    (["run", "MODEL", "--prompt", "x", "--device", "tpu"], "unknown device 'tpu'"),
]


def test_bad_input_is_one_line_and_leaves_nothing(model, tmp_path, capfd):
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    for arguments, words in EARLY + LATE:
        refused([places.get(word, word.replace("OUT", places["OUT"])) for word in arguments], words, capfd)
        assert not (tmp_path / "out").exists()


ODD_SETTINGS = (
    ("config.json", {"sliding_window": 0}, "LlamaForCausalLM: its own code fails"),
    ("generation_config.json", {"penalty_alpha": 0.6, "top_k": 4}, "asks for code on the hub (custom_generate)"),
    ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"1": 1, "7": 7}, "unk_token": "?"}}, None),
)


@pytest.mark.parametrize(("name", "changed", "words"), ODD_SETTINGS)
def test_settings_that_break_a_library_are_one_line_before_anything_is_written(
    model, tmp_path, capfd, name, changed, words
):
    """A tokenizer that fails on some texts only is no reason."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | changed))
    if words:
        refused(packing(folder, tmp_path / "out"), words, capfd)
    else:
        assert pack(folder, tmp_path / "out") == 0
    assert (tmp_path / "out").exists() == (words is None)


def test_the_names_that_complaints_know_without_torch_are_those_that_there_are():
    assert set(packers.PRUNING_METHODS) == {"dense", *METHODS}
    assert set(packers.FORMATS) == {*FORMATS, SPARSE_BITMASK}
    assert packers.PREDICTORS == KINDS


def test_help_lists_every_packer(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["pack", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for packer in PACKERS.values():
        assert f"{packer.name} {packer.help}" in text


def test_complaints_come_before_slow_imports(model, tmp_path):
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    given = [[places.get(word, word.replace("OUT", places["OUT"])) for word in arguments] for arguments, _ in EARLY]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "index.json").write_text("{}")
    code = f"""if True:
        import sys
        from toolkit.__main__ import main
        assert [main(arguments) for arguments in {given!r}] == [2] * {len(given)}
        assert main(["plan", {str(tmp_path / "packed")!r}]) == 2  # before the machine is looked at
        assert not {{"torch", "transformers", "pandas", "jsonschema"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


UNUSED = (
    "torch._dynamo torch._inductor torch.distributed.tensor accelerate datasets matplotlib pandas PIL pyarrow scipy"
)
UNUSED += " sklearn sympy"
MOST_BYTES = 115_000_000  # beside torch and weights: 96 MB measured, 37 more with SymPy


def test_run_imports_no_package_for_nothing(model, tmp_path):
    """A folder and a file, in one process. Each package takes memory that weights could have."""
    assert pack(model, tmp_path / "folder") == 0
    write(CASES["qwen2"].model(), CASES["qwen2"], tmp_path / "file")
    commands = [run_command(tmp_path / kind, tokens=2) for kind in ("folder", "file")]
    commands[1][3] = "the he"
    assert [main(command) for command in commands] == [0, 0]  # kernels are compiled and kept
    code = f"""if True:
        import sys
        import torch
        from toolkit.__main__ import main
        from toolkit.memory_limits import anonymous_bytes
        before = anonymous_bytes()
        for command in {commands!r}:
            assert main(command) == 0
            taken = anonymous_bytes() - before
            assert not [name for name in {UNUSED.split()} if sys.modules.get(name)], command
            assert taken <= {MOST_BYTES}, taken
            print("taken", taken)
        import torch._dynamo
        assert torch.compiler.disable(len) is not len  # the compiler itself is there afterwards
        from transformers.utils import is_accelerate_available, is_vision_available
        assert is_accelerate_available() and is_vision_available()
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_least_limit_of_a_process_that_is_named_works_in_a_cgroup_of_its_size(model, tmp_path):
    assert pack(model, tmp_path / "packed") == 0
    command = [sys.executable, "-P", "-m", "toolkit", *run_command(tmp_path / "packed", "--context", "64", "--memory")]
    done = subprocess.run([*command, "100MB"], capture_output=True, text=True)
    assert done.returncode == 2
    least = int(re.search(r"100 MB for the process is too small: (\d+) MB are needed", done.stderr)[1])
    with MemoryGroup() as group:
        group.limit(least * 10**6)
        done = subprocess.run(
            [*command, f"{least}MB"], preexec_fn=lambda: group.add(os.getpid()), capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    peak, limit = map(int, re.search(r"^peak (\d+) of (\d+) MB$", done.stderr, re.MULTILINE).groups())
    assert peak <= limit == least


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


def test_an_interruption_in_the_first_block_leaves_nothing(model, tmp_path, monkeypatch):
    calls, encode = [], formats.encode

    def interrupted(name, weight):
        calls.append(name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(name, weight)

    monkeypatch.setattr("toolkit.storage.packing.encode", interrupted)
    (tmp_path / "here").mkdir()
    assert pack(model, tmp_path / "here" / "packed") == 130
    assert list((tmp_path / "here").iterdir()) == []


def test_a_prompt_of_a_process_without_a_locale_is_utf8():
    """Python keeps bytes beyond ASCII as letters of their own there."""
    assert run.checked_prompt("5 é".encode().decode("ascii", "surrogateescape")) == "5 é"
    assert run.checked_prompt("5 é") == "5 é"
    with pytest.raises(UserError, match="its character 3 is a broken byte"):
        run.checked_prompt(b"5 \xff".decode("ascii", "surrogateescape"))
