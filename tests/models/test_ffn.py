"""FFNs found by the names of their linears."""

import pytest

from tests.models.test_models import FAMILIES, LLAMA, small
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.ffn import decoder_ffns


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_ffns(family):
    model = small(family, **FAMILIES[family][0])
    ffns = decoder_ffns(model)
    assert len(ffns) == 2
    for ffn in ffns:
        assert (ffn.gate is None) == (family in ("OPT", "Falcon"))
        assert ffn.up.out_features == ffn.down.in_features == ffn.neurons > ffn.down.out_features == 32


def test_other_names_and_experts_are_refused():
    model = small("Llama", **LLAMA)
    block = decoder_blocks(model)[1]
    mlp = block.mlp
    block.second = mlp.__class__(model.config)
    with pytest.raises(UserError, match="block 1 has 2 FFNs"):
        decoder_ffns(model)
    del block.second, block.mlp
    with pytest.raises(UserError, match=r"block 1 has no known FFN among q_proj, .*; expected linears named gate_proj"):
        decoder_ffns(model)
