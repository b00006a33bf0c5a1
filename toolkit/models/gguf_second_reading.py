"""A GGUF file as transformers' own loader reads it, beside the toolkit's reading.

    print(kept_comparison(file))

The two share only the package `gguf`, which decodes blocks. transformers leaves out keys that change what a model
computes, such as the scaling of rotary embeddings: there the toolkit's reading is the right one, and a sentence says
which keys those are.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit import sources
from toolkit.cache import cached
from toolkit.models.gguf import parameters
from toolkit.models.gguf_config import FAMILIES, HARMLESS, NEUTRAL, config_of
from toolkit.models.gguf_folder import PLANNER
from toolkit.models.gguf_header import GgufHeader, read_header
from toolkit.models.gguf_tensors import LONG, ROTARY, SHORT
from toolkit.models.named import gguf_sha256
from toolkit.models.skeleton import outline
from toolkit.records import line

LARGEST = 5 * 10**8  # weights; transformers holds all of them in float32, and takes half a minute for so many
WORDS = "words.txt"
CLOSE = 1e-6  # of a tensor's largest value
SHOWN = 4  # differences of each kind


def kept_comparison(file: Path) -> str:
    """The sentence of `compare` for a file, or for all pieces of one; made once, since it takes seconds."""

    def make(folder: Path) -> None:
        (folder / WORDS).write_text(compare(read_header(file)), encoding="utf-8")

    code = sources.dependencies("toolkit.models.gguf_second_reading", without=PLANNER)
    return (cached("readings", {"gguf_sha256": gguf_sha256(file)}, code, make) / WORDS).read_text(encoding="utf-8")


def compare(header: GgufHeader) -> str:
    """One line on two readings of a file: where they agree, and where they differ."""
    words = f"transformers' own loader does not read the architecture {header.architecture!r}"
    if header.architecture not in FAMILIES:
        return "the file was read by transformers' own loader, the only reader"
    if len(header.files) > 1:
        words = "transformers' own loader reads no file in pieces"
    elif header.architecture in _keys():
        try:
            return _compare(header)
        except Exception as error:  # whatever fails there
            words = f"transformers' own loader fails ({line(error):.80})"
    return f"the file's reading was not compared with another one: {words}"


def _compare(header: GgufHeader) -> str:
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar obeys no setting
        theirs = _theirs(header)
    differences = [f"{name} {ours!r}, there {other!r}" for name, ours, other in _other_values(header, theirs["config"])]
    differences += [f"{name} has other values" for name in _other_tensors(header, theirs.get("tensors", {}))]
    ignored, same = list(_ignored(header)), "weights" if "tensors" in theirs else "sizes"
    said = f"{same} of the file as transformers' own loader reads them"
    if differences:
        said = f"transformers' own loader reads the file otherwise ({_some(differences)})"
    return f"{said}; it ignores {_some(ignored)}, applied here" if ignored else said


def _theirs(header: GgufHeader) -> Mapping[str, Any]:
    """The `config` and, of a file that is not too large, the `tensors` that transformers reads."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if header.weights > LARGEST:
        return load_gguf_checkpoint(str(header.file))
    model = outline(config_of(header))
    return load_gguf_checkpoint(str(header.file), return_tensors=True, model_to_load=model)


def _some(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def _keys() -> Mapping[str, Mapping[str, str | None]]:
    """The names that transformers' loader gives to keys, by architecture as files have it."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    own = {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
    names = {name: own.get(name, name) for name in FAMILIES}
    return {name: GGUF_CONFIG_MAPPING[theirs] for name, theirs in names.items() if theirs in GGUF_CONFIG_MAPPING}


def _other_values(header: GgufHeader, theirs: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Fields of the configuration that both readings have and that differ."""
    ours = config_of(header).to_dict()
    rope = ours["rope_parameters"]
    ours |= rope.get("full_attention", rope)
    for name in _keys()[str(header.architecture)].values():
        if name in ours and name in theirs and ours[name] is not None and ours[name] != theirs[name]:
            yield name, ours[name], theirs[name]


def _ignored(header: GgufHeader) -> Iterator[str]:
    """Keys and tensors of the file that transformers' loader does not know and that may change the logits.

    Lengths are left out, since the tensors have them.
    """
    prefix, table, config = f"{header.architecture}.", _keys()[str(header.architecture)], config_of(header)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    usual = {"rope.scaling.type": "none", "rope.dimension_count": head_dim}
    yield from (name for name in (ROTARY, SHORT, LONG) if name in header.tensors)
    for key, value in header.metadata.items():
        short = key.removeprefix(prefix)
        neutral = short in HARMLESS or value in NEUTRAL.get(short, ()) or value == usual.get(short)
        if key.startswith(prefix) and table.get(short) is None and not neutral and not short.endswith("_length"):
            yield short


def _other_tensors(header: GgufHeader, theirs: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Parameters that both readings have and whose values differ."""
    for name, ours in parameters(header, torch.float32) if theirs else ():
        if (other := theirs.get(name)) is None:
            continue
        if other.numel() != ours.numel() or (ours - other.view_as(ours)).abs().max() > CLOSE * ours.abs().max():
            yield name
