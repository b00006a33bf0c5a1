"""Machines as plain numbers: the papers' and this one as probed, and a scheduler of steps on their resources.

- `machine`: disk, memories, processors and links; `hardware`: the profiles of `data/hardware`
- `probe`: this machine's rates, measured (`disk`, `memory`); `fit`: rates from times
- `provenance`: the machine, the versions and the code behind a number
- `schedule`: when steps start and end; `null_model`: bytes over links and nothing else
"""
