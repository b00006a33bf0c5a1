"""Models with their weights, by name: embedded ones, GGUF files, local folders and the Hugging Face hub."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit import downloads, hub, memory_limits
from toolkit.errors import UserError
from toolkit.files import path_of
from toolkit.models import adapters, skeleton, upcycled
from toolkit.models.blocks import cast_parameters, kept_in_float32
from toolkit.models.cutting import cut_for_good
from toolkit.models.gguf_folder import check_gguf, dequantised, described, is_read_here
from toolkit.models.named import EXPERTS, MODELS, gguf_file, gguf_sha256, parts_of
from toolkit.models.on_demand import TensorSource, first_outputs, is_on_demand, on_demand, shares_tensors
from toolkit.models.plain import plain
from toolkit.models.safetensors_source import SafetensorsSource
from toolkit.models.weight_map import INDEX, stored_shapes, weight_map

if TYPE_CHECKING:
    pass


LOCAL = {"local_files_only": True}  # options of `from_pretrained`
ADAPTER, SINGLE = "adapter_config.json", "model.safetensors"  # names of files
ROUNDING = 0.05  # of the logits' standard deviation


def load_model(
    name: str, dtype: torch.dtype = torch.bfloat16, memory: float | str | None = None
) -> tuple[nn.Module, object]:
    """A causal language model, in evaluation mode and without gradients, and its tokenizer.

    Args:
        name: a key of `MODELS`, a GGUF file, a folder in Hugging Face's layout, or an id on the hub.
        dtype: of every parameter; `fast_dtype()` is the quickest to compute with on this machine.
        memory: that weights may take, in bytes or as "2GB"; None takes what is free.

    A GGUF file may have any type of blocks that the package `gguf` dequantises, and any architecture of
    `toolkit.models.gguf.architectures`; of the pieces of a split one any may be named. Its blocks are dequantised once
    to float32 (`scale · q + minimum`), from a billion weights on rounded to bfloat16, and the copy is kept under the
    cache by the SHA-256 of the file. `dtype` rounds it. The embedded models are such files; those under `data/models/`
    are made of `smollm2-135m` and the files there.

    A model whose config has `activation_thresholds` cuts its neurons (`toolkit.models.cutting`).

    A model larger than this memory comes as `open_model` gives it: one block at a time is in memory.

    Code in a model's folder is never run, and pickled weights are never read. Raises `UserError` if the name is
    unknown, the hub does not give the model, the model needs code or pickled weights, its files lack a tensor or have
    one too many, or it is no decoder.
    """
    room = memory_limits.bytes_of("memory", memory)
    room = memory_limits.free_bytes() if room is None else min(room, memory_limits.free_bytes())
    return open_model(name, dtype) if _weight_bytes(name, dtype) > room else _load_whole(name, dtype)


def _load_whole(name: str, dtype: torch.dtype) -> tuple[nn.Module, object]:
    place, options = _place(name)
    parts = parts_of(name)
    _decoder_config(name, place, options)
    first = torch.float32 if parts else dtype  # the sums of weights and differences are rounded once
    with _loading(name, options):
        from transformers import AutoModelForCausalLM

        settings = {"dtype": first, "use_safetensors": True, "output_loading_info": True}
        tokenizer = hub.read_tokenizer(place, **options)  # first: weights may take minutes
        # transformers also looks for an adapter; without these options it waits half a minute for a hub that is away
        model, report = AutoModelForCausalLM.from_pretrained(
            place, adapter_kwargs=dict(options), **settings, **hub.NO_CODE, **options
        )
    _check_complete(name, report)
    plain(model)
    if parts:
        model = _made(model, parts, dtype)
    cast_parameters(model, dtype)
    cut_for_good(model)
    model.eval().requires_grad_(False)
    _check_causal(model)
    return model, tokenizer


def open_model(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, object]:
    """The model of `load_model`, whose decoder blocks are in memory only while they are used, and its tokenizer.

    A folder's tensors are mapped, a GGUF file's are dequantised each time that they are used; no copy is kept. The
    logits are those of `load_model`. A few models come whole: the toolkit's own of `smollm2-135m`, GGUF files of
    architectures that only transformers' loader reads, adapters, quantised models, and those whose blocks share
    tensors. Arguments and errors are those of `load_model`.
    """
    file = gguf_file(name)
    if parts_of(name) or (file is not None and not is_read_here(file)):
        return _load_whole(name, dtype)
    place, options = _place(name) if file is None else (described(name, file), LOCAL)
    config = _decoder_config(name, place, options)
    if file is None and (getattr(config, "quantization_config", None) or _stored_file(place, ADAPTER, options)):
        return _load_whole(name, dtype)
    with _loading(name, options):
        tokenizer = hub.read_tokenizer(place, **options)
        config.dtype = dtype
        source = _source(place, options, file, skeleton.outline(config))
        model = copy.deepcopy(source.outline)
        if shares_tensors(model):
            return _load_whole(name, dtype)
        _read_generation_config(model, place, options)
    if isinstance(source, SafetensorsSource):
        _check_complete(name, {"missing_keys": source.missing, "unexpected_keys": source.unexpected})
    skeleton.compute_buffers(plain(model))
    on_demand(model, source)
    cut_for_good(model)
    model.eval().requires_grad_(False)
    _check_causal(model)
    return model, tokenizer


def _weight_bytes(name: str, dtype: torch.dtype) -> int:
    """The bytes of the weights of a GGUF file or a folder; 0 for an id on the hub."""
    if (file := gguf_file(name)) is not None:
        from toolkit.models.gguf_header import read_header

        return read_header(file).weights * dtype.itemsize
    return sum(map(prod, stored_shapes(Path(name)))) * dtype.itemsize if Path(name).is_dir() else 0


def _source(place: str, options: dict, file: Path | None, outline: nn.Module) -> TensorSource:
    """Where the tensors of a model lie, in the types of its parameters."""
    dtype = outline.dtype
    kept = kept_in_float32(outline, dtype)
    for tensor_name, tensor in outline.state_dict(keep_vars=True).items():
        if kept.search(tensor_name):
            tensor.data = tensor.data.float()
    if file is None:
        return SafetensorsSource(_weight_files(place, options), outline, dtype)
    from toolkit.models.gguf import GgufSource
    from toolkit.models.gguf_header import read_header

    header = read_header(file)
    return GgufSource(header, outline, getattr(torch, header.dtype))


def _weight_files(place: str, options: dict) -> list[str]:
    """The safetensors files of a folder, or of the hub's cache, to which they are downloaded if needed."""
    from transformers.utils.hub import get_checkpoint_shard_files

    if (index := _stored_file(place, INDEX, options)) is not None:
        return get_checkpoint_shard_files(place, index, **options)[0]
    if (single := _stored_file(place, SINGLE, options)) is not None:
        return [single]
    raise UserError(f"it holds no {SINGLE} and no {INDEX}; pickled weights are not read")


