"""The type of numbers that a model is computed in fastest on this machine."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.cache import kept

if TYPE_CHECKING:
    import pandas as pd

CLEARLY = 0.8  # of float32's time: bfloat16 is chosen for no less, so that the choice stays


@cache
def fast_dtype() -> torch.dtype:
    """The faster of bfloat16 and float32 for a model's arithmetic on text; on a CPU they are timed, once a machine.

    An instruction for bfloat16 is not enough: it halves the time of a product on Zen 5 and doubles it on Sapphire
    Rapids without AMX. The choice is kept: other work could change it, and results differ in their last digits.
    """
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    seconds = _product_seconds().set_index("dtype")["seconds"]
    return torch.bfloat16 if seconds["bfloat16"] < CLEARLY * seconds["float32"] else torch.float32


def _this_machine() -> dict[str, object]:
    from toolkit.kernels.engine.tuning import machine

    return {"machine": list(machine())}


@kept("measured", key=_this_machine)
def _product_seconds() -> "pd.DataFrame":
    """`seconds` of a product by `dtype`."""
    import pandas as pd

    from toolkit.kernels.engine.tuning import measure

    seconds = measure({name: _product(getattr(torch, name)) for name in ("bfloat16", "float32")})
    return pd.DataFrame({"dtype": list(seconds), "seconds": list(seconds.values())})


def _product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A product of the size that a small model's FFN has for half a window of text."""
    x, weight = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    return lambda: nn.functional.linear(x, weight)
