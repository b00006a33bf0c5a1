"""`pack` reads, changes and writes one decoder block at a time: the same bytes as with the whole model in memory."""

import json
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.families import WORDS, load_family
from toolkit import tensor_files
from toolkit.commands.packers import HEAD_OUTLIERS, HEAD_WINDOWS, PACKERS
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.models import loading
from toolkit.models.blocks import cast_parameters
from toolkit.models.on_demand import is_on_demand
from toolkit.offload import neuron_folder
from toolkit.offload.by_neuron import PREDICTORS, USAGE
from toolkit.offload.logit_check import check_stored
from toolkit.predictors import STORED, Samples, save_predictors, with_limits
from toolkit.quantization.expert_bits import bits_by_usage
from toolkit.quantization.smoothquant import fold, smoothing_factors
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import Calibration, Magnitudes
from toolkit.sparsity.grams import head_gram
from toolkit.sparsity.layerwise import Pruning, change_blocks
from toolkit.sparsity.recording import record_routing
from toolkit.sparsity.statistics import save_usage, usage_of
from toolkit.sparsity.treatment import Treatment
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import ChangedLinears, Linears, pack_model
from toolkit.storage.shards import raw
from toolkit.storage.unfinished import Unfinished

TOKENS = torch.randint(WORDS, (64 * 6,), generator=torch.Generator().manual_seed(1))
CUT = Calibration("text", 4, 48)
DEFAULTS = {"corpus": "text", "windows": CUT.windows, "sequence_length": CUT.sequence_length, "dtype": None}
# tied and not, a fused gate, transposed weights, arguments that differ by window, mixtures
QUICK, SLOW = ["Llama, tied", "Qwen3-MoE"], ["Phi-3", "OPT", "Gemma3n", "Mixtral"]
MIXTURES = {"Mixtral", "Qwen3-MoE"}
METHODS = {
    "dense": {"format": ["dense", "endor"]},
    "dense, int8": {"int8": True, "head": "int8"},
    "magnitude": {"head": "dense"},
    "wanda": {"format": ["endor", "zstd"]},
    "wanda, int8": {"int8": True, "pattern": "2:4", "head": "spqr"},
    "sparsegpt": {"pattern": "2:4"},
    "spqr": {"head": "spqr", "outliers": 0.02},
    "neurons": {},
    "neurons, trained": {"predictors": "low_rank"},
    "neurons, unpredicted": {"predictors": "none", "head": "spqr"},
    "experts": {"head": "dense"},
    "experts, mixed": {"bits": 4, "mixed": 0.5},
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, one_thread):
    """The text, and no tokenizer."""
    monkeypatch.setattr("toolkit.quality.load_tokens", lambda *_: TOKENS)
    monkeypatch.setattr("toolkit.sparsity.calibration.load_tokens", lambda *_: TOKENS)
    monkeypatch.setattr("toolkit.hub.read_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr("toolkit.formats.spqr.fastest", SpQRMatrix.from_quantised)  # else the clock chooses


def ways_of(family: str) -> list[str]:
    """All ways; of the mixture of each day one that changes the experts' linears, and those of experts and neurons."""
    return ["wanda", "neurons", "experts", "experts, mixed"] if family == QUICK[1] else [*METHODS]


def options_of(way: str, model: str, out: Path, begin=lambda model, layout: None) -> Namespace:
    method = way.partition(",")[0]
    own = {option.name: option.default for option in PACKERS[method].options}
    return Namespace(method=method, model=model, out=out, begin=begin, **DEFAULTS, **own | METHODS[way])


def pack_by_block(way: str, model: str, out: Path) -> None:
    def begin(opened: nn.Module, _) -> Unfinished:
        assert is_on_demand(opened)
        return Unfinished(out.with_name(f"{out.name}-unfinished"), {"way": way})

    PACKERS[way.partition(",")[0]].pack(options_of(way, model, out, begin))


def pack_whole(way: str, name: str, out: Path, dtype: torch.dtype) -> None:
    """As `pack` did it before: the model is changed in memory, block after block, then rounded, then written."""
    options = options_of(way, name, out)
    unchanged = options.method == "experts" or (options.method == "dense" and not options.int8)
    model = loading.load_model(name, torch.bfloat16 if unchanged else dtype)[0]
    windows, layout, recipe, files, treatment = CUT.draw(TOKENS), None, None, None, None
    if options.method in ("magnitude", "wanda", "sparsegpt"):
        list(change_blocks(model, Pruning.by(options.method, options.sparsity, options.pattern), windows))
    if getattr(options, "int8", False):
        fold(model, smoothing_factors(model, windows))
    if options.method == "spqr":
        matrices = [block.matrices for block in change_blocks(model, SpQR(options.outliers), windows)]
        treatment, layout = Treatment(), ChangedLinears("spqr", SpQRMatrix.from_quantised)
        treatment.treat = lambda number, _: matrices[number]
        recipe = {"method": "spqr", "outliers": options.outliers}
    elif options.method == "neurons":
        layout, files = neurons(model, name, options)
    elif options.method == "experts":
        layout = WholeExperts(experts_bits(model, name, options))
    else:
        pack = Scaled.encode if options.int8 else encode
        layout = Linears({form: partial(pack, form) for form in options.format})
        recipe = {key: getattr(options, key) for key in ("method", "sparsity", "pattern", "int8")}
    cast_parameters(model, torch.bfloat16)
    model.config.dtype = torch.bfloat16
    head = head_packer(model, windows, options.head)
    pack_model(model, out, layout, name, None, recipe, head, files, treatment)


def head_packer(model: nn.Module, windows: torch.Tensor, form: str):
    if form == "whole":
        return None
    if form == "spqr":
        gram = head_gram(model, windows[:HEAD_WINDOWS])
        return lambda weight: SpQRMatrix.from_quantised(SpQR(HEAD_OUTLIERS)(weight.float(), gram), model.dtype)
    return partial(Scaled.encode if form == "int8" else encode, "dense")


def neurons(model: nn.Module, name: str, options: Namespace):
    cut = {"windows": CUT.windows, "sequence_length": CUT.sequence_length}
    thresholds = Magnitudes.measure(model, TOKENS, **cut).thresholds(options.sparsity)
    kind = options.predictors
    if kind != "low_rank":
        cut["windows"] = neuron_folder.SAMPLED
    samples = Samples.record(model, thresholds, TOKENS, **cut)
    predictors = [None] * samples.layers if kind == "none" else STORED[kind].fit(model, thresholds.tolist(), samples)
    if kind == "low_rank":
        predictors = with_limits(predictors, samples, neuron_folder.KEPT)
    usage = [samples.active(layer).float().mean(0) for layer in range(samples.layers)]

    def files(place: Path) -> None:
        save_usage(place / USAGE, name, usage)
        if kind != "none":
            save_predictors(place / PREDICTORS, name, predictors)

    needs = neuron_folder.neurons_needed(samples, predictors)
    return Neurons(thresholds.tolist(), needs=needs), files


def experts_bits(model: nn.Module, name: str, options: Namespace):
    if not options.mixed:
        return None
    trace = record_routing(model, name, TOKENS, "text", CUT.windows, CUT.sequence_length)
    usage = [usage_of(trace, layer).numpy() for layer in range(trace.layers)]
    return bits_by_usage(usage, options.mixed, options.bits)


def contents(folder: Path) -> dict[str, object]:
    """The files of a folder; words and tensors of those by the library safetensors, since their order varies."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    found: dict[str, object] = {}
    for name, path in sorted(files.items()):
        if name.startswith("model/") and path.suffix == ".safetensors":
            about, tensors = tensor_files.load(path, safe_open(path, "pt").metadata()["kind"])
            about.pop("sha256", None)
            found[name] = about, {key: raw(tensor).tobytes() for key, tensor in tensors.items()}
        elif name == "index.json":
            index = json.loads(path.read_bytes())
            index.pop("sha256", None)
            index["model"].pop("source", None)  # a model in memory has none
            found[name] = index | {"files": sorted(index["files"])}
        else:
            found[name] = path.read_bytes()
    return found


def refusal(pack, *arguments) -> str | None:
    """The words in which `pack` refuses a model; None if it packs it."""
    try:
        pack(*arguments)
    except UserError as error:
        return re.sub(r"\d+%", "", str(error))
    return None


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(it, marks=pytest.mark.slow) for it in SLOW)])
def test_the_bytes_are_those_of_the_whole_model(tmp_path, monkeypatch, family):
    types = [torch.float32, torch.bfloat16]
    stored, computed = types if family in QUICK[:1] + SLOW[::2] else types[::-1]
    monkeypatch.setattr("toolkit.models.fast_dtype", lambda: computed)
    name = str(tmp_path / "model")
    load_family(family, tmp_path / "model", stored)
    done = set()
    for at, way in enumerate(ways_of(family)):
        refused = refusal(pack_whole, way, name, tmp_path / f"{at} whole", computed)
        assert refusal(pack_by_block, way, name, tmp_path / f"{at} blocks") == refused
        if refused:
            continue
        whole, blocks = (contents(tmp_path / f"{at} {name}") for name in ("whole", "blocks"))
        assert [name for name in whole.keys() | blocks.keys() if whole.get(name) != blocks.get(name)] == [], way
        check_stored(tmp_path / f"{at} blocks")
        done.add(way.partition(",")[0])
    packers = {*PACKERS} - {"kept", "neurons" if family in MIXTURES else "experts"}
    assert done == packers & {way.partition(",")[0] for way in ways_of(family)}


@pytest.mark.parametrize(("family", "way"), [("Llama, tied", "wanda"), ("Mixtral", "experts, mixed")])
def test_a_head_that_is_packed_later_gives_the_bytes_of_one_packed_at_once(tmp_path, monkeypatch, family, way):
    monkeypatch.setattr("toolkit.models.fast_dtype", lambda: torch.bfloat16)
    monkeypatch.setattr("toolkit.interchange.reading.load_tokenizer", lambda folder: None)
    load_family(family, tmp_path / "model", torch.bfloat16)
    name = str(tmp_path / "model")
    for head in ("whole", "int8"):
        monkeypatch.setitem(METHODS, way, METHODS[way] | {"head": head})
        pack_by_block(way, name, tmp_path / head)
    monkeypatch.setitem(METHODS, "kept", {"head": "int8"})
    pack_by_block("kept", str(tmp_path / "whole"), tmp_path / "later")
    at_once, later = contents(tmp_path / "int8"), contents(tmp_path / "later")
    assert [name for name in at_once.keys() | later.keys() if at_once.get(name) != later.get(name)] == []
    check_stored(tmp_path / "later")


KILLED = ["wanda, int8", "experts, mixed", "neurons, trained", "Gemma3n, spqr"]


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_process_costs_one_block(tmp_path, monkeypatch, case):
    named, way = case.startswith("Gemma3n"), case.removeprefix("Gemma3n, ")
    family = "Gemma3n" if named else "Mixtral" if "experts" in way else "Qwen2"
    monkeypatch.setattr("toolkit.models.fast_dtype", lambda: torch.bfloat16)
    load_family(family, tmp_path / "model", torch.bfloat16)
    name, out = str(tmp_path / "model"), tmp_path / "killed"
    pack_by_block(way, name, tmp_path / "whole")
    note = Unfinished.note

    def killed(unfinished: Unfinished, shard, runs) -> None:
        if shard.file.startswith("layer-001"):
            raise KeyboardInterrupt
        note(unfinished, shard, runs)

    monkeypatch.setattr(Unfinished, "note", killed)
    with pytest.raises(KeyboardInterrupt):
        pack_by_block(way, name, out)
    assert not out.exists()
    written: list[str] = []
    monkeypatch.setattr(
        Unfinished, "note", lambda one, shard, runs: written.append(shard.file) or note(one, shard, runs)
    )
    pack_by_block(way, name, out)
    assert contents(out) == contents(tmp_path / "whole")
    assert not any(file.startswith("layer-000") for file in written)


def test_another_recipe_begins_anew(tmp_path):
    one = Unfinished(tmp_path / "unfinished", {"sparsity": 0.5})
    one.finish(0, {"norm": torch.ones(2)}, {"hidden": torch.zeros(1)})
    same, other = (Unfinished(one.folder, {"sparsity": zeros}) for zeros in (0.5, 0.6))
    assert (same.number, same.other, other.number, other.other) == (1, False, 0, True)


def test_layers_of_more_digits_than_three_are_told_apart(tmp_path):
    """Parts of a head are layers: a small model with a large vocabulary has more than a thousand."""
    one = Unfinished(tmp_path / "unfinished", {})
    one.finish(299, {"norm": torch.ones(2)}, {"hidden": torch.zeros(1)})
    shards = [one.folder / f"layer-{number}.dense.safetensors" for number in (299, 300, 1000, 2999)]
    for shard in shards:
        shard.touch()
    assert Unfinished(one.folder, {}).number == 300
    assert [shard.exists() for shard in shards] == [True, False, False, False]