def _stored_file(place: str, file: str, options: dict) -> str | None:
    """A file of a folder or of the hub; None if there is none."""
    from transformers.utils.hub import cached_file

    return cached_file(
        place,
        file,
        **options,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _read_generation_config(model: nn.Module, place: str, options: dict) -> None:
    """Give a model the settings of `generate` that lie beside its configuration, as `from_pretrained` does."""
    from transformers import GenerationConfig

    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(place, _from_auto=True, **options)
        except OSError:  # it has none
            model.generation_config = GenerationConfig.from_pretrained(
                place, config_file_name=skeleton.CONFIG, _from_auto=True, **options
            )


@torch.no_grad()
def _check_causal(model: nn.Module) -> None:
    """Raise `UserError` if later tokens change the logits of the first one, as in BERT. No class or config says so.

    A model on demand runs up to the end of its first block.
    """
    tokens = torch.tensor([[1, 2, 3, 4, 5], [1, 6, 7, 8, 9]]) % model.config.get_text_config().vocab_size
    with hub.foreign_code(type(model).__name__, "its own code fails"):
        outputs = first_outputs(model, tokens) if is_on_demand(model) else model(tokens).logits
        one, other = outputs[..., 0, :].float().unbind(-2)
    if (one - other).square().mean().sqrt() > ROUNDING * one.std():
        name = type(model).__name__
        raise UserError(f"{name} is no decoder: its logits depend on later tokens; choose a decoder-only model")


def _decoder_config(name: str, place: str, options: dict):
    """The configuration of a model. Raises `UserError` for an encoder-decoder, and what `read_config` raises."""
    _check_tokenizer(name)
    config = _config(name, place, options)
    if config.is_encoder_decoder:
        raise UserError(f"model {name!r} is an encoder-decoder ({config.model_type}); choose a decoder-only model")
    if Path(place).is_dir() and place == name:
        _check_weights(name, Path(place))
    return config


def _check_weights(name: str, folder: Path) -> None:
    """Raise `UserError` for a folder without safetensors files, or whose index names files of another folder."""
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"cannot load model {name!r}: it holds no *.safetensors file; pickled weights are not read")
    if (folder / INDEX).is_file():
        weight_map(folder / INDEX)


