"""The examples of docs/extending.md do what it says, and the files that it names are there."""

import re
import textwrap
from dataclasses import dataclass
from typing import ClassVar, Self

import pytest
import torch
from ipywidgets import FloatSlider
from jaxtyping import Float, Float32
from matplotlib.figure import Figure
from torch import Tensor

from tests import naive_formats, naive_pruning
from tests.families import write_tokenizer
from tests.models.test_twins import TOYS
from tests.studies.test_variants import linears, pruned, tiny
from toolkit import paths
from toolkit.__main__ import main
from toolkit.commands.packers import PACKERS
from toolkit.errors import UserError
from toolkit.evidence.interactive import Interactive, stage
from toolkit.formats import FORMATS, decode, encode
from toolkit.formats.packed import DTYPES
from toolkit.measure.contestant import Decoding
from toolkit.measure.race import RUNTIMES, Race, run_race
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.offload.methods import RIVALS, Method
from toolkit.offload.model import OffloadedModel
from toolkit.offload.ways import Way
from toolkit.pattern import Pattern
from toolkit.predictors import (
    STORED,
    Samples,
    Scored,
    load_predictors,
    prediction_quality,
    save_predictors,
    with_limits,
)
from toolkit.storage.store import Store
from toolkit.studies.forms import FORMS, store

GUIDE = (paths.root() / "docs" / "extending.md").read_text(encoding="utf-8")


