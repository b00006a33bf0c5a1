"""A format that only a test knows: it is registered, and the runtime runs a model in it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.offload.conftest import LAYERS, pruned
from tests.offload.pretend import PretendGpu
from toolkit.errors import UserError
from toolkit.formats import FORMATS, encode
from toolkit.formats.packed import Packed, expect
from toolkit.formats.scaled import Scaled
from toolkit.measure.turns import take_turns
from toolkit.offload import model as offloaded
from toolkit.offload.methods import METHODS, Method
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.ways import Way
from toolkit.papers.endor.operations import layer_passes
from toolkit.quantization.smoothquant import round_to_int8
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
SPREAD = LayerMap(0, 1, LAYERS - 1)


@dataclass(frozen=True, eq=False)
class Backwards(Packed):
    """The rows of the matrix, the last one first."""

    name = "backwards"

    shape: tuple[int, int]
    reversed: Tensor

    @property
    def dtype(self):
        return self.reversed.dtype

    @classmethod
    def encode(cls, weight):
        return cls(tuple(weight.shape), weight.flip(0).contiguous())

    def _fill(self, out):
        out.copy_(self.reversed.flip(0))

    def check(self):
        expect("reversed", self.reversed, self.dtype, self.shape)


class Multiplied(Backwards):
    """The same with a product of its own, which is counted."""

    has_matvec = True
    products: ClassVar[list] = []

    def matvec(self, x):
        self.products.append(self.shape)
        return (self.reversed.float() @ x.float()).flip(0)


@pytest.fixture(params=[False, True], ids=["plain", "int8"])
def packed(request, tmp_path, monkeypatch):
    """A model, and the folder that it is packed in by a registered format: as it is, or in int8 with scales."""
    monkeypatch.setitem(FORMATS, "backwards", Multiplied if request.param else Backwards)
    monkeypatch.setitem(METHODS, "on_gpu", Method("backwards", "device"))
    monkeypatch.setattr(Multiplied, "products", [])
    model, folder = pruned("llama"), tmp_path / "store"
    pack_model(model, folder, Linears({"backwards": partial(Scaled.encode if request.param else encode, "backwards")}))
    if request.param:
        round_to_int8(model)
    return model, folder


@pytest.mark.parametrize("method", ["backwards", "backwards_packed"])
def test_a_new_format_runs_on_the_cpu(packed, method):
    model, folder = packed
    multiplies = method == "backwards_packed"
    if multiplies and FORMATS["backwards"] is Backwards:
        with pytest.raises(UserError, match="unknown method 'backwards_packed'"):
            OffloadedModel.open(folder, method)
        return
    with torch.no_grad(), OffloadedModel.open(folder, method, placement=SPREAD) as ours:
        assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)
        assert not Multiplied.products  # prompts are decoded
        single, expected = ours.model(PROMPT[:, :1]).logits, model(PROMPT[:, :1]).logits
    torch.testing.assert_close(single, expected, rtol=1e-3, atol=1e-4)
    assert len(Multiplied.products) == (7 * LAYERS if multiplies else 0)
    if not multiplies:
        assert torch.equal(single, expected)


@pytest.mark.parametrize("method", ["backwards", "on_gpu"])
def test_a_new_format_runs_on_a_gpu(packed, monkeypatch, method):
    model, folder = packed
    monkeypatch.setattr(offloaded, "open_device", lambda name: PretendGpu())
    where = LayerMap(1, 1, LAYERS - 2)
    with torch.no_grad(), OffloadedModel.open(folder, method, placement=where, device="cuda") as ours:
        assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)


def test_a_new_format_is_timed(packed):
    store = Store.open(packed[1])
    spans = take_turns(layer_passes([store], [(Way("backwards", device="cpu"), "storage")]), repetitions=1)
    assert (spans["stage"] == "decode").sum() == 7
