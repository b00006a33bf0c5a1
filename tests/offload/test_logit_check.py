"""Faults of an opened folder show in its logits, however small the model."""

import pytest
import torch
from torch import nn

from tests.families import load_family
from tests.refusals import refused
from toolkit.errors import UserError
from toolkit.formats.endor import Endor
from toolkit.models import ffn, skeleton
from toolkit.offload import linear, logit_check, neuron_ffn
from toolkit.offload.logit_check import check_logits
from toolkit.offload.single_token import SingleToken
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model


def buffers_of_the_models_type(patch):
    right = skeleton.NewTensors
    patch.setattr(skeleton, "NewTensors", lambda dtype, *device: right(torch.bfloat16, *device))


def linears_that_add_at_once(patch):
    make = linear.OffloadedLinear.__init__

    def init(self, *arguments):
        make(self, *arguments)
        self._multiply = nn.Linear.forward

    patch.setattr(linear.OffloadedLinear, "__init__", init)


def ffns_that_are_not_tried(patch):
    patch.setattr(ffn, "_TRIED", {})
    patch.setattr(ffn, "_tried", lambda module, form, act: form._replace(activation="relu2"))


def wrong_single_tokens(patch):
    step = SingleToken.__call__

    def wrong(self, token, cache, position=None):
        return step(self, token, cache, position + 1)

    patch.setattr(SingleToken, "__call__", wrong)


def only(vectors, packed):
    """A fault of linears for so many vectors alone, multiplied packed or with their weights decoded."""

    def fault(patch):
        forward = linear.OffloadedLinear.forward

        def wrong(self, x):
            same = self.packed == packed and (x.numel() // self.in_features in vectors)
            return forward(self, x) * (1.1 if same else 1)

        patch.setattr(linear.OffloadedLinear, "forward", wrong)

    fault.__name__ = f"{'packed' if packed else 'decoded'}_{'_'.join(map(str, vectors))}"
    return fault


def products(ndim):
    """A fault of packed products with a single vector, or with a few."""

    def fault(patch):
        multiply = Endor.matvec
        patch.setattr(Endor, "matvec", lambda self, x: multiply(self, x) * (-1 if x.ndim == ndim else 1))

    fault.__name__ = f"products_of_{ndim}_dimensions"
    return fault


def neurons_of_few_tokens(patch):
    add = neuron_ffn.kernel.add_listed

    def wrong(partials, bundles, listed, *others, **named):
        add(partials, bundles, listed, *others, **named)
        if len(partials[0]) > 1:
            partials *= -1

    patch.setattr(neuron_ffn.kernel, "add_listed", wrong)


FAULTS = {
    only((2,), False): ("GPT-J", Linears(), "endor, few tokens"),
    only((1,), False): ("GPT-J", Linears(), "endor, single tokens"),
    only((33,), True): ("GPT-J", Linears(), "endor_packed, output of block 0"),
    products(2): ("GPT-J", Linears(), "endor_packed, few tokens"),
    products(1): ("GPT-J", Linears(), "endor_packed, single tokens"),
    neurons_of_few_tokens: ("Qwen2", Neurons(), "bundled, few tokens"),
    buffers_of_the_models_type: ("GPT-J", Linears(), "endor, output of block 0"),
    linears_that_add_at_once: ("Falcon, with biases", Linears(), "endor, output of block 0"),
    ffns_that_are_not_tried: ("BitNet", Neurons(), "bundled, output of block 0"),
    wrong_single_tokens: ("Qwen2", Linears(), "endor_packed, single tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(tmp_path, monkeypatch, fault):
    family, layout, where = FAULTS[fault]
    model = load_family(family, tmp_path / "model", torch.bfloat16)
    fault(monkeypatch)
    pack_model(model, tmp_path / "store", layout)
    with refused(rf"\({where}\) has other logits .* off by [\d.]+ of their"):
        check_logits(tmp_path / "store", model)


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("model.norm.weight", 1.02, "other logits"),
        ("model.embed_tokens.weight", torch.nan, r"^the model itself gives logits that are NaN or infinite[^\n]*$"),
    ],
)
def test_other_tensors_and_a_model_that_overflows_are_noticed(tmp_path, name, factor, message):
    model = load_family("Qwen2", tmp_path / "model", torch.bfloat16)
    pack_model(model, tmp_path / "store", Linears(("dense", "zstd")))
    assert check_logits(tmp_path / "store", model) < 0.05
    model.get_parameter(name).mul_(factor)
    with pytest.raises(UserError, match=message):
        check_logits(tmp_path / "store", model)


@pytest.mark.parametrize(("rounding", "accepted"), [(0.0, False), (0.1, True), (9.0, True)])
def test_the_models_own_rounding_is_no_fault(tmp_path, monkeypatch, rounding, accepted):
    """Neurons near a threshold come and go by rounding alone; then another sum of the same FFN is no fault."""
    model = load_family("Qwen2", tmp_path / "model", torch.bfloat16)
    pack_model(model, tmp_path / "store", Neurons([0.01] * model.config.num_hidden_layers))
    monkeypatch.setitem(logit_check.ROUNDED, torch.bfloat16, 0.0)
    monkeypatch.setattr(logit_check._Text, "rounding", lambda self, model, cache, logits: logits * rounding)
    if accepted:
        assert 0 < check_logits(tmp_path / "store", model) < 0.3
    else:
        with pytest.raises(UserError, match="other logits"):
            check_logits(tmp_path / "store", model)
