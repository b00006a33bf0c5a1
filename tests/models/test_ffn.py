"""FFNs are found by what they compute, whatever their linears are called."""

import pytest
import torch
from torch.nn import functional

from tests.families import load_family
from tests.models.test_models import LLAMA, small
from tests.refusals import refused
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.activation import activation
from toolkit.models.ffn import decoder_ffns

CHANGES = {
    "scale": lambda output: 1.1 * output,
    "tuple": lambda output: (output, None),
    "nan": lambda output: output * torch.nan,
}
# gates beside, above and below each other in one matrix; no gate, with biases and without; matrices by columns; an FFN
# of which the block adds the residual. `tests/offload/test_families.py` runs all others by neuron
FORMS = ("Llama, tied", "Phi-3", "GLM4", "OPT", "MPT", "GPT-2", "Bloom", "Gemma3n", "LongCat-Flash")


def by_hand(ffn, x):
    act = activation(ffn.activation)
    up = functional.linear(x, ffn.up.weight, ffn.up.bias)
    inner = act(up) if ffn.gate is None else act(functional.linear(x, ffn.gate.weight, ffn.gate.bias)) * up
    return functional.linear(inner, ffn.down.weight, ffn.down.bias)


@pytest.mark.parametrize("family", FORMS)
def test_the_linears_compute_what_the_module_does(tmp_path, family):
    model = load_family(family, tmp_path, torch.float32)
    for ffn in decoder_ffns(model):
        x = torch.randn(3, ffn.up.in_features)
        assert ffn.neurons == ffn.up.out_features
        if not isinstance(ffn.module, type(decoder_blocks(model)[0])):
            more = () if ffn.alone else (torch.zeros(1, *x.shape),)
            torch.testing.assert_close(by_hand(ffn, x), ffn.module(x[None], *more)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["BitNet", "Mamba", "Mixtral"])
def test_blocks_without_such_an_ffn_are_refused(tmp_path, family):
    with refused(r"block 0 .*has (no FFN|4 experts)"):
        decoder_ffns(load_family(family, tmp_path, torch.float32))


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_does_more_is_no_ffn(change):
    model = small("Llama", **LLAMA)
    mlp = decoder_blocks(model)[1].mlp
    forward = mlp.forward
    decoder_ffns(model)  # what is known of a class does not hold for this module
    mlp.forward = lambda x: CHANGES[change](forward(x))
    with pytest.raises(UserError, match="block 1 "):
        decoder_ffns(model)
