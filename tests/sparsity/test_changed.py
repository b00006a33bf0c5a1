"""Changed models: made once, read back to the bit, keyed by whatever changes the result, resumed at their block."""

import logging
import weakref
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.quantization.rtn import RoundToNearest
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import METHODS, Calibration, LayerStatistics, calibration, changed, load_changed, load_pruned
from toolkit.sparsity.grams import walk
from toolkit.sparsity.layerwise import Pruning, change_blocks
from toolkit.sparsity.sparsegpt import SparseGPT

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 16
DTYPES = (torch.float32, torch.bfloat16)  # in turns
CALIBRATION = Calibration(windows=3, sequence_length=LENGTH)
CALIBRATED = {"calibration": CALIBRATION, "dtype": torch.float32}
CHANGES = {name: Pruning.by(name) for name in METHODS} | {"spqr": SpQR(), "rtn": RoundToNearest(3, 8)}
WANDA = CHANGES["wanda"]


@pytest.fixture
def bench(tiny, tokens, tmp_path, monkeypatch):
    """A tiny model and text in place of the real ones, an empty cache, and the numbers of the blocks changed."""
    made = []

    def counted(*args, first, **kwargs):
        for number, block in enumerate(change_blocks(*args, first=first, **kwargs), first):
            made.append(number)
            yield block

    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(changed, "load_model", lambda name, dtype: (tiny(name, blocks=2).to(dtype), "tokenizer"))
    monkeypatch.setattr(calibration, "load_tokens", lambda corpus, tokenizer, split: tokens)
    monkeypatch.setattr(changed, "change_blocks", counted)
    return made


