"""A linear layer whose weight lives elsewhere: it is fetched, made dense if its method needs that, used, released."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from toolkit.formats import Packed
from toolkit.kernels.engine import tuning
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.turn import Offloaded
from toolkit.timeline import Recorder

MOST_VECTORS = 32  # of more, decoding is a small part of the product
LARGE = 1 << 20  # elements; smaller matrices are not worth measuring
_CHOICES: dict[tuple[str, int], bool] = {}  # of `multiplied_packed`, by operation and threads: asked for each matrix


class OffloadedLinear(Offloaded):
    """Takes the place of an `nn.Linear` of the same shape and bias.

    `fetch()` returns its packed weight each time it runs. Weights are made dense in `scratch`, which all layers share:
    `OpRun.scratch_bytes` of the largest, or `FileOp.scratch_bytes`, in which blocks of a GGUF file are made dense some
    rows at a time. With `packed`, single tokens are multiplied with the packed form, if its
    format has such a product. So are a few tokens on a CPU, if that is faster there than decoding; longer prompts use
    `scratch`. Weight and scratch are in the memory of `device`. `stays` says whether the packed weight is always there.
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
        stays: bool = True,
    ):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.name, self.layer, self.packed, self.stays = name, layer, packed, stays
        self.recorder = recorder
        self._fetch, self._scratch, self._device = fetch, scratch, device
        self._multiply = type(linear).forward  # Falcon's rounds the product before it adds the bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]: equal to the dense layer to the bit, unless used packed."""
        weight, vectors = self.fetched(), x.numel() // max(1, self.in_features)
        if self._multiplies_packed(weight, vectors):
            given = x.reshape(-1) if vectors == 1 else x.reshape(-1, self.in_features)
            y = self._product(weight, given).to(x.dtype)
            return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)
        found = []
        for piece in (pieces := weight.pieces(self._scratch.nbytes)):
            dense = self._dense(piece)
            begun_s = self.recorder.now_s()
            bias = self.bias if piece is weight else None
            found.append(self._multiply(SimpleNamespace(weight=dense, bias=bias), x))
            self.ended("compute", begun_s, dense.nbytes)
        if pieces[0] is weight:
            return found[0]
        y = weight.in_order(torch.cat(found, dim=-1))
        return y if self.bias is None else y + self.bias

    def fetched(self) -> Packed:
        """The packed weight, good until that of another layer is asked for."""
        return self._fetch()

    @property
    def weight(self) -> Tensor:
        """The dense weight, for a model that multiplies by it itself; good until another one is made dense."""
        weight = self.fetched()
        return self._dense(weight) if weight.pieces(self._scratch.nbytes)[0] is weight else weight.decode()

    def ended(self, stage: str, begun_s: float, nbytes: int, name: str | None = None) -> None:
        """Record a span that ends when the work is done. Copies to the device go on meanwhile."""
        self._device.wait()
        self.recorder.record(stage, name or self.name, self._device.tier, begun_s, nbytes, self.layer)

    def close(self) -> None:
        """Release the memory."""
        del self._fetch, self._scratch

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _multiplies_packed(self, weight: Packed, vectors: int) -> bool:
        if vectors == 1 or not isinstance(self._device, Cpu):
            return self.packed and weight.has_matvec and vectors == 1
        return self.packed and multiplied_packed(weight, vectors, self._scratch)

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


def multiplied_packed(weight: Packed, vectors: int, scratch: Tensor) -> bool:
    """Whether so many vectors are multiplied with the packed form: it is faster than to decode it and multiply.

    That is measured with the first large matrix of a format, for 2, 4, ... 32 vectors, and kept for the machine.
    """
    if not weight.has_batched_matvec or not 1 < vectors <= MOST_VECTORS:
        return False
    if weight.shape[0] * weight.shape[1] < LARGE:
        return True
    batch, stored = 1 << (vectors - 1).bit_length(), weight.stored
    operation = f"{stored.name} prompt {weight.dtype} {stored.dtype} {batch}".replace("torch.", "")
    key = operation, torch.get_num_threads()

    def prepare() -> tuning.Runs:
        x = torch.ones(batch, weight.shape[1])
        return {"packed": partial(weight.matvec, x), "decoded": lambda: by_torch(x.to(weight.dtype), weight, scratch)}

    if key not in _CHOICES:
        names, module = ("packed", "decoded"), type(stored).__module__
        _CHOICES[key] = tuning.fastest(operation, names, prepare, key[1], module) == "packed"
    return _CHOICES[key]


def by_torch(x: Tensor, weight: Packed, scratch: Tensor) -> Tensor:
    """The product of x [..., columns] with a weight that is made dense in scratch, whole or in pieces."""
    found = [nn.functional.linear(x, piece.dense_in(scratch)) for piece in weight.pieces(scratch.nbytes)]
    return weight.in_order(torch.cat(found, dim=-1)) if found[1:] else weight.in_order(found[0])


def itself(weight: Packed) -> Callable[[], Packed]:
    """The `fetch` of a weight that is in memory."""
    return lambda: weight
