"""A split model: with all experts it is the dense one, and it is written and opened again."""

import json

import pytest
import torch
from torch.nn import functional

from tests.models.test_models import LLAMA, small
from toolkit.errors import UserError
from toolkit.models import decoder_blocks, ffn, load_model
from toolkit.models.adapters import LowRankDifference, named_linears
from toolkit.models.experts import decoder_experts
from toolkit.models.ffn import decoder_ffns
from toolkit.models.mixture import ENTRY, SplitMixture, SplitParts, load, save, split
from toolkit.models.skeleton import check_reopens, empty_model
from toolkit.offload.logit_check import check_logits
from toolkit.storage.experts import WholeExperts
from toolkit.storage.packing import pack_model

TOKENS = torch.arange(20).view(1, -1) % 64


def dense():
    model = small("Llama", **LLAMA | {"initializer_range": 0.2}).eval().requires_grad_(False)
    return model


def parts(model, per_token=2):
    orders = [torch.randperm(48, generator=torch.Generator().manual_seed(layer)) for layer in range(2)]
    return SplitParts(torch.stack(orders), torch.randn(2, 4, 32), shared=8, per_token=per_token)  # 4 · 10 + 8


def split_model(per_token=2):
    model = dense()
    split(model, parts(model, per_token))
    return model


def test_all_experts_on_is_the_dense_model():
    model, other = dense(), split_model(per_token=4)
    torch.testing.assert_close(other(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert (split_model(per_token=2)(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-2


def test_some_experts_are_the_dense_ffn_without_the_others_neurons():
    model = dense()
    made, x = parts(model), torch.randn(6, 32)
    ffn, order = decoder_ffns(model)[1], made.permutation[1]
    expected = []
    for token in x:
        on = torch.zeros(48, dtype=torch.bool)
        on[order[:8]] = True
        for expert in (made.router[1] @ token).topk(2).indices.tolist():
            on[order[8 + 10 * expert : 18 + 10 * expert]] = True
        neurons = functional.silu(ffn.gate.weight @ token) * (ffn.up.weight @ token)
        expected.append(ffn.down.weight @ (neurons * on))
    other = dense()
    split(other, made)
    experts = decoder_experts(other)[1]
    assert (experts.gate.form, experts.count, experts.neurons, experts.per_token) == ("ones", 4, 10, 2)
    torch.testing.assert_close(experts.module(x), torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert experts.module.shared_expert.down_proj.weight.shape == (32, 8)


def test_a_split_model_runs_with_its_experts_on_disk(tmp_path):
    model = split_model()
    pack_model(model, tmp_path / "packed", WholeExperts())
    assert check_logits(tmp_path / "packed", model) < 1e-3


def test_a_saved_split_model_opens_again(tmp_path, monkeypatch):
    model = split_model()
    check_reopens(model)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(ffn, "_TRIED", {})  # as in a new process: FFNs are found in a model without weights
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)
    opened, _ = load_model(str(tmp_path), torch.float32)
    assert isinstance(decoder_blocks(opened)[0].mlp, SplitMixture)
    assert torch.equal(opened(TOKENS).logits, model(TOKENS).logits)
    found = empty_model(opened.config, lambda outline: None).state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    opened.save_pretrained(tmp_path / "again")
    again, _ = load_model(str(tmp_path / "again"), torch.float32)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_a_config_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    split_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)
    for entry, told in (
        ({"experts": 4}, "expected whole numbers above 0 for experts, neurons, shared, per_token"),
        ({"experts": 4, "neurons": 10, "shared": 9, "per_token": 2}, "4 experts of 10 neurons and 9 shared ones"),
        ({"experts": 4, "neurons": 10, "shared": 8, "per_token": 5}, "5 routed experts a token"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {ENTRY: entry}))
        with pytest.raises(UserError, match=told):
            load_model(str(tmp_path), torch.float32)


def test_files_of_parts(tmp_path):
    model = dense()
    made, file = parts(model), tmp_path / "split.safetensors"
    name, linear = next(named_linears(model))
    rows, columns = linear.weight.shape
    low = LowRankDifference(torch.randn(rows, 2).bfloat16().float(), torch.randn(2, columns).bfloat16().float())
    made.differences[name] = low
    save(file, model, made, {"model": "tiny"})
    found = load(file, model)
    assert torch.equal(found.permutation, made.permutation)
    assert torch.equal(found.router, made.router.bfloat16().float())
    assert torch.equal(found.differences[name].left, low.left)
    assert (found.shared, found.per_token) == (8, 2)
    before = linear.weight.clone()
    split(model, found)
    torch.testing.assert_close(linear.weight, before + low.left @ low.right)
