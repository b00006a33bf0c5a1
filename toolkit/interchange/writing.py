"""Write a `sparse-bitmask` checkpoint one tensor at a time. The folder appears whole or not at all."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.files import new_folder, path_of
from toolkit.formats.endor import Endor
from toolkit.formats.sparse_bitmask import PARTS, SparseBitmask
from toolkit.interchange.checkpoint_files import SHARD_BYTES, Shards, module_of, own, write_object
from toolkit.interchange.reading import CONFIG, FORMAT
from toolkit.models.plain import RoutedExperts, TransposedLinear, as_stored, plain
from toolkit.models.skeleton import check_reopens
from toolkit.progress import progress

VERSION = "0.14.0.1"  # of compressed-tensors: the files say that it wrote them


def save_model(
    model: nn.Module, folder: str | os.PathLike, tokenizer: Any = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a transformers model. The weight of an `nn.Linear` is packed if that makes it smaller.

    The other weights (an output head, for example) stay dense and are named under `ignore` in config.json. Tied
    weights are written once. Names are those of the model's own tensors; transformers 4 uses the same, except for fused
    experts. Beside the model one shard is in memory. Arguments and errors as for `save_checkpoint`. Also raises
    `UserError` for a model that is quantised or not wholly in memory, and as `check_reopens` does.
    """
    if getattr(model.config, "quantization_config", None):
        raise UserError("the model is quantised; sparse-bitmask holds plain weights: dequantise it first")
    if away := next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None):
        raise UserError(f"{type(model).__name__}: {away} is a meta tensor; load the whole model before saving it")
    check_reopens(plain(model))
    fused = {it for experts in model.modules() if isinstance(experts, RoutedExperts) for it in experts.modules()}
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, TransposedLinear) and module not in fused
    ]
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    with new_folder(path_of(folder)) as part:
        with progress("packing", len(list(model.parameters())), "tensors") as bar:

            def weights() -> Iterator[tuple[str, Tensor | SparseBitmask]]:
                for name, tensor in as_stored(model):
                    yield name, _smaller(name, tensor) if name.removesuffix(".weight") in linears else tensor
                    bar.update()

            _write(part, weights(), _for_transformers_4(config), linears, shard_bytes)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)


def save_checkpoint(
    folder: str | os.PathLike,
    weights: Iterable[tuple[str, Tensor | Endor | SparseBitmask]],
    config: Mapping,
    linears: Iterable[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint from any source of weights. They are taken one at a time.

    Args:
        folder: the folder to make; it must not exist.
        weights: the model's names and tensors; packed ones are stored packed, dense ones as they are.
        config: the model's config.json; the entry that describes the packing is added.
        linears: names of the model's `nn.Linear`s, so that config.json can list those that are not packed.
        shard_bytes: the size at which a new file begins; a packed weight is never split.

    Raises `UserError` if the folder exists, the disk is full, or a name comes twice, cannot be packed or looks like a
    part of a packed weight. After any error nothing is left behind.
    """
    with new_folder(path_of(folder)) as part:
        _write(part, weights, config, linears, shard_bytes)


def _smaller(name: str, weight: Tensor) -> Tensor | SparseBitmask:
    try:
        packed = SparseBitmask.encode(weight)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    return packed if packed.nbytes < weight.nbytes else weight


def _write(folder: Path, weights: Iterable, config: Mapping, linears: Iterable[str], shard_bytes: int) -> None:
    files = Shards(folder, shard_bytes)
    packed, zeros, elements = set(), 0, 0
    for name, weight in weights:
        files.add(_stored(name, weight))
        elements += prod(weight.shape)
        if not isinstance(weight, Tensor):
            packed.add(name.removesuffix(".weight"))
            zeros += prod(weight.shape) - (weight.values if isinstance(weight, Endor) else weight.compressed).numel()
    files.close()
    sparsity = {
        "format": FORMAT,
        "global_sparsity": round(zeros / max(1, elements), 4),  # over every element written
        "ignore": [name for name in linears if name not in packed],
        "sparsity_structure": "unstructured",
        "targets": ["Linear"],
    }
    entry = {"quant_method": "compressed-tensors", "sparsity_config": sparsity, "version": VERSION}
    write_object(folder / CONFIG, {**config, "quantization_config": entry})


def _stored(name: str, weight: Tensor | Endor | SparseBitmask) -> dict[str, Tensor]:
    """The tensors that hold one weight, each with memory of its own, as safetensors asks."""
    if isinstance(weight, Tensor):
        if module_of(name, PARTS):
            raise UserError(f"a dense tensor named {name!r} would be taken for a part of a packed weight; rename it")
        tensors = {name: weight}
    else:
        packed = SparseBitmask.from_endor(weight) if isinstance(weight, Endor) else weight
        module = name.removesuffix(".weight")
        if module == name:
            raise UserError(f"cannot store {name!r} packed; expected a name that ends in .weight")
        tensors = {f"{module}.{part}": tensor for part, tensor in packed.tensors.items()}
    return {key: own(tensor) for key, tensor in tensors.items()}


def _for_transformers_4(config: dict) -> dict:
    """With the rotary embedding's settings also where transformers 4 looks, which these compressed-tensors need."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None, **config}
