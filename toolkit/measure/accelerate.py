"""Hugging Face Accelerate's disk offload, as a contestant beside our runtime."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.files import check_space
from toolkit.measure.contestant import Contestant, Decoding, Reference, Text
from toolkit.models import decoder_blocks
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.ways import Placed, Way
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
    """A decoder whose blocks Accelerate keeps on the disk. Embeddings, norms and head stay in memory.

    The model loses its blocks' weights. `held_bytes` are those of what stays, and of the largest matrix that passes.
    Products are stage `other`. Raises `UserError` if the disk is too small.
    """

    mode = MAPPED

    def __init__(self, method: str, model: nn.Module, folder: Path, text: Text, labels: Mapping[str, object]):
        super().__init__(f"{method}, sequential,", text, labels)
        passing = [weight.nbytes for weight in decoder_blocks(model).parameters()]
        self.held_bytes = sum(weight.nbytes for weight in model.parameters()) - sum(passing) + max(passing)
        offloaded = DiskOffloaded(model, folder / method, decoder_blocks(model))
        self.model, self.recorder = model, offloaded.recorder
        self.nbytes, self.files = offloaded.stored_bytes, offloaded.files


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
