"""What an FFN or a mixture adds to its weights is noticed."""

import pytest
import torch

from tests.families import load_family
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.ffn_form import check_ffns, check_mixtures

CHANGES = {
    "scale": lambda output: 1.1 * output,
    "clamp": lambda output: output.clamp(-5, 5),
    "tuple": lambda output: (output, None),
    "nan": lambda output: output * torch.nan,
}


def changed(module, change):
    """Its forward gives something else."""
    forward = module.forward
    module.forward = lambda x: change(forward(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama, tied", "Llama, with biases", "Gemma", "Phi", "OPT", "Falcon, with biases"])
def test_plain_ffns_are_taken(tmp_path, family, dtype):
    check_ffns(load_family(family, tmp_path, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE"])
def test_plain_mixtures_are_taken(tmp_path, family, dtype):
    check_mixtures(load_family(family, tmp_path, dtype))


@pytest.mark.parametrize(("family", "words"), {"BitNet": "off by", "Bloom": "residual"}.items())
def test_ffns_that_are_more_are_refused(tmp_path, family, words):
    model = load_family(family, tmp_path, torch.bfloat16)
    model.config.hidden_act = getattr(model.config, "hidden_act", "gelu_new")
    with pytest.raises(UserError, match=f"block 0: its FFN .{family}MLP. .*{words}") as caught:
        check_ffns(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("family", "check"), {"Qwen2": check_ffns, "Qwen2-MoE": check_mixtures}.items())
def test_a_change_of_the_output_is_refused(tmp_path, family, check, change):
    model = load_family(family, tmp_path, torch.bfloat16)
    changed(decoder_blocks(model)[1].mlp, CHANGES[change])
    with pytest.raises(UserError, match=r"block 1: .*; choose another method of packing"):
        check(model)


def test_a_clamp_before_the_down_projection_is_refused(tmp_path):
    """As in DeepSeek-V4: it shows at large inputs only."""
    model = load_family("Qwen2", tmp_path, torch.bfloat16)
    mlp = decoder_blocks(model)[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=10)) * mlp.up_proj(x).clamp(-10, 10))
    with pytest.raises(UserError, match="off by"):
        check_ffns(model)
