"""The tokenizer that belongs to a model in memory."""

from typing import TYPE_CHECKING

from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def tokenizer_of(model: "nn.Module") -> object:
    """The tokenizer of the place that transformers loaded a model from. Raises `UserError` without one."""
    from toolkit import hub

    place = getattr(model.config, "name_or_path", "")
    if not place:
        raise UserError(f"{type(model).__name__} was loaded from no folder that has a tokenizer: pass tokenizer=")
    with hub.foreign_code(place, "it has no tokenizer that transformers can read: pass tokenizer="):
        return hub.read_tokenizer(place, local_files_only=True)
