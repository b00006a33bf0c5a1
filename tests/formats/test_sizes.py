"""Bits of each linear, by hand: rows of unlike length cost ELL, and nothing else."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.notebook_code import functions_of
from toolkit.models import decoder_blocks, decoder_linears


def test_rows_of_unlike_length_cost_ell_alone():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
    block = decoder_blocks(model)[0]
    weights = {name.rpartition(".")[2]: linear.weight.data for name, linear in decoder_linears(block).items()}
    for weight in weights.values():
        weight.fill_(1.0)
        weight[:, :4] = 0
    weights["q_proj"][:] = torch.tensor([1.0] + [0.0] * 7)
    weights["q_proj"][0] = 1.0  # one row is full, the others hold one value
    table = functions_of("beyond/where_zeros_fall").linear_sizes(model).set_index(["op", "format"])
    bits = table["bits_per_weight"]
    assert bits["q_proj", "ell"] == 32  # 8 slots in each of 8 rows, a value and an index of 16 bits each
    assert bits["k_proj", "ell"] == 16
    offsets = 8 * 9  # bytes, for 8 rows
    assert bits["q_proj", "csr"] == pytest.approx(8 * (offsets + 15 * 4) / 64)
    assert bits["k_proj", "csr"] == pytest.approx(8 * (offsets + 32 * 4) / 64)
    assert (bits.xs("two_four", level="format") == 9).all()
    assert table.loc[("q_proj", "endor"), "sparsity"] == pytest.approx(49 / 64)
    assert set(table.xs("ell", level="format")["evidence"]) == {"modelled"}
    assert set(table.xs("csr", level="format")["evidence"]) == {"measured"}
