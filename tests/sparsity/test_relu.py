"""FATReLU in a model's place of SiLU, against the FFN written out."""

import pytest
import torch

from toolkit.models.ffn import decoder_ffns
from toolkit.sparsity.relu import fatrelu, gate_limits


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@torch.no_grad()
def test_the_ffn_computes_with_it(tiny, tokens, family):
    model = tiny(family)
    dense = model(tokens[None, :16]).logits
    limits = gate_limits(model, tokens.view(-1, 16), 0.8)
    ffn, seen = decoder_ffns(model)[1], {}
    for name, part in {"gate": ffn.gate or ffn.up, "up": ffn.up, "down": ffn.down}.items():
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
    with fatrelu(model, limits):
        assert not torch.equal(model(tokens[None, :16]).logits, dense)
    gate, up = seen["gate"][1], seen["up"][1] if ffn.gate else 1.0
    assert torch.allclose(seen["down"][0], torch.where(gate > limits[1], gate, 0.0) * up)
    assert torch.equal(model(tokens[None, :16]).logits, dense)


def test_limits_are_those_of_begun_windows(tiny, tokens):
    windows = tokens.view(-1, 16)
    begun = windows.index_fill(1, torch.tensor(0), 5)
    assert torch.equal(
        gate_limits(tiny("gemma2", bos_token_id=5), windows, 0.8), gate_limits(tiny("gemma2"), begun, 0.8)
    )
