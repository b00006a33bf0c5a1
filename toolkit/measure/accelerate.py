"""Hugging Face Accelerate's disk offload, set up so that it can be timed beside our runtime."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.files import check_space, scratch_folder
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.ways import Placed, Way
from toolkit.storage.direct import drop_pages
from toolkit.timeline.spans import Recorder, Span, Timeline


class DiskOffloaded:
    """A module whose weights Accelerate keeps in files, as `accelerate.disk_offload` sets it up, on the CPU.

    `offloaded` is the part of the module that goes to disk; the default is all of it. The rest stays in memory, as
    with a `device_map` that names both. When a submodule runs, each of its parameters is copied out of its mapped file,
    through the page cache, and dropped afterwards. `recorder` has each copy as a span of stage `read`. The module loses
    its offloaded weights. `stored_bytes` is their size on disk. `folder` must not exist.
    Raises `UserError` if its disk is too small.
    """

    def __init__(self, module: nn.Module, folder: Path, offloaded: nn.Module | None = None):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
        from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

        self.module, self.folder, self.recorder = module, folder, Recorder()
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

    def drop_pages(self) -> None:
        """Remove the files from the page cache, so that the next pass reads the disk."""
        for file in self.folder.iterdir():
            drop_pages(file)

    def timed(self, *arguments: Tensor, **named: object) -> tuple[object, Timeline]:
        """The module's result with weights read from the disk, and the pass's timeline. Products are stage `other`."""
        self.drop_pages()
        with torch.no_grad():
            begun_s = self.recorder.now_s()
            result = self.module(*arguments, **named)
            ended_s = self.recorder.now_s()
        return result, self.recorder.timeline().window(begun_s, ended_s)


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


@contextlib.contextmanager
def timed_linear(weight: Float[Tensor, "outputs inputs"], folder: Path) -> Iterator[Callable[[], Timeline]]:
    """A linear that Accelerate keeps on the disk of `folder`. Each call multiplies it with one token's vector.

    The files are removed afterwards. A call raises `UserError` if a bit of the result differs from that of the weight
    in memory.
    """
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(1, weight.shape[1]).to(weight.dtype)
    expected = linear(x)
    del weight  # it may take a large part of memory
    with scratch_folder(folder) as place:
        rival = DiskOffloaded(linear, place / "weights")

        def turn() -> Timeline:
            result, timeline = rival.timed(x)
            if not torch.equal(result, expected):
                raise UserError("Accelerate gives another product than the weight in memory: nothing is timed")
            return timeline

        yield turn


RIVAL: Placed = (Way(ACCELERATE, device="cpu"), "storage")  # all on disk, one thing at a time


def beside(
    passes: Iterable[tuple[Placed, int, str, Timeline]], last: Placed, turn: Callable[[], Timeline]
) -> Iterator[tuple[Placed, int, str, Timeline]]:
    """The passes of `timed_passes`, and in each repetition one pass of Accelerate after that of `last`."""
    for case, repetition, mode, timeline in passes:
        yield case, repetition, mode, timeline
        if case == last:
            yield RIVAL, repetition, "buffered", turn()
