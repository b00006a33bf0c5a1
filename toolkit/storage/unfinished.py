"""The written blocks of a store that is not finished, so that the next process goes on behind them.

    unfinished = Unfinished(folder_of(store), recipe)   # beside the store
    unfinished.number                                   # the first block that is not written

A block is written once its layers, the tensors beside them and the state of what treats the blocks are on the disk.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from toolkit.files import make_folder, read_json, replacing, write_json
from toolkit.storage.index import Shard
from toolkit.storage.runs import OpRun

RECIPE, STATE, BLOCKS = "recipe.json", "state.safetensors", "blocks"
RUNS = TypeAdapter(tuple[Shard, tuple[OpRun, ...]])


def folder_of(store: Path) -> Path:
    """The folder for what is unfinished of a store."""
    return store.with_name(f".unfinished-{store.name}")


@contextmanager
def removed(store: Path) -> Iterator[None]:
    """Remove what is unfinished of a store at the end of the block; after an error, if no block was written."""
    folder = folder_of(store)
    try:
        yield
    except BaseException:
        if not (folder / STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


class Unfinished:
    """The folder `folder`. `recipe` says what is written, as plain JSON; what another recipe left there goes.

    `number` blocks are written, and `other` says whether another recipe's were removed.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, object]):
        self.folder, self.other = folder, False
        recipe = json.loads(json.dumps(recipe))
        if folder.exists() and read_json(folder / RECIPE) != recipe:
            self.other = (folder / STATE).exists()
            self.remove()
        make_folder(folder)
        write_json(folder / RECIPE, recipe)
        self.number = self._written()
        for path in folder.glob("layer-*"):
            if int(path.name.removeprefix("layer-").partition(".")[0]) >= self.number:
                path.unlink()

    @property
    def nbytes(self) -> int:
        """The bytes of the layers that are written."""
        return sum(path.stat().st_size for path in self.folder.glob("layer-*"))

    def note(self, shard: Shard, runs: tuple[OpRun, ...]) -> None:
        """Note a shard that was written into the folder."""
        path = self.folder / f"{shard.file}.json"
        path.write_bytes(RUNS.dump_json((shard, runs)))

    def noted(self) -> Iterator[tuple[Shard, tuple[OpRun, ...]]]:
        """The shards of the written blocks."""
        for path in sorted(self.folder.glob("layer-*.json"), key=lambda path: path.stat().st_mtime_ns):
            yield RUNS.validate_json(path.read_bytes())

    def finish(self, number: int, beside: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Keep what a block has beside its layers, and the state behind it."""
        _save(self._beside(number), beside, {})
        _save(self.folder / STATE, state, {BLOCKS: str(number + 1)})

    def beside(self, number: int) -> dict[str, Tensor]:
        """The tensors that were kept with a block, as views of a file."""
        from safetensors.torch import load_file

        return load_file(self._beside(number))

    def state(self) -> dict[str, Tensor]:
        """The state behind the last written block."""
        from safetensors.torch import load_file

        return load_file(self.folder / STATE)

    def remove(self) -> None:
        """Remove the folder, for a store that is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _beside(self, number: int) -> Path:
        return self.folder / f"beside-{number:03d}.safetensors"

    def _written(self) -> int:
        from safetensors import safe_open

        if not (self.folder / STATE).exists():
            return 0
        with safe_open(self.folder / STATE, framework="pt") as file:
            return int(file.metadata()[BLOCKS])


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file(_apart(tensors), temporary, metadata)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values; no two share memory, which safetensors refuses. A predictor may have the bias of its FFN."""
    found: dict[str, Tensor] = {}
    places = set[int]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.contiguous().clone() if place in places else tensor.contiguous()
        places.add(place)
    return found
