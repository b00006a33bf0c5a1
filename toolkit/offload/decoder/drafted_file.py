"""Two GGUF files of one vocabulary that the decoder without torch runs: the small one drafts for the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from toolkit.errors import UserError
from toolkit.offload.budget import Budget
from toolkit.offload.decoder.decoder import Decoder
from toolkit.offload.decoder.model_file import ModelFile
from toolkit.offload.overhead import FLOAT, Overhead, TextRoom
from toolkit.offload.speculation import MOST_DRAFTED, Drafted


class DraftedDecoder(Drafted):
    """An opened decoder with an opened draft, which is in memory as a whole."""

    def __init__(self, model: Decoder, draft: Decoder, fixed: int | None):
        super().__init__(model, draft, fixed)
        self.decoder, self.recorder = model, model.recorder

    @property
    def held(self) -> str:
        """How much of the model's weights is in memory, in words; the bytes are those of both."""
        return self.decoder.held


@dataclass(frozen=True)
class DraftedFile(ModelFile):
    """A file beside the one that drafts for it. `fixed` is how many tokens are drafted a pass, as in `Drafted`."""

    draft: ModelFile
    fixed: int | None

    @classmethod
    def beside(cls, file: ModelFile, draft: ModelFile, fixed: int | None) -> Self:
        """The same file with a draft."""
        return cls(**vars(file), draft=draft, fixed=fixed)

    @property
    def most_bytes(self) -> int:
        """A bound of what weights and buffers of both can take."""
        return super().most_bytes + self.draft.most_bytes

    def kernels(self, room: TextRoom) -> str:
        """A name for the compiled functions that a text of this room needs."""
        return f"{super().kernels(room)}-{self.draft.kernels(room)}-drafted"

    def overhead(self, room: TextRoom, compiles: bool) -> Overhead:
        """The memory beside weights and buffers: libraries once, all else of both, and the logits of checks."""
        both, draft = super().overhead(room, compiles), self.draft.overhead(room, False)
        sums = {name: getattr(both, name) + getattr(draft, name) for name in ("cache", "prompt", "logits", "timeline")}
        sums["prompt"] += (MOST_DRAFTED + 1) * self.sizes.vector_bytes
        sums["logits"] += 2 * (MOST_DRAFTED + 1) * FLOAT * self.words
        return replace(both, **sums)

    @contextmanager
    def open(self, dram_bytes: int, room: TextRoom) -> Iterator[DraftedDecoder]:
        """Both within a budget, the draft first.

        Raises `UserError` as `Decoder.open` does, for a draft of another vocabulary, and for one that does not fit:
        reads would cost as much as it saves.
        """
        budget = Budget("DRAM", dram_bytes)
        with self.draft.within(budget, room) as draft:
            if passing := draft.tiers.count("storage"):
                raise UserError(
                    f"--draft {self.draft.header.file}: {passing} of its pieces do not fit into "
                    f"{dram_bytes / 1e6:.0f} MB for weights: expected memory for all of it; give more, or leave it out"
                )
            with self.within(budget, room) as model:
                yield DraftedDecoder(model, draft, self.fixed)
