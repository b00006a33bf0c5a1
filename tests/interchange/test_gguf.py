import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.test_models import LLAMA, small
from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.interchange.gguf import QUANTIZATIONS, write_gguf
from toolkit.models import shapes
from toolkit.models.experts import decoder_experts
from toolkit.models.plain import plain
from toolkit.models.twins import twin_model

BYTES = {"F16": 2, "Q8_0": 34 / 32, "Q4_0": 18 / 32}  # a weight, with the scale of each 32; others need llama.cpp


@pytest.fixture
def model(monkeypatch):
    for name, layers in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layers)
    return twin_model("toy-llama", 2, torch.float16, 0.5)


def linear_names(model):
    return [f"{name}.weight" for name, part in model.model.layers.named_modules() if isinstance(part, torch.nn.Linear)]


def test_transformers_reads_back_what_was_written(model, tmp_path):
    """Its reader knows the order of rows by itself, so queries and keys are checked, too."""
    write_gguf(model, tmp_path / "toy.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf", dtype=torch.float32)
    expected = model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, expected[name].float()), name
    tokens = torch.tensor([[7, 100, 55]])
    assert torch.equal(read(tokens).logits, model.float()(tokens).logits)


@pytest.mark.parametrize("quantization", BYTES)
def test_bytes_of_the_layers_are_those_in_the_file(model, tmp_path, quantization):
    stored = write_gguf(model, tmp_path / "toy.gguf", quantization)
    tensors = [t for t in gguf.GGUFReader(tmp_path / "toy.gguf").tensors if t.name.startswith("blk.")]
    assert stored == sum(int(tensor.n_bytes) for tensor in tensors)
    linears = sum(tensor.n_elements for tensor in tensors if "norm" not in tensor.name)
    norms = sum(tensor.n_elements for tensor in tensors if "norm" in tensor.name)
    assert linears == sum(model.model.layers.state_dict()[name].numel() for name in linear_names(model))
    assert stored == BYTES[quantization] * linears + 4 * norms


@pytest.mark.parametrize(("quantization", "levels"), [("Q8_0", 127), ("Q4_0", 8)])
def test_quantised_weights_are_near_by_hand(model, tmp_path, quantization, levels):
    """A block of 32 weights is a scale times small integers: half a step is lost, a whole one at the end of Q4_0."""
    write_gguf(model, tmp_path / "toy.gguf", quantization)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "toy.gguf").tensors}
    found = tensors["blk.1.ffn_up.weight"]
    values = gguf.quants.dequantize(found.data, found.tensor_type).reshape(-1, 32)
    expected = model.model.layers[1].mlp.up_proj.weight.float().numpy().reshape(-1, 32)
    step = np.abs(expected).max(1, keepdims=True) / levels
    assert (np.abs(values - expected) <= (1.01 if quantization == "Q4_0" else 0.6) * step + 1e-6).all()
    assert not np.array_equal(values, expected)


@pytest.mark.parametrize(
    ("kind", "quantization", "words"), [("toy-llama", "Q3", "unknown GGUF type 'Q3'"), ("toy-opt", "F16", "type 'opt'")]
)
def test_what_cannot_be_written_is_refused(model, tmp_path, kind, quantization, words):
    with pytest.raises(UserError, match=words):
        write_gguf(twin_model(kind, 1), tmp_path / "toy.gguf", quantization)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("quantization", sorted(QUANTIZATIONS.keys() - BYTES.keys()))
def test_types_that_the_package_cannot_make_take_the_blocks_they_are_given(model, tmp_path, quantization):
    with pytest.raises(UserError, match=f"type {quantization}: the package gguf cannot quantise"):
        write_gguf(model, tmp_path / "toy.gguf", quantization)
    asked = []

    def quantise(values, kind):
        asked.append(kind)
        weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType["Q8_0"]]
        return np.zeros((len(values), values.shape[1] // weights * nbytes), np.uint8)

    write_gguf(model, tmp_path / "toy.gguf", "Q8_0", quantise)
    assert asked == ["Q8_0"] * len(linear_names(model))


def test_experts_are_one_tensor_of_each_kind(tmp_path):
    """transformers' reader fuses gate and up rows again, so their order is checked, too."""
    mixtral = plain(small("Mixtral", **LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2})).requires_grad_(
        False
    )
    stored = write_gguf(mixtral, tmp_path / "toy.gguf", "F16")
    reader = gguf.GGUFReader(tmp_path / "toy.gguf")
    assert reader.get_field("llama.expert_count").contents() == 4
    assert reader.get_field("llama.expert_used_count").contents() == 2
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert stored == sum(int(tensor.n_bytes) for name, tensor in tensors.items() if name.startswith("blk."))
    experts = decoder_experts(mixtral)[1]
    gate, up, down = experts.matrices(3)
    for name, weight in {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down.T}.items():
        assert np.array_equal(tensors[f"blk.1.{name}.weight"].data[3], weight.half().numpy())
    assert np.array_equal(tensors["blk.1.ffn_gate_inp.weight"].data, experts.gate.weight.numpy())
    assert "blk.1.ffn_gate.weight" not in tensors
