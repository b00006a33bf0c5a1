"""Whole models: the sequential walk of a quantiser, what is kept of it, and how an interrupted one goes on."""

import json
import logging
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from tests import naive_pruning
from tests.offload.conftest import pruned
from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.pruning.calibration import Calibration, walk
from toolkit.quantization import quantised
from toolkit.quantization.layerwise import quantise_blocks
from toolkit.quantization.quantised import load_quantised
from toolkit.quantization.spqr import Quantised, SpQR

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 16
TOKENS = torch.randint(0, 61, (6 * LENGTH,), generator=torch.Generator().manual_seed(1))
WINDOWS = Calibration(windows=4, sequence_length=LENGTH)
SETTINGS = {"calibration": WINDOWS, "dtype": torch.float32}


class Scale:
    """Scales each column by the norm of its input: a smooth function, so that two ways of adding up agree."""

    def __call__(self, weight, gram):
        norms = gram.diagonal().sqrt()
        return SimpleNamespace(decode=lambda: weight * norms / norms.max(), nbytes=1)


calls = []


@dataclass(frozen=True)
class Interrupted(SpQR):
    """SpQR that is stopped at one of its matrices, while `stop` counts down to it."""

    def __call__(self, weight, gram):
        calls.append(tuple(weight.shape))
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return super().__call__(weight, gram)


stop_at = None


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A tiny model and text in place of the real ones, an empty cache, and the list of the matrices quantised."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(quantised, "load_model", lambda name, dtype: (pruned(name).to(dtype), "tokenizer"))
    monkeypatch.setattr(quantised, "load_tokens", lambda corpus, tokenizer, split: TOKENS)
    calls.clear()
    return calls


def same(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_each_block_is_calibrated_on_the_quantised_blocks_before_it(family):
    model, oracle, windows = pruned(family), pruned(family), TOKENS.view(-1, LENGTH)
    errors = {
        of.name: of.relative_output_error
        for block in quantise_blocks(model, Scale(), windows, 2, errors=True)
        for of in block.statistics
    }
    for block in range(oracle.config.num_hidden_layers):
        inputs = naive_pruning.layer_inputs(oracle, windows, block)
        for name, linear in naive_pruning.linears(oracle, block).items():
            dense, x = linear.weight.detach().clone(), inputs[name]
            linear.weight.data = Scale()(dense, x.T @ x).decode()
            lost = (x @ (dense - linear.weight.data).T).norm() / (x @ dense.T).norm()
            assert errors.pop(name) == pytest.approx(float(lost), rel=1e-3)
    assert not errors
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-5)


def test_siblings_share_a_gram_matrix_and_its_factorisation(monkeypatch):
    """A block of Llama's has four inputs: of q, k and v; of o; of gate and up; of down. No block's outlive it."""
    model, windows, factorisations = pruned("llama"), TOKENS.view(-1, LENGTH), []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda of: factorisations.append(weakref.ref(of)) or cholesky(of))
    blocks, grams = len(list(quantise_blocks(model, SpQR(), windows))), []
    assert len(factorisations) == 4 * blocks
    for _, found in walk(model, windows):
        assert not any(gram() is not None for gram in grams), "the Gram matrices of the block before are still held"
        grams = [weakref.ref(gram) for gram in {id(gram): gram for gram in found.values()}.values()]
        assert len(grams) == 4


def test_the_second_call_reads_what_the_first_made(bench):
    first, second = (load_quantised("llama", Interrupted(), **SETTINGS) for _ in range(2))
    matrices = sum(len(decoder_linears(block)) for block in decoder_blocks(first.model))
    assert len(bench) == matrices
    assert same(first.model, second.model)
    assert not same(first.model, pruned("llama"))
    assert first.statistics == second.statistics
    assert len(first.statistics) == matrices
    for number, block in enumerate(decoder_blocks(second.model)):
        for op, matrix in second.matrices(number).items():
            assert isinstance(matrix, Quantised)
            assert torch.equal(matrix.decode(), decoder_linears(block)[op].weight)
    kept = sum(matrix.nbytes for number in range(len(first.folders)) for matrix in first.matrices(number).values())
    weights = sum(of.rows * of.columns for of in first.statistics)
    assert first.bits_per_weight == 8 * kept / weights


