"""A GGUF file as an ordinary model of transformers, every weight dequantised.

    model, tokenizer = read(read_header(file), torch.float32)

`run` multiplies the file's blocks instead: `toolkit.offload.decoder`, or `toolkit.storage.gguf_store`.

The configuration comes from `gguf_config`, names and layouts from `gguf_tensors`. A few more architectures are read by
transformers' own loader, which leaves out keys: a file with a key that it leaves out is refused.
"""

import contextlib
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.hub import NO_CODE
from toolkit.models.gguf_config import FAMILIES, HARMLESS, NEUTRAL, config_of
from toolkit.models.gguf_header import GgufHeader
from toolkit.models.gguf_tensors import Placement, dequantised, fill, placements
from toolkit.models.gguf_tokenizer import read_tokenizer
from toolkit.models.on_demand import TensorSource
from toolkit.models.skeleton import outline
from toolkit.records import line

# architectures that only transformers' loader reads
BY_TRANSFORMERS = ("bloom", "deci", "falcon", "gemma4", "gpt2", "lfm2", "mamba", "qwen35", "qwen35moe")
# keys that its loader leaves out, with the values that its classes have; it leaves out lengths, which tensors have
USUAL = {"attention.head_count": (0,), "attention.layer_norm_epsilon": (1e-5,), "ssm.dt_b_c_rms": (False,)}


def architectures() -> Sequence[str]:
    """The architectures of GGUF files that `read` takes, by their names in the files."""
    return sorted({*FAMILIES, *BY_TRANSFORMERS})


def check(header: GgufHeader) -> None:
    """Raise the `UserError` that `read` would raise for a file's header, before any weight is read."""
    check_header(header)
    if header.architecture in FAMILIES:
        plan(header)


def check_header(header: GgufHeader) -> None:
    """Raise `UserError` for an architecture, a tokenizer or a key that cannot be read."""
    architecture, tokenizer = header.architecture, header.metadata.get("tokenizer.ggml.model")
    if architecture is None:
        raise UserError("its header names no architecture (general.architecture): it is no model")
    if architecture not in (known := architectures()):
        raise UserError(
            f"the toolkit reads no GGUF file of architecture {architecture!r:.99}; it reads {', '.join(known)}"
        )
    if tokenizer in (None, "none", "no_vocab"):
        raise UserError("it has no tokenizer (tokenizer.ggml.model); convert the model again with its tokenizer")
    if architecture not in FAMILIES:
        _check_keys(header)


