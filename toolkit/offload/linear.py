"""A linear layer whose weight is elsewhere: it is fetched, made dense if its method asks for that, used and let go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional

from toolkit.formats import Packed
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.kernels import bitmap
from toolkit.offload.cpu import unpack
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.timeline import Recorder


class OffloadedLinear(nn.Module):
    """Stands in for an `nn.Linear` of the same shape and bias.

    `fetch()` gives its weight, packed, whenever it runs. `scratch` is the flat tensor that weights are made dense in,
    shared by all layers; with `packed`, single tokens are multiplied with the packed form, and only prompts use it.
    Both are where `device` computes.
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
        self._fetch, self._scratch, self._recorder, self._device = fetch, scratch, recorder, device

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]: to the bit what the dense layer gives, unless used packed."""
        weight = self._fetch()
        if self.packed and isinstance(weight, Endor) and x.numel() == self.in_features:
            return self._multiply(x, weight)
        dense = self._dense(weight)
        with self._timed("compute", dense.nbytes):
            return functional.linear(x, dense, self.bias)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _multiply(self, x: Tensor, weight: Endor) -> Tensor:
        with self._timed("compute", weight.nbytes):
            product = bitmap.matvec(weight, x.reshape(-1)).to(x.dtype)
            return (product if self.bias is None else product + self.bias).view(*x.shape[:-1], self.out_features)

    def _dense(self, weight: Packed) -> Tensor:
        if isinstance(weight, Dense):
            return weight.values
        rows, columns = weight.shape
        out = self._scratch[: rows * columns].view(rows, columns)
        with self._timed("decode", out.nbytes):
            return unpack(weight, out)

    @contextmanager
    def _timed(self, stage: str, nbytes: int) -> Iterator[None]:
        """A span that ends when the work is done; what is on its way to the device goes on meanwhile."""
        with self._recorder.span(stage, self.name, self._device.tier, nbytes, self.layer):
            yield
            self._device.wait()
