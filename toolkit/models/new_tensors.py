"""The device and the type of new tensors, for one thread and for a while.

    with NewTensors(torch.bfloat16, "meta"):
        model = kind(config)

torch's default type belongs to the whole process, and `torch.device` as a context notes its device for the whole
process. To set them would change what other threads compute, and two threads that set and restore them can leave the
wrong one behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

EXPLICIT = {"float", "double", "half", "bfloat16", "type"}  # functions that name a type


@contextmanager
def lasting() -> Iterator[None]:
    """New tensors of this thread are float32, in the host's memory, without gradients, and may be written to later.

    That is so whatever torch's default type and device are, and in `torch.inference_mode`, whose tensors nobody can
    write to outside of it.
    """
    with torch.inference_mode(False), torch.no_grad(), NewTensors(torch.float32, "cpu"):
        yield


def of_float32() -> AbstractContextManager:
    """New tensors of this thread are float32, whatever torch's default type is."""
    return nullcontext() if torch.get_default_dtype() == torch.float32 else NewTensors(torch.float32)


class NewTensors(TorchFunctionMode):
    """Inside the block, tensors of this thread get `dtype` wherever torch would take its default type.

    That is so for new ones (`torch.zeros(3)`) and for operations that make floats of integers (`torch.arange(3) / 2`).
    New ones lie on `device`, if it is given, unless a call names another one. Raises `ValueError` for a type that holds
    no floats.
    """

    def __init__(self, dtype: torch.dtype, device: str | None = None):
        super().__init__()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype {dtype}: expected a type of floating-point numbers, such as bfloat16")
        self.dtype, self.device = dtype, device

    def __enter__(self):
        """Begin. Blocks within blocks replace the type of the outer one."""
        self._default = torch.empty(0, device="cpu").dtype
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call a function of torch; call it once more if its result took the default type."""
        named = dict(kwargs or {})
        makes = function in _device_constructors()
        if makes and self.device and named.get("device") is None:
            named["device"] = self.device
        result = function(*args, **named)
        if not self._by_default(result, function, [*args, *named.values()]):
            return result
        if makes:
            return function(*args, **named | {"dtype": self.dtype})
        try:
            return function(*map(self._as_float, args), **{name: self._as_float(it) for name, it in named.items()})
        except (TypeError, RuntimeError):  # it needs integers or truth values
            return result.to(self.dtype)

    def _by_default(self, result: object, function, given: Sequence[object]) -> bool:
        """Whether the type of a result is the default type, and not one that the caller chose."""
        return (
            isinstance(result, Tensor)
            and result.dtype == self._default != self.dtype
            and getattr(function, "__name__", "") not in EXPLICIT
            and not any(isinstance(it, torch.dtype) or _floats(it) for it in given)
        )

    def _as_float(self, value: object) -> object:
        return value.to(self.dtype) if isinstance(value, Tensor) else value


def _floats(value: object) -> bool:
    """Whether a tensor or a NumPy array is among the values, and holds no integers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(map(_floats, value))
    if isinstance(value, Mapping):
        return any(map(_floats, value.values()))
    dtype = getattr(value, "dtype", None)
    return dtype.is_floating_point or dtype.is_complex if isinstance(dtype, torch.dtype) else dtype is not None
