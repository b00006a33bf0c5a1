"""Machines as plain numbers: the papers' and this one as probed, and a scheduler of steps on their resources.

- `machine`: disk, memories, processors and links; `hardware`: the profiles of `data/hardware`
- `probe`: this machine's rates, measured (`disk`, `memory`); `fit`: rates from times
- `provenance`: the machine, the versions and the code behind a number
- `schedule`: when steps start and end; `null_model`: bytes over links and nothing else
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.machines.disk import scratch_file
    from toolkit.machines.hardware import profiles
    from toolkit.machines.machine import Memory
    from toolkit.machines.null_model import links_only, with_null_model
    from toolkit.machines.probe import measurements
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Memory", "links_only", "measurements", "profiles", "scratch_file", "with_null_model"]
