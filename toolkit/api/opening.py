"""`toolkit.open`: run a model from disk."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import memory_limits
from toolkit.errors import UserError, check_whole
from toolkit.files import path_of
from toolkit.offload.variant import no_kv_type

if TYPE_CHECKING:
    from toolkit.offload.decoder.model_file import ModelFile
    from toolkit.offload.decoder.opened_file import OpenedFile
    from toolkit.offload.model import OffloadedModel


def open(
    model: str | Path,
    memory: float | str | None = None,
    dram: float | str | None = None,
    context: int = 512,
    format: str | None = None,
    weights: str | None = None,
    policy: str = "pipelined",
    reader: str | None = None,
    residency: str | None = None,
    neurons: str | None = None,
    device: str = "cpu",
    device_memory: float | str | None = None,
    verify: bool = True,
    kv_type: str | None = None,
) -> "OffloadedModel | OpenedFile":
    """Open a model that runs from disk within a limit of memory. Use it in a `with` block, or call `close`.

    A GGUF file of a Llama-shaped model is an `OpenedFile`, without torch. All else is an `OffloadedModel`, which has a
    model of transformers. Both write texts (`generate_text`) and know their `timeline`.

    Args:
        model: a folder that `pack` wrote, a GGUF file, which stays as it is, or the name of one that is downloaded.
        memory: by so much the process may grow from here on: imports, weights, buffers, activations and key-value cache
            of `context` tokens. Bytes, or "1GB", "700MB", "1.5GiB". None: no limit beside `dram`.
        dram: weights and buffers alone. None takes what `memory` leaves, or most of what is free.
        context: tokens of prompt and text for which `memory` leaves room.
        format: one of those that were packed; None takes "endor", else the first by name.
        weights: "packed" multiplies them as they are, "decoded" makes them dense first; None: packed if the format can.
        policy: "pipelined" reads the next layer while one is used, "sequential" does one thing at a time.
        reader: "aio", "threads" or "kvikio"; None takes the quickest of this system.
        residency: which neurons or experts stay in memory: "lru", "lfu", ...
        neurons: of a folder of neurons, the ones a token is computed with: "predicted" or "held".
        device: "cpu", or a GPU as torch calls it.
        device_memory: of that GPU.
        verify: read the whole folder first and compare its checksums.
        kv_type: of a GGUF file without torch, the type of keys and values in the cache: "q8_0" (8 bits, as llama.cpp
            has it, half the memory of 16), "bf16" or "f32"; None takes bf16, of models below 1 billion weights f32.

    Raises `UserError` for a place without a model, a damaged one, options that it does not have, and a limit that is
    too small; the message says how much is needed.
    """
    begun = memory_limits.anonymous_bytes()
    check_whole("context", context)
    limits = {"memory": memory, "dram": dram, "device_memory": device_memory}
    nbytes = {name: memory_limits.bytes_of(name, limit) for name, limit in limits.items()}
    from toolkit.commands.opening import kind_in, kind_of, place_of

    place = place_of(path_of(model))
    kind = kind_in(place, kind_of(place, format))
    if kind == "checkpoint":
        raise UserError(f"{place}: a checkpoint, which load_model opens whole; pack it, and open what was packed")
    given = {"weights decoded": weights == "decoded", "residency": residency, "neurons": neurons}
    given |= {"device": device != "cpu", "device_memory": device_memory, "reader kvikio": reader == "kvikio"}
    if place.is_file() and not any(given.values()):
        from toolkit.offload.decoder.model_file import ModelFile

        if file := ModelFile.of(place, kv_type, policy=policy, reader=reader, timed=True):
            return _opened_file(file, nbytes["memory"], nbytes["dram"], context, begun)
    if kv_type is not None:
        raise no_kv_type(place, kv_type)
    from toolkit.commands.folder import demand_of, method_of
    from toolkit.offload.model import OffloadedModel

    return OffloadedModel.open(
        place,
        method_of(kind, weights, device),
        memory_bytes=nbytes["memory"],
        memory_from=begun,
        dram_bytes=nbytes["dram"],
        device_bytes=nbytes["device_memory"],
        context=context,
        policy=policy,
        reader=reader,
        device=device,
        verify=verify,
        demand=demand_of(residency, neurons),
    )


def _opened_file(file: "ModelFile", memory: int | None, dram: int | None, context: int, begun: int) -> "OpenedFile":
    """A file open within limits; `begun` bytes of the process do not count."""
    from toolkit.kernels.engine import compiled
    from toolkit.offload.budget import Budget
    from toolkit.offload.decoder.opened_file import OpenedFile
    from toolkit.offload.overhead import RESIDENT_SHARE, ProcessLimit, TextRoom

    memory_limits.return_large_blocks()
    room = TextRoom(context)
    coming = file.overhead(room, not compiled.ran_before(file.kernels(room)))
    if memory is None:
        given = int(RESIDENT_SHARE * memory_limits.free_bytes()) if dram is None else dram
        return OpenedFile(file, file.within(Budget("DRAM", given), room))
    limit = ProcessLimit.now(memory, coming, begun)
    with limit.explained():
        return OpenedFile(file, file.within(Budget("DRAM", limit.budget(dram)), room))
