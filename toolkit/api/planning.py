"""`toolkit.plan` and `toolkit.machine`: what helps here, before anything is packed."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import memory_limits

if TYPE_CHECKING:
    from toolkit.machines.machine import Profile
    from toolkit.planner.plan import Recommendation


def plan(
    model: str | Path,
    memory: float | str | None = None,
    dram: float | str | None = None,
    loss: float = 0.05,
    measure: bool = False,
    text: str = "wiki-slice",
    prompt_tokens: int = 64,
    fresh: bool = False,
    device_memory: float | str | None = None,
    kv_type: str | None = None,
) -> "Recommendation":
    """The ways of running a model on this machine, the fastest first, before anything is packed.

    It measures the machine once, which takes one to two minutes, and predicts the speed of every way. It shows as a
    table; `.table` is the same as a pandas frame, `.choices` the ways to take, with their commands.

    Args:
        model: a shape such as "llama2-70b", a name, a folder, a GGUF file, or an id on the hub.
        memory: of a process that runs the model, all in all: bytes, or "24GB".
        dram: for weights and buffers alone, in place of `memory`. Without both, most of the free memory.
        loss: the share by which perplexity may grow.
        measure: evaluate this model's ways now, on few windows of `text`, in place of guesses.
        prompt_tokens: of the prompt before the first token.
        fresh: measure the machine again.
        device_memory: limit for a GPU's memory.
        kv_type: of a GGUF file, the type of keys and values in the cache, as `open` takes it.

    Raises `UserError` for an unknown model, and for memory below what the smallest way takes; the message names it.
    """
    from toolkit.planner.plan import plan as plan_for
    from toolkit.planner.target import open_target
    from toolkit.progress import tell

    limits = {"memory": memory, "dram": dram, "device_memory": device_memory}
    nbytes = {name: memory_limits.bytes_of(name, limit) for name, limit in limits.items()}

    def measuring(bounds: object) -> None:
        tell("measuring this machine, once for all plans: one to two minutes")

    return plan_for(
        open_target(str(model)),
        nbytes["dram"],
        loss,
        measure=measure,
        text=text,
        prompt_tokens=prompt_tokens,
        fresh=fresh,
        device_bytes=nbytes["device_memory"],
        measuring=measuring,
        memory_bytes=nbytes["memory"],
        kv_type=kv_type,
    )


def machine(name: str | None = None, fresh: bool = False) -> "Profile":
    """This machine as it was measured: disk, memory, processor, links. Or one of `data/hardware` by name.

    The first call measures for some 20 seconds, while nothing else should run; `fresh` measures again. Rates are in
    GB/s and TFLOP/s, and `.table()` has the source of each number. Raises `UserError` for an unknown name.
    """
    from toolkit.machines.hardware import profile
    from toolkit.machines.probe import probe

    return probe(fresh) if name is None else profile(name)
