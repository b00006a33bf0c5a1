import pytest
import torch

from toolkit.models import decoder_blocks, decoder_linears, shapes
from toolkit.models.twins import twin_model

TOYS = {
    "toy-opt": dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (128, 128))
    | {"fc1": (192, 128), "fc2": (128, 192)},
    "toy-llama": {
        "q_proj": (128, 128),
        "k_proj": (64, 128),
        "v_proj": (64, 128),
        "o_proj": (128, 128),
        "gate_proj": (192, 128),
        "up_proj": (192, 128),
        "down_proj": (128, 192),
    },
}


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for name, layers in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layers)


@pytest.mark.parametrize(("name", "dtype"), {"toy-opt": torch.float16, "toy-llama": torch.bfloat16}.items())
def test_a_twin_has_the_shapes_and_zeros_asked_for_and_runs(name, dtype):
    model = twin_model(name, 3, dtype, sparsity=0.25)
    blocks = decoder_blocks(model)
    assert len(blocks) == 3
    for block in blocks:
        linears = decoder_linears(block)
        assert {path.rpartition(".")[2]: tuple(linear.weight.shape) for path, linear in linears.items()} == TOYS[name]
        for linear in linears.values():
            assert linear.weight.dtype == dtype
            assert (linear.weight == 0).sum(1).unique().tolist() == [linear.in_features // 4]
    logits = model(torch.tensor([[7]]), use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize("name", TOYS)
def test_no_layer_can_stand_in_for_another(name):
    model = twin_model(name, 3, torch.float32)
    right = model(torch.tensor([[7]]), use_cache=False).logits
    first, second, _ = decoder_blocks(model)
    for path, linear in decoder_linears(first).items():
        kept, linear.weight = linear.weight, second.get_submodule(path).weight
        single = path.endswith(("q_proj", "k_proj"))  # one token attends to itself, whatever these say
        assert torch.equal(model(torch.tensor([[7]]), use_cache=False).logits, right) == single
        linear.weight = kept
