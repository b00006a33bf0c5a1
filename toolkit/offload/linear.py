"""A linear layer whose weight is elsewhere: it is fetched, made dense if its method needs that, used and released."""

from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.offload.device import Cpu, Cuda
from toolkit.timeline.spans import Recorder


class OffloadedLinear(nn.Module):
    """Takes the place of an `nn.Linear` of the same shape and bias.

    `fetch()` returns its packed weight each time it runs. `scratch` are the bytes that weights are made dense in,
    `OpRun.scratch_bytes` of the largest; all layers share them. With `packed`, single tokens are multiplied with the
    packed form, if its format has such a product, and only prompts use `scratch`. Weight and scratch are in the memory
    of `device`.
    """

    def __init__(
        self,
        linear: nn.Linear,
        name: str,
        layer: int,
        fetch: Callable[[], Packed],
        scratch: Tensor,
        packed: bool,
        recorder: Recorder,
        device: Cpu | Cuda,
    ):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.name, self.layer, self.packed = name, layer, packed
        self.recorder = recorder
        self._fetch, self._scratch, self._device = fetch, scratch, device
        self._multiply = type(linear).forward  # Falcon's rounds the product before it adds the bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]: equal to the dense layer to the bit, unless used packed."""
        weight = self.weight()
        if self.packed and weight.has_matvec and x.numel() == self.in_features:
            y = self._product(weight, x.reshape(-1)).to(x.dtype)
            return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)
        dense = self._dense(weight)
        begun_s = self.recorder.now_s()
        y = self._multiply(SimpleNamespace(weight=dense, bias=self.bias), x)
        self.ended("compute", begun_s, dense.nbytes)
        return y

    def weight(self) -> Packed:
        """The packed weight, good until that of another layer is asked for."""
        return self._fetch()

    def ended(self, stage: str, begun_s: float, nbytes: int, name: str | None = None) -> None:
        """Record a span that ends when the work is done. Copies to the device go on meanwhile."""
        self._device.wait()
        self.recorder.record(stage, name or self.name, self._device.tier, begun_s, nbytes, self.layer)

    def close(self) -> None:
        """Release the memory. Running the layer afterwards raises `UserError`."""
        self._fetch, self._scratch = _closed, self._scratch[:0].clone()

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _product(self, weight: Packed, x: Tensor) -> Tensor:
        begun_s = self.recorder.now_s()
        y = weight.matvec(x)
        self.ended("compute", begun_s, weight.nbytes)
        return y

    def _dense(self, weight: Packed) -> Tensor:
        if weight.is_dense:
            return weight.dense_in(self._scratch)
        begun_s = self.recorder.now_s()
        dense = weight.dense_in(self._scratch)
        self.ended("decode", begun_s, dense.nbytes)
        return dense


def _closed() -> Packed:
    raise UserError("this model was closed: open its folder again")