def read(header: GgufHeader, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model of a file, each weight dequantised to float32 and rounded to `dtype` once, and its tokenizer.

    A head that the file stores apart from the embedding stays apart. Buffers that no file holds, such as frequencies
    of rotary embeddings, are on the device "meta": save the model and load it. Raises `UserError` for what `check`
    refuses, and for a tokenizer that cannot be built.
    """
    check_header(header)
    if header.architecture not in FAMILIES:
        tokenizer = read_tokenizer(header)
        return _by_transformers(header, dtype), tokenizer
    model, placed = plan(header, dtype)
    tokenizer = read_tokenizer(header)
    return _filled(model, dict(_values(model, placed))), tokenizer


def plan(header: GgufHeader, dtype: torch.dtype | None = None) -> tuple[nn.Module, list[Placement]]:
    """The model without its weights, and where each tensor of the file goes.

    Raises `UserError` as `placements` and `config_of` do, for an architecture of `FAMILIES`.
    """
    config = config_of(header)
    config.dtype = dtype
    model = outline(config)
    sizes = {name: tuple(tensor.shape) for name, tensor in _stored(model).items()}
    return model, placements(header, sizes, (config.num_attention_heads, config.num_key_value_heads))


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model that a file holds: parameters and lasting buffers, tied ones once."""
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return dict(reversed(tensors.values()))


def _filled(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model with these tensors, in place. Buffers that are computed may be missing."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model


def parameters(header: GgufHeader, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and lasting buffers of a file of `FAMILIES` by their names, dequantised one after the other."""
    return _values(*plan(header, dtype))


def _values(model: nn.Module, plan: Sequence[Placement]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model without weights, filled one after the other."""
    parts = _by_parameter(plan)
    for name, tensor in _stored(model).items():
        yield name, _filled_by(parts[name], tensor)


def _by_parameter(plan: Sequence[Placement]) -> dict[str, list[Placement]]:
    parts: dict[str, list[Placement]] = {}
    for placement in plan:
        parts.setdefault(placement.parameter, []).append(placement)
    return parts


@torch.no_grad()
def _filled_by(parts: Sequence[Placement], tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor whose parts these are."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    for placement in parts:
        fill(values, placement)
    return values


class GgufSource(TensorSource):
    """The tensors of a file of `FAMILIES`, dequantised when they are used. Raises `UserError` as `plan` does."""

    def __init__(self, header: GgufHeader, outline: nn.Module, dtype: torch.dtype):
        """`dtype` is that of dequantised values, which are then rounded to those of the outline."""
        self.outline = outline
        shapes, placed = plan(header, dtype)
        self._shapes, self._parts = _stored(shapes), _by_parameter(placed)

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """These tensors."""
        types = {name: tensor.dtype for name, tensor in self.outline.state_dict().items()}
        return {name: _filled_by(self._parts[name], self._shapes[name]).to(types[name]) for name in names}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some rows of a matrix."""
        (placement,), dtype = self._parts[name], self._shapes[name].dtype
        return dequantised(placement.tensor, dtype, slice(start, stop)).to(self.outline.get_parameter(name).dtype)


def _check_keys(header: GgufHeader) -> None:
    """Raise `UserError` for a key that transformers' loader leaves out and that may change what the model computes."""
    if len(header.files) > 1:
        raise UserError(
            f"its architecture {header.architecture!r} is read from one file only; join its pieces with "
            "llama-gguf-split --merge"
        )
    prefix, used = f"{header.architecture}.", set(_used_keys(header))
    for key, value in header.metadata.items():
        short = key.removeprefix(prefix)
        known = short in used or short in HARMLESS or short.endswith(("_length", "head_count_kv"))
        usual = any(math.isclose(value, other, rel_tol=1e-6) for other in (NEUTRAL | USUAL).get(short, ()))
        if key.startswith(prefix) and not known and not usual:
            raise UserError(
                f"its {key} is {line(repr(value)):.60}, which transformers' loader leaves out for this architecture"
            )


def _used_keys(header: GgufHeader) -> Iterator[str]:
    """The keys of an architecture that transformers' loader uses."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config, read_gguf_metadata

    used = []

    class Metadata(dict):
        def __getitem__(self, key):
            used.append(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            used.append(key)
            return super().get(key, default)

    if header.architecture in GGUF_CONFIG_ARCHS:
        metadata, tensors = read_gguf_metadata(str(header.file))
        get_gguf_config(Metadata(metadata), tensors)
        yield from (key.removeprefix(f"{header.architecture}.") for key in used)
        return
    table: Mapping[str, str | None] = GGUF_CONFIG_MAPPING[str(header.architecture)]
    yield from (key for key, name in table.items() if name is not None)


def _by_transformers(header: GgufHeader, dtype: torch.dtype) -> nn.Module:
    """The model as transformers reads it. Raises `UserError` unless it has as many weights as the file."""
    import transformers

    origin = {"pretrained_model_name_or_path": str(header.file.parent), "gguf_file": header.file.name}
    options = {"dtype": dtype, "quantization_config": transformers.GgufConfig(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar obeys no setting
        quantised, info = transformers.AutoModelForCausalLM.from_pretrained(
            **origin, **options, **NO_CODE, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"it lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    model = _plain(quantised, dtype)
    taken = sum(weight.numel() for weight in model.parameters())
    if header.weights != taken:
        raise UserError(f"it has {header.weights:,} weights, and transformers takes {taken:,}: it leaves some out")
    return model


def _plain(quantised: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same weights in a fresh model: transformers refuses to save one whose config names a GGUF file."""
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # the kept copy names no path of this machine
    config.dtype = dtype
    model = outline(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    return model
