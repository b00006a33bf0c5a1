"""A GGUF file as an ordinary model of transformers, every weight dequantised."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.hub import NO_CODE
from toolkit.models.gguf_header import read_header

ROTARY = "rope_freqs.weight"
LLAMA_3 = {  # Grattafiori et al., "The Llama 3 Herd of Models", 2024, as transformers' configs have it
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architectures() -> Sequence[str]:
    """The architectures of GGUF files that transformers reads, by their names in the files."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    newer: Sequence[str] = ()
    with contextlib.suppress(ImportError):  # versions of transformers before its second reader
        from transformers.integrations.gguf.utils import GGUF_ARCHS as newer
    return sorted({*GGUF_SUPPORTED_ARCHITECTURES, *newer})


def read(gguf: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model in a file, each weight dequantised to float32 and rounded to `dtype` once, and its tokenizer.

    A head that the file stores apart from the embedding stays apart, and factors of rotary embeddings are those of
    Llama 3.1. Raises `UserError` if the file lacks a tensor of the model, which transformers would fill with random
    numbers, or has weights that the model does not take, which transformers would drop.
    """
    import transformers

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    options = {"dtype": dtype, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # versions without this argument always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    quantised, info = transformers.AutoModelForCausalLM.from_pretrained(**origin, **options, **NO_CODE)
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"it lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    model = _plain(quantised, dtype)
    factors = _rotary_factors(gguf)
    if factors is not None:
        _scale_rotary(model.config, factors)
    _check_whole(gguf, model, 0 if factors is None else factors.numel())
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


def _rotary_factors(gguf: Path) -> Tensor | None:
    """The factors that divide the frequencies of rotary embeddings, fp32 [head size / 2]; None if the file has none."""
    tensor = read_header(gguf).tensors.get(ROTARY)
    if tensor is None or tensor.kind != "F32":
        return None
    with open(gguf, "rb") as source:
        source.seek(tensor.offset)
        return torch.frombuffer(bytearray(source.read(tensor.nbytes)), dtype=torch.float32)


def _scale_rotary(config, factors: Tensor) -> None:
    """Put Llama 3.1's scaling into a config that transformers made without it.

    transformers leaves the file's factors out. Only the largest differs between Llama 3.1 and 3.2. Raises `UserError`
    unless the factors are those of this scaling.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = dict(config.rope_parameters)
    config.rope_parameters = plain | LLAMA_3 | {"factor": factors.max().item()}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    frequencies = plain["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
    if scaled.shape != factors.shape or not torch.allclose(scaled, frequencies / factors, rtol=1e-4, atol=0):
        raise UserError(f"its {ROTARY} are other factors than those of Llama 3.1, which transformers cannot be told")


def _check_whole(gguf: Path, model: nn.Module, known: int) -> None:
    """Raise `UserError` unless the model and what is `known` beside it have as many weights as the file."""
    stored, taken = read_header(gguf).weights, known + sum(weight.numel() for weight in model.parameters())
    if stored != taken:
        raise UserError(f"its tensors have {stored:,} weights, and transformers takes {taken:,}: it leaves some out")
