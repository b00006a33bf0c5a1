"""A GGUF file as a folder in Hugging Face's layout, made once: dequantised, or without its weights."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from toolkit import hub, sources
from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.files import check_memory, check_space
from toolkit.models.named import gguf_sha256

SHARD = "1GB"  # so that several threads hash a large model
PLANNER = ("toolkit.models.shape_of", "toolkit.models.architectures")  # the sizes of a header; weights need none


def is_read_here(file: Path) -> bool:
    """Whether the toolkit's own reader takes a GGUF file."""
    from toolkit.models.gguf_config import FAMILIES
    from toolkit.models.gguf_header import read_header

    return read_header(file).architecture in FAMILIES


def check_gguf(name: str, file: Path) -> None:
    """Raise `UserError` for a file that is no whole GGUF file, or that `toolkit.models.gguf.check` refuses."""
    from toolkit.models.gguf import check
    from toolkit.models.gguf_header import read_header

    header = read_header(file)
    with _reading_gguf(name):
        check(header)


def described(name: str, file: Path) -> str:
    """A folder with the configuration and the tokenizer of a GGUF file, in the layout of Hugging Face."""
    from toolkit.models.gguf import plan
    from toolkit.models.gguf_header import read_header
    from toolkit.models.gguf_tokenizer import read_tokenizer

    def describe(folder: Path) -> None:
        with _reading_gguf(name):
            header = read_header(file)
            model, _ = plan(header, getattr(torch, header.dtype))
            tokenizer = read_tokenizer(header)
        model.config.architectures = [type(model).__name__]
        with hub.quiet():
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(folder)

    check_gguf(name, file)
    code = sources.dependencies("toolkit.models.gguf", without=PLANNER)
    return str(cached("descriptions", {"gguf_sha256": gguf_sha256(file)}, code, describe))


def dequantised(name: str, sha256: str, file: Callable[[], Path]) -> str:
    """The folder of a GGUF file with this SHA-256, or of all pieces of one, that was dequantised once."""
    code = sources.dependencies("toolkit.models.gguf", without=PLANNER)
    return str(cached("models", {"gguf_sha256": sha256}, code, partial(_dequantise, name, file)))


def _dequantise(name: str, file: Callable[[], Path], folder: Path) -> None:
    from toolkit.models.gguf import read
    from toolkit.models.gguf_header import read_header

    header = read_header(file())
    dtype = getattr(torch, header.dtype)
    nbytes = header.weights * dtype.itemsize
    check_space(folder, nbytes)
    check_memory(nbytes, f"{name}, dequantised,")
    if dtype == torch.bfloat16:
        print(f"dequantising {name}, once: {nbytes / 1e9:.1f} GB, about a minute", file=sys.stderr, flush=True)
    with _reading_gguf(name):
        model, tokenizer = read(header, dtype)
    with hub.quiet():
        model.save_pretrained(folder, max_shard_size=SHARD)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _reading_gguf(name: str) -> Iterator[None]:
    """Silence libraries. Errors become a `UserError` that says nothing of the hub."""
    try:
        with hub.lean("hqq"), hub.quiet():
            yield
    except Exception as error:  # whatever fails in a foreign file
        raise UserError(f"cannot load model {name!r}: {hub.reason(error)}") from error
