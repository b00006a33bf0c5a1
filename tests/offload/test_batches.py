"""Batches, padding, beams and long texts from disk: as transformers gives them with the same weights in memory."""

import pytest
import torch

from tests.families import WORDS, load_family
from toolkit.models import decoder_blocks
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.offload.placement import LayerMap
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = 520  # tokens of a prompt
STREAMED = {"placement": LayerMap(0, 0, 2), "method": "endor"}  # both layers come from disk for each pass
WAYS = {
    "layers, packed": ("Qwen2", Linears(), STREAMED | {"method": "endor_packed"}),
    "layers, windowed": ("Mistral, windowed", Linears(), STREAMED),
    "layers, positions learned": ("GPT-2", Linears(), STREAMED),
    "layers, alibi": ("Bloom", Linears(), STREAMED),
    "layers, long and local": ("Gemma3", Linears(), STREAMED),
    "neurons": ("Qwen2", None, {"demand": Demand(window=0)}),
    "experts": ("Mixtral", WholeExperts(), {"demand": Demand(window=0)}),
}


@pytest.fixture(scope="module", params=WAYS)
def both(request, tmp_path_factory):
    """A model in memory, and the same from disk. By neuron all outputs count, so that logits are the dense ones."""
    (family, layout, options), tmp_path = WAYS[request.param], tmp_path_factory.mktemp("batches")
    model = load_family(family, tmp_path / "model", torch.float32)
    layout = layout or Neurons([0.0] * len(decoder_blocks(model)))
    pack_model(model, tmp_path / "packed", layout)
    with OffloadedModel.open(tmp_path / "packed", **options) as packed, torch.no_grad():
        yield model, packed


def tokens(*shape):
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(0))


def assert_same_logits(both, ids, **named):
    model, packed = both
    expected, found = model(ids, **named).logits, packed.model(ids, **named).logits
    shown = named.get("attention_mask", torch.ones_like(ids)).bool()  # padding has no logits of its own
    torch.testing.assert_close(found[shown], expected[shown], rtol=1e-3, atol=1e-3)


def test_left_padding(both):
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4], mask[1, :1] = 0, 0
    assert_same_logits(both, tokens(3, 9), attention_mask=mask)
    given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = [one.generate(tokens(3, 9), **given) for one in both]
    assert torch.equal(*found)


def test_beams(both):
    given = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = [one.generate(tokens(2, 7), **given) for one in both]
    assert torch.equal(*found)


def test_positions_beyond_five_hundred(both):
    assert_same_logits(both, tokens(1, LONG))
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = [one.generate(tokens(1, LONG), **given) for one in both]
    assert torch.equal(*found)