def same(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize(("change", "dtype"), zip(CHANGES.values(), cycle(DTYPES), strict=False), ids=CHANGES)
def test_the_second_call_reads_what_the_first_made(bench, tiny, tokens, change, dtype):
    first, second = (load_changed("llama", change, CALIBRATION, dtype) for _ in range(2))
    assert bench == [0, 1]
    assert first.tokenizer == "tokenizer"
    assert same(first.model, second.model)
    assert first.statistics == second.statistics
    assert {type(of) for of in second.statistics} == {LayerStatistics}

    expected = tiny("llama", blocks=2).to(dtype)
    assert not same(first.model, expected)
    list(change_blocks(expected, change, CALIBRATION.draw(tokens) if change.statistic else None))
    assert same(first.model, expected)
    kept = 0
    for number, block in enumerate(decoder_blocks(second.model)):
        for op, matrix in second.matrices(number).items():
            assert torch.equal(matrix.decode().to(dtype), decoder_linears(block)[op].weight)
            kept += matrix.nbytes
    assert first.bits_per_weight == 8 * kept / sum(of.rows * of.columns for of in first.statistics)


def test_load_pruned_is_the_same_by_name(bench, tiny):
    model, tokenizer, records = load_pruned("llama", "wanda", **CALIBRATED)
    made = load_changed("llama", WANDA, **CALIBRATED)
    assert (tokenizer, records, bench) == ("tokenizer", made.statistics, [0, 1])
    assert same(model, made.model)
    dense, _, none = load_pruned("opt", "dense", dtype=torch.float32)
    assert same(dense, tiny("opt", blocks=2))
    assert (none, bench) == ([], [0, 1])


CHANGED = [
    {"model_name": "opt"},
    {"change": CHANGES["sparsegpt"]},
    {"change": Pruning.by("wanda", 0.6)},
    {"change": Pruning.by("wanda", pattern="2:4")},
    {"change": SpQR()},
    {"calibration": replace(CALIBRATION, corpus="other")},
    {"calibration": replace(CALIBRATION, windows=2)},
    {"calibration": replace(CALIBRATION, sequence_length=8)},
    {"calibration": replace(CALIBRATION, seed=1)},
    {"dtype": torch.float16},
]


def test_whatever_changes_the_result_makes_it_anew(bench, tiny, monkeypatch):
    for number, other in enumerate([{}, *CHANGED]):
        load_changed(**{"model_name": "llama", "change": WANDA} | CALIBRATED | other)
        assert bench == [0, 1] * (number + 1), other
    for change in (Pruning.by(SparseGPT(damping=0.2)), SpQR(outliers=0.1)):
        load_changed("llama", change, **CALIBRATED)
    assert bench == [0, 1] * (len(CHANGED) + 3)
    other = LlamaForCausalLM(LlamaConfig(**tiny("llama", blocks=2).config.to_dict()))
    monkeypatch.setattr(changed, "load_model", lambda name, dtype: (other, None))
    load_changed("llama", WANDA, **CALIBRATED)
    assert bench == [0, 1] * (len(CHANGED) + 4), "other weights under the same name"


@pytest.mark.parametrize("change", [WANDA, SpQR(reorder=True)], ids=["wanda", "spqr"])
def test_after_ctrl_c_it_goes_on_at_the_block(bench, monkeypatch, tmp_path, change):
    expected = load_changed("llama", change, **CALIBRATED)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "other"))

    def stopped(*args, **kwargs):
        yield next(change_blocks(*args, **kwargs))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(changed, "change_blocks", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_changed("llama", change, **CALIBRATED)
    assert len(list(tmp_path.glob("other/changed/*/key.json"))) == 1
    bench.clear()
    assert same(load_changed("llama", change, **CALIBRATED).model, expected.model)
    assert bench == [1]


def test_a_block_that_was_cut_is_made_anew(bench, caplog):
    first = load_changed("llama", SpQR(), **CALIBRATED)
    file = first.folders[0] / changed.MATRICES
    file.write_bytes(file.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        second = load_changed("llama", SpQR(), **CALIBRATED)
    assert bench == [0, 1, 0]
    assert file.name in caplog.text
    assert same(first.model, second.model)


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


def test_bad_input_leaves_nothing_behind(bench, tmp_path):
    for arguments, names in (
        ({"method": "wonder"}, "unknown pruning method .wonder."),
        ({"calibration": replace(CALIBRATION, windows=7)}, "calibration has 96 tokens, 7 windows of 16 need 112"),
    ):
        with pytest.raises(UserError, match=names):
            load_pruned("llama", **CALIBRATED | arguments)
    assert bench == []
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_kept_model_hangs_on_its_own_methods_code():
    """And on the walk and the linears that are changed, but not on the registry or on other methods."""
    for name, change in CHANGES.items():
        files = {path.stem for path in changed.made_by("toolkit.sparsity.changed", change)}
        assert files & {*CHANGES} == {name}
        assert files >= {"layerwise", "calibration", "changed", "blocks"}
        assert not files & {"methods", "loading", "cache", "files"}


class Mine:
    """A method outside the toolkit."""

    statistic = None

    def __call__(self, weight, gram, sparsity, pattern):
        return METHODS["magnitude"](weight, gram, sparsity, pattern)


def test_a_registered_method_from_elsewhere_hangs_on_its_own_file(bench, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Mine())
    for _ in range(2):
        load_pruned("llama", "mine", pattern="2:4", dtype=torch.float32)
    assert bench == [0, 1]
    monkeypatch.setattr(changed, "file_sha256", lambda file: f"another {file.name}")
    load_pruned("llama", "mine", pattern="2:4", dtype=torch.float32)
    assert bench == [0, 1, 0, 1]


def test_siblings_share_a_gram_matrix_and_its_factorisation(tiny, tokens, monkeypatch):
    """A block of Llama's has four inputs: of q, k and v; of o; of gate and up; of down. No block's outlive it."""
    model, windows, factorisations = tiny().requires_grad_(False), tokens.view(-1, LENGTH), []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda of: factorisations.append(weakref.ref(of)) or cholesky(of))
    blocks, grams = len(list(change_blocks(model, SpQR(), windows))), []
    assert len(factorisations) == 4 * blocks
    for _, found in walk(model, windows):
        assert not any(gram() is not None for gram in grams), "the Gram matrices of the block before are still held"
        grams = [weakref.ref(gram) for gram in {id(gram): gram for gram in found.values()}.values()]
        assert len(grams) == 4
