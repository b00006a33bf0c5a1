"""AirLLM on the CPU, as a contestant: every layer comes from the disk for every token, one while another is used.

    with closing(AirLLM(model, tokenizer, folder, text, labels)) as rival:
        take_turns([rival], repetitions=3)

PyPI's package `airllm` lies in a folder of its own under `data/cache/environments/`. Its memory cannot be limited, so
it is measured.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.files import check_space
from toolkit.measure import airllm_driver
from toolkit.measure.child import PIP, WHEELS, Child, run_installer
from toolkit.measure.contestant import Contestant, Text
from toolkit.timeline import ReportedTime

PACKAGES = ("airllm==4.0.0", "sentencepiece==0.2.3")
NAME = "AirLLM"
COPIES = 2  # of the model on the disk: the checkpoint, and AirLLM's shards


class AirLLM(Contestant):
    """A model in its own type, one layer after the other. Writes a checkpoint and AirLLM's shards into `folder`.

    Each token of the turn is one pass over the inputs of `text`, a span of stage `read`: AirLLM reads and computes side
    by side. Times are of the process's own clock. `held_bytes` is the most memory that it took
    beyond its imports. The prompt's likeliest token must be the next input. Raises `UserError` if AirLLM cannot be
    installed or cannot run the model, and for a disk that is too small.
    """

    name, mode = NAME, "page cache, dropped"

    def __init__(self, model: nn.Module, tokenizer, folder: Path, text: Text, labels: Mapping[str, object]):
        self.text, self.labels, self.held_bytes, self.recorder = text, labels, 0, ReportedTime()
        self.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        check_space(folder, COPIES * self.nbytes)
        checkpoint, shards = folder / "checkpoint", folder / "shards"
        for part in (model, tokenizer):
            part.save_pretrained(checkpoint)
        shards.mkdir()
        driver = [sys.executable, "-P", "-B", airllm_driver.__file__]
        self._child = Child(NAME, [*driver, _packages(), checkpoint, shards, str(torch.get_num_threads())])
        try:
            self._child.answer()
        except BaseException:
            self.close()
            raise

    def token(self, number: int) -> int:
        """One pass. Returns the token that would come next."""
        answer = self._child.ask(tokens=self.text.inputs[number][0].tolist(), first=number == 0)
        self.recorder.report("read", "pass", "storage", answer["seconds"], answer["read_bytes"])
        self.held_bytes = answer["held_bytes"]
        return answer["likeliest"]

    def check(self, number: int, output: int) -> None:
        """Raise `UserError` if another token than the text's follows the prompt."""
        if number == 0 and len(self.text.inputs) > 1 and output != (right := self.text.inputs[1].item()):
            raise UserError(f"{NAME} continues the prompt with token {output}; the model in memory, with {right}")

    def close(self) -> None:
        """End the process."""
        self._child.close()


@functools.cache
def _packages() -> Path:
    """The folder that has AirLLM, which is filled first if need be."""
    return cached("environments", {"packages": PACKAGES}, (), _install) / "packages"


def _install(folder: Path) -> None:
    target = ("--target", folder / "packages")
    run_installer(NAME, [sys.executable, *PIP, *WHEELS, *target, *PACKAGES])
    check = f"import sys; sys.path.append({str(folder / 'packages')!r}); import airllm"
    run_installer(NAME, [sys.executable, "-P", "-B", "-c", check])
