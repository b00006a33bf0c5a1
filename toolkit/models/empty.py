"""Models without parameters, made of a configuration alone."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from toolkit.errors import UserError
from toolkit.models import hub

GENERATION = "generation_config.json"


def empty_model(folder: Path) -> nn.Module:
    """The causal language model that a folder's config.json describes, on the device "meta".

    Buffers that are computed and not stored are there. Tied parameters are one. Raises `UserError` for a configuration
    that transformers does not know; code in the folder is never run.
    """
    from transformers import AutoConfig, GenerationConfig

    local = {"local_files_only": True}
    with hub.quiet():
        try:
            model = _empty(AutoConfig.from_pretrained(folder, **hub.NO_CODE, **local))
            if (folder / GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder, **local)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: no model can be made of its configuration: {hub.reason(error)}") from error
    return model


def check_reopens(model: nn.Module) -> None:
    """Raise `UserError` unless the model's configuration, once written and read, describes exactly its tensors.

    A configuration can say that the output head is tied to the embedding while the weights hold a head of its own, or
    the other way round. Such a model runs in memory, but a folder written of it would not load.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        try:
            expected = _shapes(empty_model(Path(folder)))
        except UserError as error:
            words = str(error).removeprefix(f"{folder}: ")
            raise UserError(f"{type(model).__name__} could not be opened again: {words}") from error
    has = _shapes(model)
    for name in sorted(has.keys() | expected.keys()):
        if has.get(name) != expected.get(name):
            raise UserError(
                f"{type(model).__name__} could not be opened again: its {name} is {_told(has.get(name))}, but its "
                f"config.json tells {_told(expected.get(name))}; correct config.json (tie_word_embeddings says whether "
                "the head is the embedding)"
            )


def _empty(config) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **hub.NO_CODE)
    model.tie_weights()  # making the model empty untied them
    return model


def _shapes(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tensor. A shared one is listed under its first name."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tuple(tensors[name].shape) for name in first.values()}


def _told(shape: tuple[int, ...] | None) -> str:
    return "absent or shared" if shape is None else " × ".join(map(str, shape))
