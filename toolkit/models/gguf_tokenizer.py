"""The tokenizer of a GGUF file, which transformers builds from the file's vocabulary once.

    tokenizer = read_tokenizer(read_header(file))        # transformers' tokenizer
    tokenizer = read_kept_tokenizer(read_header(file))   # the same without transformers

150 thousand tokens take a second and a third. So the result is kept under the SHA-256 of the header: it is read in a
quarter of that time. The tokens, merges and settings are the same.
"""

import hashlib
import json
import logging
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.files import file_sha256, read_json, replacing, write_json
from toolkit.models.file_tokenizer import FileTokenizer
from toolkit.models.gguf_header import GgufHeader, read_header
from toolkit.records import line
from toolkit.sources import fingerprint

log = logging.getLogger(__name__)

SAMPLE = "The 1st test, naïve: a=b\n"


def read_tokenizer(header: GgufHeader) -> Any:
    """The tokenizer that a file describes, which its own keys choose, whatever the model.

    A merge whose result is no token is left out, as llama.cpp never makes such a token. Raises `UserError` for a
    tokenizer that transformers cannot build, or that cannot write a short text.
    """
    from transformers import PreTrainedTokenizerFast

    place = _place(header)
    try:
        tokenizer = _kept(place)
        if tokenizer is None:
            backend, settings = _built(header)
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
            _keep(place, tokenizer.backend_tokenizer, settings)
        tokenizer(SAMPLE)
    except UserError:
        raise
    except Exception as error:  # whatever fails in a foreign file
        kind = header.metadata.get("tokenizer.ggml.model")
        raise UserError(f"its tokenizer ({kind!r:.40}) cannot be read: {line(error)}") from error
    return tokenizer


def read_kept_tokenizer(header: GgufHeader) -> Any:
    """The same by the package `tokenizers` alone: a `FileTokenizer`. The first time another process builds it.

    Where nothing can be kept it is transformers' own. Raises what `read_tokenizer` raises.
    """
    place = _place(header)
    if place is not None and _entry(place) is None:
        subprocess.run([sys.executable, "-P", "-m", __name__, header.file], check=False, stderr=subprocess.DEVNULL)
    entry = _entry(place) if place else None
    if entry is None:
        return read_tokenizer(header)
    from tokenizers import Tokenizer

    return FileTokenizer(Tokenizer.from_file(str(place)), entry["settings"])


def _built(header: GgufHeader) -> tuple[Any, dict[str, Any]]:
    """The tokenizer of the package `tokenizers`, and what transformers is called with beside it."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, settings = get_gguf_tokenizer(str(header.file))
    _check_words(header, len(vocabulary["tokens"]))
    if "merges" in vocabulary:
        tokens = set(vocabulary["tokens"])
        vocabulary["merges"] = [merge for merge in vocabulary["merges"] if "".join(merge.split(" ", 1)) in tokens]
    backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    return backend, {**settings, **more}


def _check_words(header: GgufHeader, count: int) -> None:
    """Raise `UserError` for tokens that the embedding lacks."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding and count > embedding.shape[0]:
        raise UserError(f"it has {count} tokens, and the embedding has {embedding.shape[0]} rows")


def _place(header: GgufHeader) -> Path | None:
    """Where the tokenizer of a header is kept, by all that it depends on; None if nothing can be kept."""
    versions = {name: version(name) for name in ("transformers", "tokenizers")}
    try:
        folder = shelf("tokenizers", {"code": fingerprint([Path(__file__)])} | versions)
        ends = [tensor.offset for tensor in header.tensors.values() if tensor.file == header.file]
        with open(header.file, "rb") as file:
            return folder / hashlib.sha256(file.read(min(ends, default=-1))).hexdigest()
    except (OSError, UserError) as error:
        log.warning("tokenizers are built anew in each process: %s", error)
        return None


def _kept(place: Path | None) -> Any:
    """The tokenizer that is kept there, if any."""
    from transformers import PreTrainedTokenizerFast

    entry = _entry(place) if place else None
    return entry and PreTrainedTokenizerFast(tokenizer_file=str(place), **entry["settings"])


def _entry(place: Path) -> dict[str, Any] | None:
    """The settings kept beside a tokenizer; None if there is none, or it is damaged."""
    entry = read_json(_settings(place))
    return entry if place.is_file() and entry.get("sha256") == file_sha256(place) else None


def _keep(place: Path | None, backend: Any, settings: dict[str, Any]) -> None:
    """Keep what a tokenizer is made of, unless JSON cannot hold it."""
    if place is None or not _is_json(settings):
        return
    try:
        with replacing(place) as temporary:
            backend.save(str(temporary), pretty=False)
        write_json(_settings(place), {"sha256": file_sha256(place), "settings": settings})
    except UserError as error:
        log.warning("this tokenizer is not kept: %s", error)


def _settings(place: Path) -> Path:
    return place.with_suffix(".json")


def _is_json(value: object) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


if __name__ == "__main__":
    read_tokenizer(read_header(Path(sys.argv[1])))
