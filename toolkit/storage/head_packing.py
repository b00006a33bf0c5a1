"""The output head of a model that is packed: parts of its rows, stored as layers after the blocks.

parts = HeadParts(model, partial(encode, "endor"))
write_layers(folder, chain(blocks, parts.layers(["endor"])), ...)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.formats import Packed, decode
from toolkit.models import decoder_blocks
from toolkit.models.head import HEAD, head_parts, rows_of_part, untied_head
from toolkit.models.on_demand import is_on_demand, rows_of
from toolkit.models.skeleton import check_head_alone
from toolkit.storage.runs import OpRun
from toolkit.storage.writing import Op

Pack = Callable[[Tensor], Packed]
HEAD_ROWS = "head_rows"


class HeadParts:
    """The head of `model` in parts of `rows` rows, each packed by `pack`; no part if `pack` is None.

    Raises `UserError` if the head cannot be packed apart from the model.
    """

    def __init__(self, model: nn.Module, pack: Pack | None):
        self.count = self.rows = 0
        self._model, self._pack, self._blocks = model, pack, len(decoder_blocks(model))
        if pack:
            check_head_alone(model.config)
            self.rows = rows_of_part(untied_head(model))
            self.count = len(head_parts(model, self.rows))

    @property
    def weights(self) -> list[Tensor]:
        """The head's weight [words, hidden], if it is packed."""
        return [self._model.get_output_embeddings().weight] if self._pack else []

    @property
    def about(self) -> Mapping[str, object]:
        """Facts that a reader of the store needs."""
        return {HEAD_ROWS: self.rows} if self._pack else {}

    @torch.no_grad()
    def layers(self, variants: Sequence[str]) -> Iterator[list[Op]]:
        """Each part, packed once for all variants; the head of a model in memory gets what it decodes to."""
        if self._pack is None:
            return
        module = self._model.get_output_embeddings()
        for number in range(self.count):
            start = number * self.rows
            stop = min(start + self.rows, module.weight.shape[0])
            packed = self._pack(rows_of(module, start, stop))
            for variant in variants:
                yield [Op.of(self._blocks + number, HEAD, variant, packed)]
            if not is_on_demand(self._model):
                module.weight.data[start:stop].copy_(decode(packed))

    def pair(self, run: OpRun, packed: Packed) -> tuple[Tensor, Tensor]:
        """The weights of a stored part, and the values that it decodes to."""
        start = (run.layer - self._blocks) * self.rows
        return rows_of(self._model.get_output_embeddings(), start, start + run.shape[0]), decode(packed)
