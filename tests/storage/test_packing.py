"""A whole model as a store, and back: nothing is missing, and another model is refused."""

import json
import shutil
import weakref
from collections import namedtuple
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, OPTConfig, ZambaConfig

from tests.models.test_experts import mixtures
from toolkit.errors import UserError
from toolkit.formats import decode, encode
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.offload.logit_check import check_logits
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity.layerwise import change_blocks
from toolkit.storage import writing
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, linear_weights, pack_model, tensors_beside
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=40, num_key_value_heads=1, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SMALL, intermediate_size=40, tie_word_embeddings=False),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16, max_position_embeddings=32),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().requires_grad_(False)
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            linear.weight[torch.rand(linear.weight.shape) < 0.5] = 0
    return model


def rebuild(store, variant):
    """The model from its store alone."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(store.model_folder), dtype=torch.float16)
    assert model.load_state_dict(dict(store.rest()), strict=False).unexpected_keys == []
    model.tie_weights()
    slot = aligned_buffer(store.slot_bytes(variant))
    with open_reader("threads", store, variant) as reader, torch.no_grad():
        for number, block in enumerate(decoder_blocks(model)):
            layer = store.layer(number, variant)
            reader.read(layer.chunks, slot)
            linears, views = decoder_linears(block), layer.view(slot)
            assert linears.keys() == views.keys()
            for name, packed in views.items():
                linears[name].weight.copy_(decode(packed))
    return model.eval()


def test_a_store_is_the_whole_model(tmp_path, model):
    pack_model(model, tmp_path / "s", Linears(("endor", "zstd")), "tiny", description={"method": "random"})
    store = Store.open(tmp_path / "s")
    store.verify()
    assert store.model == {"name": "tiny", "method": "random"}
    tokens = torch.arange(20)[None]
    for variant in store.variants:
        found = rebuild(store, variant)
        assert found.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        assert torch.equal(found(tokens).logits, model(tokens).logits)


def test_variants_of_ones_own_and_a_tokenizer(tmp_path, model):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    half = Linears({"half": lambda weight: encode("dense", weight.to(torch.bfloat16))})
    pack_model(model, tmp_path / "s", half, tokenizer=Tokenizer())
    store = Store.open(tmp_path / "s")
    assert {(run.variant, run.format, run.dtype) for run in store.index.ops} == {("half", "dense", torch.bfloat16)}
    assert "model/tokenizer.json" in store.index.files
    assert json.loads((store.model_folder / "config.json").read_text())["model_type"] == model.config.model_type


def upside_down(weight):
    return encode("dense", weight.flip(0))


class Watched(Linears):
    """Notes how many packed matrices of other layers there are when a layer is packed."""

    def ops(self, model, number, block, variant, matrices):
        vars(self).setdefault("left", []).append(sum(one() is not None for one in vars(self).get("made", ())))
        for op in super().ops(model, number, block, variant, matrices):
            vars(self).setdefault("made", []).append(weakref.ref(op.packed))
            yield op


def test_a_packed_block_is_gone_before_the_next_one_is_packed(tmp_path, model):
    layout = Watched(("endor", "zstd"))
    pack_model(model, tmp_path / "s", layout)
    assert vars(layout)["left"] == [0] * 6


class NextExpert(WholeExperts):
    """Stores each expert in the place of the one before it."""

    def _rows(self, layer, experts, expert, bits):
        return super()._rows(layer, experts, (expert + 1) % experts.count, bits)


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", Linears({"dense": upside_down}), {}),
        ("llama", Linears({"dense": lambda weight: encode("dense", weight + 2e-7 * (weight == weight.max()))}), {}),
        ("llama", Linears(("dense",)), {"head": upside_down}),
        ("mixture", NextExpert(4), {}),
    ],
)
def test_another_matrix_is_noticed_when_it_is_written(tmp_path, family, layout, settings):
    torch.manual_seed(0)
    if family == "mixture":
        model, right = mixtures("Mixtral", hidden_size=64), WholeExperts(layout.bits)
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS["llama, untied"], dtype=torch.float32)
        right = Linears(("dense", "endor"))
    pack_model(model.eval().requires_grad_(False), tmp_path / "right", right, check=True)
    with pytest.raises(UserError, match=r"^layer \d .*: the file decodes to other weights than those"):
        pack_model(model, tmp_path / "wrong", layout, check=True, **settings)
    assert not (tmp_path / "wrong").exists()


def test_what_is_tied_is_stored_once_and_the_model_fits_even_without_its_memory(tmp_path, model, config):
    embeddings = {model.get_input_embeddings().weight.data_ptr(), model.get_output_embeddings().weight.data_ptr()}
    rest = tensors_beside(model, linear_weights(model))
    assert sum(tensor.data_ptr() in embeddings for tensor in rest.values()) == len(embeddings)
    assert len(embeddings) == 2 - model.config.tie_word_embeddings
    pack_model(model, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    store.check_fits(model, "endor")
    with torch.device("meta"):
        store.check_fits(AutoModelForCausalLM.from_config(config), "endor")


def llama(**changes):
    common = SMALL | {"intermediate_size": 40, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return LlamaConfig(**common | changes)


OTHER = {
    "another family": (CONFIGS["opt"], r"layer 0 self_attn.k_proj of shape \(8, 16\).*\(16, 16\)"),
    "fewer layers": (llama(num_hidden_layers=2), r"layer 2 .* of shape \(16, 16\).* None"),
    "a head of its own": (llama(tie_word_embeddings=False), r"lm_head.weight of shape None.*\(61, 16\)"),
}


@pytest.mark.parametrize("config", [CONFIGS["llama"]], ids=["llama"])
def test_another_model_and_bad_variants_are_refused(tmp_path, model):
    biased, mixture = AutoModelForCausalLM.from_config(llama(mlp_bias=True)), mixtures("Mixtral")
    for packed, layout, told in [
        (model, Linears(("coo",)), "unknown format 'coo'"),
        (biased, Neurons(), "a gate and biases"),
        (mixture, WholeExperts([[4] * 6]), r"bits of \[6\] experts by layer: the model has \[6, 6\]"),
    ]:
        with pytest.raises(UserError, match=told):
            pack_model(packed, tmp_path / "s", layout)
    assert list(tmp_path.iterdir()) == []
    pack_model(model, tmp_path / "s", name="tiny")
    for other, told in OTHER.values():
        with torch.device("meta"):
            wrong = AutoModelForCausalLM.from_config(other)
        with pytest.raises(UserError, match=rf"was packed from another model \(tiny\): it has .*({told})"):
            Store.open(tmp_path / "s").check_fits(wrong, "endor")


def test_a_block_that_is_used_twice(tmp_path):
    """It is packed, but neither with a head of its own, which would untie it, nor quantised twice."""
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 40, "layers_block_type": kinds}
    more = {"attention_head_dim": 16, "mamba_d_state": 4, "mamba_dt_rank": 2, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(ZambaConfig(**SMALL | sizes | more))
    model.eval().requires_grad_(False)
    with pytest.raises(UserError, match=r"shares more than its head \(model.layers.3.shared.*--head whole"):
        pack_model(model, tmp_path / "s", head=partial(encode, "dense"))
    with pytest.raises(UserError, match=r"layers.3.*q_proj is .*layers.1.*q_proj once more"):
        next(change_blocks(model, SpQR()))
    assert list(tmp_path.iterdir()) == []
    pack_model(model, tmp_path / "s")
    assert check_logits(tmp_path / "s", model) < 1e-5


@pytest.mark.parametrize("config", [CONFIGS["llama"]], ids=["llama"])
def test_the_space_asked_for_is_close_to_what_it_takes(tmp_path, model, monkeypatch):
    asked, check = [], writing.check_space
    monkeypatch.setattr(writing, "check_space", lambda folder, nbytes: (asked.append(nbytes), check(folder, nbytes)))
    pack_model(model, tmp_path / "s", Linears(("dense", "endor")))
    store = Store.open(tmp_path / "s")
    stored = sum(piece.nbytes for run in store.index.ops for piece in run.pieces.values())
    stored += sum(run.pieces[run.name].nbytes for run in store.index.rest)
    assert asked[0] == pytest.approx(stored, rel=0.02)
    usage = namedtuple("usage", "total used free")(0, 0, asked[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match="MB more are needed"):
        pack_model(model, tmp_path / "t", Linears(("dense", "endor")))
