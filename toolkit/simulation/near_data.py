"""DIMMs that compute on what they hold: the time of products (HERMES, section IV, table II).

gemv_s(profile("hermes-rtx4090").near_data, 1e6, 5e5)
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from toolkit.errors import UserError
from toolkit.machines.machine import GB, NearData

MULTIPLIERS = 256  # of a GEMV unit (table II): a profile's rate of computing is theirs


def gemv_s(
    near: NearData,
    nbytes: Float[np.ndarray, "*shape"] | float,
    products: Float[np.ndarray, "*shape"] | float,
) -> Float[np.ndarray, "*shape"] | float:
    """Seconds of one DIMM's matrix-vector product: the longer of its bytes over the bandwidth and of its products.

    `products` are multiply-adds; a batch multiplies the products and not the bytes.
    """
    return np.maximum(np.divide(nbytes, near.bandwidth_gb_s * GB), np.divide(products, near.tflop_s * 1e12 / 2))


def with_multipliers(near: NearData, multipliers: int) -> NearData:
    """DIMMs with other GEMV units; the profile has the rate of `MULTIPLIERS`. Raises `UserError` for less than one."""
    if multipliers < 1:
        raise UserError(f"multipliers: {multipliers}; expected 1 or more")
    return replace(near, tflop_s=near.tflop_s * multipliers / MULTIPLIERS)


def dimms_needed(near: NearData, nbytes: float) -> int:
    """The fewest DIMMs that hold so many bytes."""
    return max(1, -int(-nbytes // near.capacity_bytes))
