"""An input embedding that stays on disk: a token needs one row of it, a few kilobytes.

A model with a vocabulary of 150 thousand words and a head of its own would hold half a gigabyte for it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn


def embedding_beside_head(model: nn.Module, packed_head: bool) -> str | None:
    """The name of the input embedding's weight; None if another part is the same matrix, as a head may be.

    A head that is packed has the matrix once more.
    """
    model.tie_weights()  # those without memory are not tied yet
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = {f"{name}.weight" for name, module in model.named_modules() if packed_head and module is head}
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in own}
    names = [name for name, tensor in tensors.items() if tensor is embedding.weight]
    return names[0] if isinstance(embedding, nn.Embedding) and len(names) == 1 else None


class StoredEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`, of any class: the rows that are asked for are read, then looked up by it.

    `row(number)` reads one [1, hidden]. Rows do not stay in memory, nor in the page cache. Timelines
    leave their reads out, which are thousands of times smaller than a layer.
    """

    def __init__(self, embedding: nn.Embedding, row: Callable[[int], Tensor]):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._row = row
        self.table = embedding
        self.table.padding_idx = None  # it matters to gradients alone, and would have to be a row of the table
        self._hold(row(0)[:0].clone())

    def forward(self, ids: Int64[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """As the embedding does. Raises `IndexError` for an id that it does not have, and `ChangedError`."""
        wanted, places = ids.unique(return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self.num_embeddings:
            raise IndexError(f"token ids {wanted[0]} to {wanted[-1]}: expected 0 to {self.num_embeddings - 1}")
        self._hold(torch.cat([self._row(number) for number in wanted.tolist()] or [self.table.weight[:0]]))
        try:
            return self.table(places)
        finally:
            self._hold(self.table.weight.data[:0].clone())

    @property
    def weight(self) -> Float[Tensor, "0 hidden"]:
        """No rows, of the embedding's type and on its device: some models ask for these."""
        return self.table.weight

    def _hold(self, rows: Float[Tensor, "rows hidden"]) -> None:
        self.table.weight = nn.Parameter(rows, requires_grad=False)
