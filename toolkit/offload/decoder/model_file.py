"""A GGUF file that the decoder without torch runs: what is known before its weights are read, and how it is opened."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from toolkit.models.gguf_header import GgufHeader, read_header
from toolkit.models.gguf_tokenizer import read_kept_tokenizer
from toolkit.offload.budget import Budget
from toolkit.offload.decoder.architecture import Architecture, architecture_of
from toolkit.offload.decoder.decoder import Decoder, most_bytes, overhead
from toolkit.offload.overhead import Overhead, TextRoom
from toolkit.offload.text_model import TextModel


@dataclass(frozen=True)
class ModelFile:
    """The header of a file, the sizes of its model, and its tokenizer. `settings` go to `Decoder`."""

    header: GgufHeader
    sizes: Architecture
    tokenizer: Any
    settings: dict[str, Any]

    @classmethod
    def of(cls, place: Path, kv_type: str | None = None, **settings: Any) -> Self | None:
        """The file at a place; None if it has a model of another architecture.

        `kv_type` is that of the cache, as in `Architecture.with_cache`. Raises `UserError` for a damaged file, one
        without a tokenizer, and a type of the cache that the model cannot have.
        """
        header = read_header(place)
        sizes = architecture_of(header)
        if sizes is None:
            return None
        return cls(header, sizes.with_cache(kv_type), read_kept_tokenizer(header), settings)

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return self.sizes.words

    @property
    def positions(self) -> int:
        """How many tokens the model knows positions for."""
        return self.sizes.positions

    @property
    def most_bytes(self) -> int:
        """A bound of what weights and buffers can take."""
        return most_bytes(self.header)

    def kernels(self, room: TextRoom) -> str:
        """A name for the compiled functions that a text of this room needs."""
        return f"decoder-{self.sizes.mixture is not None}-{room.prompt > 1}-{self.sizes.dtype}"

    def overhead(self, room: TextRoom, compiles: bool) -> Overhead:
        """The memory that comes beside weights and buffers; `compiles`: no compiled functions are kept."""
        return overhead(self.sizes, room, compiles)

    def open(self, dram_bytes: int, room: TextRoom) -> AbstractContextManager[TextModel]:
        """The decoder within a budget; see `Decoder.open`."""
        return self.within(Budget("DRAM", dram_bytes), room)

    def within(self, budget: Budget, room: TextRoom) -> Decoder:
        """The same within a budget that others take from, too."""
        return Decoder.open(self.header, self.sizes, budget, room.positions, **self.settings)

    def text_model(self, model: TextModel) -> TextModel:
        """The opened model as a `TextModel`, which it is."""
        return model

    def settings_of(self, model: TextModel) -> tuple[SimpleNamespace]:
        """The setting that names the token that ends a text, as `eos_token_id`."""
        return (SimpleNamespace(eos_token_id=self.sizes.end),)
