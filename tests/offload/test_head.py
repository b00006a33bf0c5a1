"""Output heads in parts, streamed like layers: the model with the weights that they decode to, in less memory."""

from functools import partial
from itertools import cycle, groupby

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.families import load_family
from tests.offload.pretend import PretendGpu
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.head import HEAD
from toolkit.offload.embedding import StoredEmbedding
from toolkit.offload.head import OffloadedHead
from toolkit.offload.logit_check import check_logits
from toolkit.offload.model import OffloadedModel, unpack_model
from toolkit.storage.buffers import buffer_bytes
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

IDS = torch.tensor([[5, 96, 0, 5, 41, 7]])
HEADS = {"dense": partial(encode, "dense"), "int8": partial(Scaled.encode, "dense"), "spqr": SpQRMatrix.encode}
FAMILIES = ["Qwen2", "Llama, tied", "Gemma3", "GPT-J", "OPT, as 350m"]  # GPT-J's head has a bias
CASES = [*zip(FAMILIES, cycle(HEADS), strict=False), *(("Llama, tied", form) for form in HEADS if form != "int8")]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_the_model_runs_with_what_the_head_decodes_to(family, form, tmp_path, one_thread):
    model = load_family(family, tmp_path / "model", torch.bfloat16)
    before = model.get_output_embeddings().weight.clone()
    pack_model(model, tmp_path / "packed", head=HEADS[form])
    assert torch.equal(model.get_output_embeddings().weight, before) == (form == "dense")
    with OffloadedModel.open(tmp_path / "packed", "endor") as decoded, torch.no_grad():
        assert torch.equal(decoded.model(IDS).logits, model(IDS).logits)
        assert isinstance(decoded.model.get_input_embeddings(), StoredEmbedding)
        assert "lm_head.weight" not in {run.name for run in decoded.store.index.rest}
    with torch.no_grad():
        assert torch.equal(unpack_model(Store.open(tmp_path / "packed"), "endor")(IDS).logits, model(IDS).logits)
    check_logits(tmp_path / "packed", model)  # raises if products with packed weights are off by more than rounding


@pytest.mark.parametrize(("family", "form"), zip(["Qwen2", "Llama, tied", "Mixtral"], HEADS, strict=True))
def test_beside_neurons_and_experts_it_is_in_memory(family, form, tmp_path, monkeypatch, one_thread):
    model = load_family(family, tmp_path / "model", torch.bfloat16)
    layout = WholeExperts() if family == "Mixtral" else Neurons([0.1, 0.1])
    pack_model(model, tmp_path / "whole", layout)
    pack_model(model, tmp_path / "packed", layout, head=HEADS[form])
    check_logits(tmp_path / "packed", model)
    with OffloadedModel.open(tmp_path / "packed") as ours, OffloadedModel.open(tmp_path / "whole") as whole:
        assert isinstance(ours.model.get_input_embeddings(), StoredEmbedding)
        assert isinstance(ours.model.lm_head, OffloadedHead)
        used = [each.budgets["dram"].taken["rest"] for each in (ours, whole)]
        parts = [layer for layer in ours.store.layers_of(ours.store.variants[0]) if HEAD in layer.ops]
        held = sum(buffer_bytes(part.nbytes) for part in parts)
        assert used[0] <= used[1] + held + 2 * model.lm_head.weight.nbytes
    monkeypatch.setattr("toolkit.offload.model.open_device", lambda name: PretendGpu())
    with pytest.raises(UserError, match="packed head, which a GPU does not take"):
        OffloadedModel.open(tmp_path / "packed", device="cuda")


def test_a_head_larger_than_the_budget_is_streamed_and_parts_that_stay_are_one_call(tmp_path, one_thread):
    """The head has 8 MB, in 128 parts. A small budget holds less than half of them, a larger one two thirds."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=1 << 15, num_hidden_layers=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).bfloat16().eval()
    pack_model(model, tmp_path / "packed", Linears(("dense",)), head=HEADS["dense"])
    store = Store.open(tmp_path / "packed")
    assert len(store.layers_of("dense")) == 2 + 128
    with OffloadedModel.open(tmp_path / "packed", "dense_packed", dram_bytes=5_000_000) as tight, torch.no_grad():
        assert tight.budgets["dram"].used_bytes <= 5_000_000
        assert tight.placement.storage > 64
        tokens = tight.generate(IDS, max_new_tokens=5, do_sample=False)
    with OffloadedModel.open(tmp_path / "packed", "dense_packed", dram_bytes=9_000_000) as opened, torch.no_grad():
        assert torch.equal(tokens, opened.generate(IDS, max_new_tokens=5, do_sample=False))
        tiers, spans = opened.placement.tiers[2:], opened.timeline.spans
    calls = tiers.count("storage") + sum(tier == "dram" for tier, _ in groupby(tiers))  # neighbours that stay are one
    heads = [span.nbytes for span in spans if HEAD in span.op and span.stage == "compute"]
    assert calls < 100
    assert len(heads) == 128 + 4 * calls  # the prompt, then four tokens
    decoder = sum(linear.weight.nbytes for block in decoder_blocks(model) for linear in decoder_linears(block).values())
    assert sum(heads) == 5 * model.lm_head.weight.nbytes + 4 * decoder  # a token's layers stay, as its first parts do
    assert torch.equal(tokens, model.generate(IDS, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("method", ["endor", "endor_packed"])
def test_a_gpu_gets_the_parts_as_it_gets_layers(method, tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr("toolkit.offload.model.open_device", lambda name: PretendGpu())
    model = load_family("Qwen2", tmp_path / "model", torch.bfloat16)
    pack_model(model, tmp_path / "packed", head=HEADS["int8"])
    with OffloadedModel.open(tmp_path / "packed", method, device="cuda") as opened, torch.no_grad():
        assert opened.placement.device == 2 + 2
        assert torch.equal(opened.model(IDS).logits, model(IDS).logits)
