"""Hugging Face Accelerate's disk offload, as a contestant beside our runtime."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.extras import extra
from toolkit.files import check_space
from toolkit.measure.contestant import Contestant, Decoding, Reference, Text
from toolkit.models import decoder_blocks
from toolkit.offload.methods import ACCELERATE
from toolkit.offload.ways import Placed, Way
from toolkit.timeline import Recorder, Span

MAPPED = "mmap, pages dropped"
RIVAL: Placed = (Way(ACCELERATE, device="cpu"), "storage")  # all on disk, one thing at a time


class DiskOffloaded:
    """A module whose weights Accelerate keeps in files, as `accelerate.disk_offload` sets it up, on the CPU.

    `offloaded` is the part of the module that goes to disk; the default is all of it. The rest stays in memory, as
    with a `device_map` that names both. When a submodule runs, each of its parameters is copied out of its mapped file,
    through the page cache, and dropped afterwards. `recorder` has each copy as a span of stage `read`. The module loses
    its offloaded weights. `files` have them, `stored_bytes` in all. `folder` must not exist.
    Raises `UserError` if its disk is too small.
    """

    def __init__(self, module: nn.Module, folder: Path, offloaded: nn.Module | None = None):
        with extra("lab"):
            from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
            from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

        self.module, self.recorder = module, Recorder()
        offloaded = module if offloaded is None else offloaded
        tensors = offloaded.state_dict()
        self.stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # Accelerate writes through a mapping, so a full disk would end the process
        check_space(folder.parent, self.stored_bytes)
        offload_state_dict(folder, tensors)
        weights = Recorded(OffloadedWeightsLoader(save_folder=folder), self.recorder)
        # the body of disk_offload(), with a mapping of weights that is timed
        add_hook_to_module(offloaded, AlignDevicesHook(io_same_device=True), append=True)
        attach_align_device_hook(offloaded, execution_device=torch.device("cpu"), offload=True, weights_map=weights)
        self.files = [*folder.iterdir()]


class Recorded(Mapping):
    """Weights by name, each access a span of stage `read`."""

    def __init__(self, weights: Mapping[str, Tensor], recorder: Recorder):
        self._weights, self._recorder = weights, recorder

    def __getitem__(self, name: str) -> Tensor:
        """The weight, read."""
        start_s = self._recorder.now_s()
        weight = self._weights[name]
        self._recorder.add(Span("read", name, "storage", start_s, self._recorder.now_s(), weight.nbytes))
        return weight

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._weights)


class AcceleratedModel(Decoding):
    """A decoder that Accelerate offloads to the disk.

    With `memory_bytes` Accelerate decides what stays in memory, as for `from_pretrained` with `max_memory` and
    `offload_folder`: modules in their order, as long as they and room for the largest layer fit. That limit counts
    weights. Without it, all blocks are on the disk; embeddings, norms and head stay in memory.

    The model loses the weights that are offloaded. `held_bytes` are those of what stays, and of the largest matrix that
    passes. Products are stage `other`. Raises `UserError` if the disk is too small, or if nothing fits into memory.
    """

    mode = MAPPED

    def __init__(
        self,
        method: str,
        model: nn.Module,
        folder: Path,
        text: Text,
        labels: Mapping[str, object],
        memory_bytes: int | None = None,
    ):
        super().__init__(f"{method}, sequential,", text, labels)
        whole, self.model = _weights(model), model
        if memory_bytes is None:
            offloaded = DiskOffloaded(model, folder / method, decoder_blocks(model))
            self.recorder, self.nbytes, self.files = offloaded.recorder, offloaded.stored_bytes, offloaded.files
        else:
            self.memory, self.recorder, target = memory_bytes, Recorder(), folder / method
            self.nbytes = offload(model, memory_bytes, target, self.recorder)
            self.files = [*target.iterdir()] if self.nbytes else []
        passing = max((whole[name] for name, weight in model.named_parameters() if weight.is_meta), default=0)
        self.held_bytes = sum(whole.values()) - self.nbytes + passing


def offload(model: nn.Module, memory_bytes: int, folder: Path, recorder: Recorder) -> int:
    """Let Accelerate keep as much of a model in so many bytes of memory as it does by itself, the rest in a folder.

    Each copy out of the folder is a span of stage `read`. Returns the bytes that are on the disk. Raises `UserError` if
    nothing fits into memory, or if the disk is too small.
    """
    with extra("lab"):
        from accelerate import dispatch_model, infer_auto_device_map

    indivisible, largest = list(model._no_split_modules or ()), max(_weights(model).values())
    places = infer_auto_device_map(model, {"cpu": memory_bytes}, no_split_module_classes=indivisible)
    on_disk = [name for name, place in places.items() if place == "disk"]
    if len(on_disk) == len(places):
        least = f"{largest / 1e6:.0f} MB, its largest matrix, and one block"
        raise UserError(f"Accelerate within {memory_bytes / 1e6:.0f} MB: nothing fits; expected room for {least}")
    if not on_disk:
        return 0
    nbytes = sum(weight.nbytes for name in on_disk for weight in model.get_submodule(name).state_dict().values())
    check_space(folder.parent, nbytes)
    dispatch_model(model, places, offload_dir=folder)
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            weights.dataset = Recorded(weights.dataset, recorder)
    return nbytes


def _weights(model: nn.Module) -> dict[str, int]:
    """The bytes of each weight."""
    return {name: weight.nbytes for name, weight in model.named_parameters()}


class AcceleratedLinear(Contestant):
    """A linear that Accelerate keeps on the disk, multiplied with one token's vector. Writes its files to `folder`.

    All bits of the product must be those of the weight in memory.
    """

    name, mode = ACCELERATE, "buffered"

    def __init__(self, weight: Float[Tensor, "outputs inputs"], folder: Path, labels: Mapping[str, object]):
        self.linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.labels, self.vector = labels, torch.randn(1, weight.shape[1]).to(weight.dtype)
        self.reference = Reference("the weight in memory", [self.linear(self.vector)])
        offloaded = DiskOffloaded(self.linear, folder)
        self.recorder, self.nbytes, self.files = offloaded.recorder, offloaded.stored_bytes, offloaded.files

    @torch.no_grad()
    def token(self, number: int) -> Tensor:
        """The product."""
        return self.linear(self.vector)