def test_a_block_that_was_just_made_is_not_decoded_again(bench, monkeypatch):
    decoded, decode = [], Quantised.decode
    monkeypatch.setattr(Quantised, "decode", lambda matrix: decoded.append(matrix) or decode(matrix))
    found = load_quantised("llama", SpQR(), **SETTINGS)
    assert len(decoded) == len(found.statistics)


def test_whatever_changes_the_result_makes_it_anew(bench):
    load_quantised("llama", Interrupted(), **SETTINGS)
    made = len(bench)
    other = {"calibration": replace(WINDOWS, seed=1)}
    for change in ({"quantiser": Interrupted(outliers=0.1)}, other, {"model_name": "opt"}):
        load_quantised(**{"model_name": "llama", "quantiser": Interrupted()} | SETTINGS | change)
    assert len(bench) > 3.5 * made  # opt has six linears a block, where llama has seven


@pytest.mark.parametrize("reorder", [False, True])
def test_after_ctrl_c_it_goes_on_at_the_block(bench, monkeypatch, tmp_path, reorder):
    expected = load_quantised("llama", SpQR(reorder=reorder), **SETTINGS)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(f"{__name__}.stop_at", 10)
    with pytest.raises(KeyboardInterrupt):
        load_quantised("llama", Interrupted(reorder=reorder), **SETTINGS)
    assert len(list(tmp_path.glob("other/quantised/*/key.json"))) == 1
    found = load_quantised("llama", Interrupted(reorder=reorder), **SETTINGS)
    assert len(bench) == 10 + 7 * (len(decoder_blocks(found.model)) - 1)
    assert same(found.model, expected.model)


def test_a_block_in_the_middle_that_was_cut_is_made_anew(bench, tmp_path, caplog):
    first = load_quantised("llama", Interrupted(), **SETTINGS)
    made, file = len(bench), first.folders[1] / "self_attn.q_proj.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    second = load_quantised("llama", Interrupted(), **SETTINGS)
    assert "self_attn.q_proj.safetensors is missing or has another size" in caplog.text
    assert len(bench) == made + 7
    assert same(first.model, second.model)


def test_calibration_with_fewer_tokens_than_columns_is_told(bench, caplog):
    with caplog.at_level(logging.WARNING):
        load_quantised("llama", SpQR(), **SETTINGS | {"calibration": replace(WINDOWS, windows=1)})
    assert "16 tokens for the" in caplog.text
    assert "give more windows" in caplog.text


def test_bad_input_leaves_nothing_behind(bench, tmp_path):
    with pytest.raises(UserError, match="calibration has 96 tokens, 7 windows of 16 need 112"):
        load_quantised("llama", SpQR(), **SETTINGS | {"calibration": replace(WINDOWS, windows=7)})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_weights_that_are_not_finite_are_named(bench, monkeypatch):
    broken = pruned("llama")
    decoder_linears(decoder_blocks(broken)[0])["mlp.up_proj"].weight[0, 0] = torch.inf
    monkeypatch.setattr(quantised, "load_model", lambda name, dtype: (broken, "tokenizer"))
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj has weights that are not finite"):
        load_quantised("llama", SpQR(), **SETTINGS)


def test_the_key_of_a_block_tells_its_settings(bench):
    found = load_quantised("llama", SpQR(outliers=0.5), **SETTINGS)
    key = json.loads((found.folders[1] / "key.json").read_text())["key"]
    assert (key["block"], key["quantiser"], key["settings"]["outliers"]) == (1, "SpQR", "0.5")
