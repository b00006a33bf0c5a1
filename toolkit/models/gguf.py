"""A GGUF file as an ordinary model of transformers, every weight dequantised."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.models.gguf_header import read_header
from toolkit.models.hub import NO_CODE


def architectures() -> Sequence[str]:
    """The architectures of GGUF files that transformers reads, by their names in the files."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    newer: Sequence[str] = ()
    with contextlib.suppress(ImportError):  # versions of transformers before its second reader
        from transformers.integrations.gguf.utils import GGUF_ARCHS as newer
    return sorted({*GGUF_SUPPORTED_ARCHITECTURES, *newer})


def read(gguf: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model in a file, each weight dequantised to float32 and rounded to `dtype` once, and its tokenizer.

    A head that the file stores apart from the embedding stays apart. Raises `UserError` if the file lacks a tensor of
    the model, or has weights that the model does not take: transformers would make up the first, and leave out the
    others.
    """
    import transformers

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    options = {"dtype": dtype, "output_loading_info": True, **NO_CODE}
    if hasattr(transformers, "GgufConfig"):  # versions without this argument always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    quantised, info = transformers.AutoModelForCausalLM.from_pretrained(**origin, **options)
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"it lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    model = _plain(quantised, dtype)
    _check_whole(gguf, model)
    return model, transformers.AutoTokenizer.from_pretrained(**origin, **NO_CODE)


def _plain(quantised: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same weights in a fresh model: transformers refuses to save one whose config names a GGUF file."""
    import transformers

    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # the kept copy names no path of this machine
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **NO_CODE)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    return model


def _check_whole(gguf: Path, model: nn.Module) -> None:
    """Raise `UserError` unless the model has as many weights as the file."""
    stored, taken = read_header(gguf).weights, sum(weight.numel() for weight in model.parameters())
    if stored != taken:
        raise UserError(
            f"its tensors have {stored:,} weights, and transformers takes {taken:,} of them: it leaves some out, such "
            "as factors of rotary embeddings"
        )
