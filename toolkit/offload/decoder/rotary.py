"""The angles of rotary embeddings: the frequencies of each scaling, as transformers computes them.

Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023. Arithmetic is in fp32, as there.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32


class Rotary:
    """The cosines and sines of positions, for heads of `size` elements and transformers' parameters of a block."""

    def __init__(self, parameters: Mapping[str, Any], size: int):
        self.frequencies = FREQUENCIES[parameters["rope_type"]](parameters, size)
        self.factor = np.float32(parameters.get("attention_factor", 1.0))

    def fill(
        self, first: int, cosine: Float32[np.ndarray, "positions size"], sine: Float32[np.ndarray, "positions size"]
    ) -> None:
        """Fill in the angles of positions from `first` on."""
        positions, half = np.arange(first, first + len(cosine), dtype=np.float32), len(self.frequencies)
        angles = positions[:, None] * self.frequencies
        for out, values in ((cosine, np.cos(angles)), (sine, np.sin(angles))):
            out[:, :half] = out[:, half:] = values * self.factor


def _periods(parameters: Mapping[str, Any], size: int) -> Float32[np.ndarray, " half"]:
    """One over the frequencies before any scaling."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.float32(parameters["rope_theta"]) ** exponents


def _plain(parameters: Mapping[str, Any], size: int) -> Float32[np.ndarray, " half"]:
    return 1 / _periods(parameters, size)


def _linear(parameters: Mapping[str, Any], size: int) -> Float32[np.ndarray, " half"]:
    return _plain(parameters, size) / np.float32(parameters["factor"])


def _by_factors(parameters: Mapping[str, Any], size: int) -> Float32[np.ndarray, " half"]:
    """Each frequency has a divisor of its own. Llama 3's are of this kind in a file."""
    return 1 / (np.array(parameters["short_factor"], np.float32) * _periods(parameters, size))


def _yarn(parameters: Mapping[str, Any], size: int) -> Float32[np.ndarray, " half"]:
    """High frequencies stay, low ones are divided, those between two numbers of turns are mixed."""
    trained, base = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def place(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(parameters["beta_fast"]), place(parameters["beta_slow"])
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - low) / np.float32(high - low if high != low else 0.001)
    stays = 1 - np.clip(ramp, 0, 1)
    periods = _periods(parameters, size)
    return 1 / (np.float32(parameters["factor"]) * periods) * (1 - stays) + 1 / periods * stays


FREQUENCIES = {"default": _plain, "linear": _linear, "longrope": _by_factors, "yarn": _yarn}
