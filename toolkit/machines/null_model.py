"""The null model: bytes over links and nothing else.

A prediction is only useful if it is better than this one. The cost model runs on a machine whose links keep their
bandwidths, while
everything else takes no time: no decoding, no products, no fixed times, no latency of the disk, no software.

    links_only(profile("endor-rtx4080"))
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pandas as pd

from toolkit.machines.machine import Memory, Profile


def links_only(machine: Profile) -> Profile:
    """The same machine with infinite rates, no fixed times and no software; only its links take time."""
    fixed = {field.name: 0.0 for field in fields(machine.links) if field.name.endswith("_fixed_s")}
    return replace(
        machine,
        storage=machine.storage and replace(machine.storage, latency_s=0.0, request_s=0.0, thread_gb_s=None),
        dram=_instant(machine.dram),
        device=_instant(machine.device),
        links=replace(machine.links, **fixed),
        software=None,
    )


def _instant(memory: Memory | None) -> Memory | None:
    if memory is None:
        return None
    decoded = dict.fromkeys([*memory.decode_gb_s, *memory.decode_curves], math.inf)
    return Memory(memory.name, memory.capacity_bytes, math.inf, decode_gb_s=decoded, sm_ghz=memory.sm_ghz)


def with_null_model(make: Callable[..., pd.DataFrame], machine: Profile, *args, **settings) -> list[pd.DataFrame]:
    """A table of the cost model (`operation_table`, say) on the machine, and the same by the null model."""
    return [make(chosen, *args, **settings) for chosen in (machine, links_only(machine))]