def example(word: str, **names):
    """The names that the code block with `word` defines."""
    blocks = map(textwrap.dedent, re.findall(r"^ *```python\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL))
    (block,) = (block for block in blocks if re.search(rf"^(class|def) {word}\b|^{word} = ", block, re.MULTILINE))
    names = {"__name__": __name__} | names
    exec(compile(block, "extending.md", "exec"), names)
    return names[word]


def test_the_files_and_tables_that_it_names_are_there():
    named = re.findall(r"`((?:toolkit|tests|kernels)/[\w/]+\.py)`", GUIDE)
    assert len(named) > 8
    assert [name for name in named if not (paths.root() / name).is_file()] == []
    tables = re.findall(r"`([A-Z]{4,})` in `([\w/]+\.py)`|`([A-Z]{4,})`\s+of\s+`([\w/]+\.py)`", GUIDE)
    assert len(tables) >= 6
    for first, file, other, its_file in tables:
        code = (paths.root() / (file or its_file)).read_text(encoding="utf-8")
        assert re.search(rf"^{first or other}\b.*= ", code, re.MULTILINE), first or other


@pytest.mark.parametrize("text", [None, "2:4"])
def test_the_pruning_method_is_what_its_oracle_says(text):
    method, oracle = example("RIA")(), example("ria", wanda=naive_pruning.wanda)
    pattern = Pattern.parse(text) if text else None
    for seed, shape in enumerate([(1, 4), (5, 16), (8, 40)]):
        generator = torch.Generator().manual_seed(seed)
        weight, inputs = (torch.randn(rows, shape[1], generator=generator) for rows in (shape[0], 32))
        found = method(weight, inputs.T @ inputs, 0.5, pattern)
        assert torch.equal(found, oracle(weight, inputs, 0.5, (2, 4) if text else None))


def test_the_quantisation_method_stores_a_model(monkeypatch):
    monkeypatch.setitem(FORMS, "int4, absmax", example("AbsMax").encode)
    model = pruned()
    before = [linear.weight.clone() for linear in linears(model)]
    assert 8 * store(model, "int4, absmax") == (4 + 16 / 64) * sum(weight.numel() for weight in before)
    for linear, dense in zip(linears(model), before, strict=True):
        step = dense.abs().amax(dim=1, keepdim=True) / 7
        assert ((linear.weight - dense).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_format_keeps_every_bit_and_refuses_what_its_check_tells(monkeypatch, dtype):
    monkeypatch.setitem(FORMATS, "ell", example("Ell"))
    for seed, shape in enumerate([(0, 0), (3, 0), (1, 1), (7, 33)]):
        generator = torch.Generator().manual_seed(seed)
        kind = naive_formats.BITS[dtype]
        limits = torch.iinfo(kind)
        matrix = torch.randint(limits.min, limits.max, shape, dtype=kind, generator=generator)  # NaNs among them
        matrix = matrix.masked_fill(torch.rand(shape, generator=generator) < 0.5, 0).view(dtype)
        packed = encode("ell", matrix)
        packed.check()
        again = type(packed).of_parts(shape, dtype, packed.tensors)
        assert naive_formats.same_bits(decode(again), naive_formats.canonical(matrix))
    packed = encode("ell", torch.eye(4, 8).to(dtype))
    packed.columns[0] = 8
    with pytest.raises(ValueError, match="columns reach beyond 8"):
        packed.check()


def test_the_predictor_counts_in_samples_and_is_kept_in_files(monkeypatch, tmp_path):
    names = {"dataclass": dataclass, "Scored": Scored, "ClassVar": ClassVar, "Self": Self, "Tensor": Tensor}
    often = example("Often", Float=Float, Float32=Float32, **names)
    monkeypatch.setitem(STORED, "often", often)
    outputs = torch.tensor([[1.0, 0, 0], [1, 2, 0], [1, 2, 0], [0, 3, 3]])  # fire 3, 3 and 1 times of 4
    samples = Samples((torch.zeros(4, 2),), (outputs,), (torch.ones(3),))
    predictors = often.fit(None, [0.0], samples)
    (row,) = prediction_quality(predictors, samples).itertuples()
    assert (row.predicted, row.recall, row.precision) == pytest.approx((2 / 3, 6 / 7, 6 / 8))
    assert row.nbytes == 3 * 4
    assert with_limits(predictors, samples, 0.99)[0].mask(samples.inputs[0]).all()
    save_predictors(tmp_path / "file", "tiny", predictors)
    (loaded,) = load_predictors(tmp_path / "file", "tiny")
    assert torch.equal(loaded.mask(samples.inputs[0]), predictors[0].mask(samples.inputs[0]))


def test_the_explorer_follows_its_slider():
    view = example("view", Figure=Figure, FloatSlider=FloatSlider, Interactive=Interactive, here=stage())
    assert view.sentence == "**50%** zeros, modelled"
    view.controls["sparsity"].value = 0.75
    assert view.sentence == "**75%** zeros, modelled"
    assert list(view.figure.axes[0].lines[0].get_ydata()) == [0, 0.75]


def test_the_packer_is_listed_checked_and_packs(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PACKERS, "global", example("PACKER"))
    command = ["pack", str(tmp_path / "tiny"), "--method", "global", "--out", str(tmp_path / "out"), "--no-evaluate"]
    with pytest.raises(SystemExit, match="0"):
        main(["pack", "--help"])
    assert "global     prune by weight, with one threshold" in capsys.readouterr().out
    assert main([*command, "--int8"]) == 2
    assert main([*command, "--sparsity", "2"]) == 2
    model = tiny()
    model.save_pretrained(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    assert main([*command, "--sparsity", "0.6", "--dtype", "float32"]) == 0
    assert Store.open(tmp_path / "out").model["method"] == "global"
    with OffloadedModel.open(tmp_path / "out", "endor") as opened:
        tokens = torch.arange(8)[None]
        sizes = torch.cat([linear.weight.detach().abs().flatten() for linear in linears(model)])
        limit = sizes.kthvalue(int(0.6 * len(sizes)) + 1).values
        for linear in linears(model):
            linear.weight.data[linear.weight.abs() < limit] = 0
        assert torch.equal(opened.model(tokens).logits, model(tokens).logits)


def test_the_contestant_takes_turns_and_may_not_be_wrong(monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    mapped = example("MappedModel")
    monkeypatch.setitem(RIVALS, "torch, mapped", Method("dense", by_torch=True))
    for name, runtime in (RUNTIMES | {"torch, mapped": mapped}).items():
        monkeypatch.delitem(RUNTIMES, name, raising=False)
        monkeypatch.setitem(RUNTIMES, name, runtime)
    ways = [(Way(name, device="cpu"), "storage") for name in ("dense", "torch, mapped", "accelerate")]
    spans = run_race(Race(Workload("toy-llama"), 3, ways, 2), tmp_path)
    turns = spans.groupby("method")
    assert set(turns.groups) == {"dense", "torch, mapped", "accelerate"}
    assert turns["repetition"].nunique().eq(2).all()
    assert turns["stored_bytes"].first()["torch, mapped"] == turns["stored_bytes"].first()["accelerate"]
    monkeypatch.setattr(mapped, "token", lambda self, number: Decoding.token(self, number) + (number == 4))
    with pytest.raises(UserError, match="torch, mapped gives another output than the model in memory"):
        run_race(Race(Workload("toy-llama"), 3, ways, 1), tmp_path)
