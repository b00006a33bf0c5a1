"""A linear layer whose weight is elsewhere: it is fetched, made dense if its method asks for that, used and let go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.weights import product, widened
from toolkit.timeline.spans import Recorder


class OffloadedLinear(nn.Module):
    """Stands in for an `nn.Linear` of the same shape and bias.

    `fetch()` gives its weight, packed, whenever it runs. `scratch` are the bytes that weights are made dense in,
    shared by all layers (`toolkit.offload.weights.scratch_bytes` tells how many); with `packed`, single tokens are
    multiplied with the packed form, and only prompts use it. Both are where `device` computes.
    """

    def __init__(
        self,
        linear: nn.Linear,
        name: str,
        layer: int,
        fetch: Callable[[], Packed | Scaled],
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
        stored = weight.packed if isinstance(weight, Scaled) else weight
        if self.packed and isinstance(stored, Endor) and x.numel() == self.in_features:
            return self._multiply(x, weight)
        dense = self._dense(weight)
        with self._timed("compute", dense.nbytes):
            return functional.linear(x, dense, self.bias)

    def close(self) -> None:
        """Let go of the memory; from now on, running it raises `UserError`."""
        self._fetch, self._scratch = _closed, self._scratch[:0].clone()

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _multiply(self, x: Tensor, weight: Packed | Scaled) -> Tensor:
        with self._timed("compute", weight.nbytes):
            y = product(weight, x.reshape(-1)).to(x.dtype)
            return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)

    def _dense(self, weight: Packed | Scaled) -> Tensor:
        if isinstance(weight, Dense):
            return weight.values
        rows, columns = weight.shape
        with self._timed("decode", rows * columns * weight.dtype.itemsize):
            return widened(weight, self._scratch)

    @contextmanager
    def _timed(self, stage: str, nbytes: int) -> Iterator[None]:
        """A span that ends when the work is done; what is on its way to the device goes on meanwhile."""
        with self._recorder.span(stage, self.name, self._device.tier, nbytes, self.layer):
            yield
            self._device.wait()


def _closed() -> Packed:
    raise UserError("this model was closed: open its folder again")
