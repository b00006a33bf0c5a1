"""Models of the smallest sizes: what can be packed opens, and gives what the model in memory gives."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from tests.offload.conftest import in_parts
from toolkit.offload.model import OffloadedModel
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

SIZES = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = LlamaForCausalLM, LlamaConfig, SIZES | IDS | {"intermediate_size": 6, "num_key_value_heads": 1}
OPT = OPTForCausalLM, OPTConfig, SIZES | IDS | {"ffn_dim": 6}
MIXTRAL = MixtralForCausalLM, MixtralConfig, LLAMA[2] | {"sliding_window": None, "num_local_experts": 2}
ALONE = {"hidden_size": 2, "num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1, "vocab_size": 1}
SMALLEST = {
    "one neuron": (LLAMA, {"intermediate_size": 1}),
    "one head of one number": (LLAMA, {"num_attention_heads": 1, "head_dim": 1}),
    "one word": (LLAMA, {"vocab_size": 1}),
    "two words, tied": (LLAMA, {"vocab_size": 2, "tie_word_embeddings": True}),
    "one of each": (LLAMA, ALONE),
    "one hidden number": (OPT, {"hidden_size": 1, "word_embed_proj_dim": 1, "num_attention_heads": 1}),
    "one expert of one neuron": (MIXTRAL, {"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 1}),
}
LAYOUTS = {
    "decoded": (Linears(("endor",)), "endor"),
    "packed": (Linears(("endor",)), "endor_packed"),
    "neurons": (Neurons(), None),
    "experts": (WholeExperts(), None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SMALLEST)
@pytest.mark.usefixtures("one_thread")
def test_the_smallest_models_are_those_in_memory(tmp_path, size, layout):
    (kind, config, sizes), changes = SMALLEST[size]
    if layout == ("neurons" if kind is MixtralForCausalLM else "experts"):
        return
    torch.manual_seed(0)
    model = kind(config(**sizes | changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()
    pack_model(model, tmp_path / "packed", LAYOUTS[layout][0], "smallest")
    ids = torch.arange(6)[None] % model.config.vocab_size
    expected = model(ids).logits
    with OffloadedModel.open(tmp_path / "packed", LAYOUTS[layout][1]) as ours:
        torch.testing.assert_close(in_parts(ours.model, ids, (3, 1, 1, 1)), expected, rtol=1e-3, atol=1e-3)