def _check_tokenizer(name: str) -> None:
    """Raise `UserError` for a folder whose only tokenizer is SentencePiece's, unless the packages to read it are there.

    Its file is a protocol buffer whose first field is a token; OpenAI's of the same name are lines of text.
    """
    folder = Path(name)
    file = folder / "tokenizer.model"
    if not file.is_file() or (folder / "tokenizer.json").exists():
        return
    with open(file, "rb") as source:
        pieces = source.read(1) == b"\n"
    if pieces and not (find_spec("sentencepiece") and find_spec("google") and find_spec("google.protobuf")):
        raise UserError(
            f"cannot load model {name!r}: its only tokenizer is SentencePiece's tokenizer.model; `pip install "
            "sentencepiece protobuf`, or save a tokenizer.json beside it"
        )


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
    if (file := gguf_file(name)) is not None:
        check_gguf(name, file)
        return
    _decoder_config(name, *_place(name))


def read_config(name: str):
    """The configuration of a model, as `load_model` reads it, with the same `UserError`s."""
    file = gguf_file(name)
    if file is not None and not parts_of(name) and is_read_here(file):
        return _config(name, described(name, file), LOCAL)
    return _config(name, *_place(name))


def _config(name: str, place: str, options: dict):
    from transformers import AutoConfig

    with _loading(name, options):
        if Path(place).is_dir():  # one line there can ask for a hundred million layers
            return skeleton.read_config(Path(place), stored_shapes(Path(place)))
        return AutoConfig.from_pretrained(place, **hub.NO_CODE, **options)


def _made(model: nn.Module, file: Path, dtype: torch.dtype) -> nn.Module:
    """The model that a file makes of a dense one."""
    if file.name == EXPERTS:
        return upcycled.mixtral_from(model, file, dtype)
    adapters.merge(model, file)
    return model


def _place(name: str) -> tuple[str, dict]:
    """Where transformers finds a model, with options of `from_pretrained`. A GGUF file is dequantised first."""
    path_of(name)
    if name in MODELS:
        source = MODELS[name].gguf
        return dequantised(name, downloads.DOWNLOADS[source].sha256, lambda: downloads.fetch(source)), LOCAL
    if (file := gguf_file(name)) is not None:
        check_gguf(name, file)
        return dequantised(name, gguf_sha256(file), lambda: file), LOCAL
    if Path(name).is_dir():
        return name, LOCAL
    return name, _hub_options(name)


def _hub_options(name: str) -> dict:
    """Options of `from_pretrained` for an id on the hub. Raises `UserError` for the name of a folder."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"unknown model {name!r}: there is no such folder; {_offline_models()}")
    return {"local_files_only": not hub.reachable()}


@contextlib.contextmanager
def _loading(name: str, options: dict) -> Iterator[None]:
    """Silence libraries, except for the progress of a download from the hub. Errors become a `UserError`."""
    quiet = hub.quiet() if options["local_files_only"] else contextlib.nullcontext()
    try:
        with hub.foreign_code(), hub.lean("hqq"), quiet:
            yield
    except UserError as error:
        others = "" if name and Path(name).is_dir() else f"; {_offline_models()}"
        raise UserError(f"cannot load model {name!r}: {error}{others}") from error


def _offline_models() -> str:
    reach = "" if hub.reachable() else "the Hugging Face hub cannot be reached; "
    return (
        f"{reach}available offline: {', '.join(sorted(MODELS))}, any local model folder or GGUF file, and what the "
        "hub's cache holds"
    )
