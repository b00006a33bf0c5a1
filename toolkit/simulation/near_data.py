"""DIMMs that compute on what they hold: the rate of their memory, the time of products (HERMES, section IV, table II).

    visit_gb_s(64)                                     # 10.0: of each row opened, one burst is read
    gemv_s(profile("hermes-rtx4090").near_data, 1e6, 5e5)

A rank of DDR4 opens a row, reads bursts from it, and closes it. Long visits are limited by the bus. Short ones are
limited by how often rows may be opened: four within tFAW, and each bank's once in tRC. Ranks whose data meet only in
the DIMM's buffer add their rates.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from toolkit.errors import UserError
from toolkit.machines.machine import GB, NearData

MULTIPLIERS = 256  # of a GEMV unit (table II): a profile's rate of computing is theirs


@dataclass(frozen=True)
class DramTiming:
    """What limits a rank of DRAM; times in cycles of `clock_ghz`. By default DDR4-3200 with table II's timings.

    A burst of `burst_bytes` keeps the bus for `bus_cycles` (tBL). `refresh_share` is the share of the time in which a
    rank cannot be read since it refreshes. The paper gives none: a chip of 16 Gb takes 550 ns (tRFC) every 7.8 µs
    (tREFI), and its rows are closed before and opened after (tRP + tRCD, 30 ns).
    """

    clock_ghz: float = 1.6
    burst_bytes: int = 64
    bus_cycles: int = 4
    four_activates_cycles: int = 26  # tFAW
    row_cycles: int = 76  # tRC
    banks: int = 8
    refresh_share: float = (0.55 + 0.03) / 7.8

    @property
    def peak_gb_s(self) -> float:
        """Bytes a second of a bus that is never idle."""
        return self.burst_bytes * self.clock_ghz / self.bus_cycles


DDR4_3200 = DramTiming()


def visit_gb_s(
    contiguous_bytes: float, timing: DramTiming = DDR4_3200, ranks: float = 1.0, refreshes: bool = True
) -> float:
    """GB/s of a DIMM where each visit of a row reads so many contiguous bytes, in whole bursts.

    `ranks` is how many ranks' worth of data the DIMM's core takes in at once: 1 where they share a bus, as many as
    there are where each has its own. Within 3 % of a cycle-accurate simulation of one rank. Raises `UserError` for
    less than a byte or a rank below zero.
    """
    if contiguous_bytes < 1 or ranks <= 0:
        raise UserError(f"{contiguous_bytes} bytes a visit, {ranks} ranks: expected 1 or more bytes and some rank")
    bursts = -(-contiguous_bytes // timing.burst_bytes)
    a_visit = bursts * timing.burst_bytes * timing.clock_ghz
    opened = min(4 / timing.four_activates_cycles, timing.banks / timing.row_cycles)
    useful = contiguous_bytes / (bursts * timing.burst_bytes)
    share = 1 - timing.refresh_share if refreshes else 1.0
    return ranks * share * useful * min(timing.peak_gb_s, a_visit * opened)


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


def link_s(near: NearData, nbytes: Float[np.ndarray, "*shape"] | float) -> Float[np.ndarray, "*shape"] | float:
    """Seconds in which a DIMM-link moves bytes from one DIMM to another."""
    return np.divide(nbytes, near.link_gb_s * GB)


def dimms_needed(near: NearData, nbytes: float) -> int:
    """The fewest DIMMs that hold so many bytes."""
    return max(1, -int(-nbytes // near.capacity_bytes))
