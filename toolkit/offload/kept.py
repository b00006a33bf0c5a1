"""A packed folder as what is packed again: its layers and small files as they are, so that the head alone is new.

pack_model(stored_model(store, "endor"), folder, KeptLayers(store), head=pack_head, treatment=KeptFiles(store))
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.offload.stored import LAYOUTS, packed_layer
from toolkit.sparsity.layerwise import Matrix
from toolkit.sparsity.treatment import Treatment
from toolkit.storage.head_packing import HEAD_ROWS
from toolkit.storage.packing import Layout, Linears
from toolkit.storage.runs import OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op


class KeptLayers(Layout):
    """The layers of a store as they are, in all its variants: nothing is encoded again."""

    def __init__(self, store: Store):
        if store.head_rows is not None:
            raise UserError(f"{store.folder}: its head is packed already; begin with a folder whose head is whole")
        self._store = store
        self._beside = {run.name for run in store.index.rest}

    @property
    def variants(self) -> Sequence[str]:
        """The names of the store's variants."""
        return self._store.variants

    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """The stored ops."""
        if (number, variant) in self._store.layers:
            for name, packed in packed_layer(self._store, number, variant).items():
                yield Op.of(number, name, variant, packed)

    def pairs(self, block: nn.Module, run: OpRun, packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """As the layout that packed the store has them."""
        return LAYOUTS.get(run.variant, Linears()).pairs(block, run, packed)

    def weights(self, model: nn.Module) -> list[Tensor]:
        """The tensors that the store has in its layers."""
        tensors = model.state_dict(keep_vars=True)
        beside = {id(tensors[name]) for name in self._beside}  # a tied head has its embedding's
        return [tensor for tensor in tensors.values() if id(tensor) not in beside]

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of the store's layers."""
        return sum(self._store.nbytes(variant) for variant in self.variants)

    def about(self, model: nn.Module) -> Mapping[str, object]:
        """The facts of the store's index, its model's name among them."""
        return {name: fact for name, fact in self._store.model.items() if name != HEAD_ROWS}


class KeptFiles(Treatment):
    """Changes no block, and keeps the small files of a store that its model does not write, such as predictors."""

    def __init__(self, store: Store):
        self._folder = store.model_folder

    def files(self, place: Path) -> None:
        """Copy them."""
        for file in filter(Path.is_file, self._folder.rglob("*")):
            copy_of = place / file.relative_to(self._folder)
            if not copy_of.exists():
                copy_of.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy_of)
