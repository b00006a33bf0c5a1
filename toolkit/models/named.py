"""The files that the name of a model stands for: embedded models, GGUF files and folders. Nothing here needs torch."""

from dataclasses import dataclass
from pathlib import Path

from toolkit import downloads, paths
from toolkit.files import file_sha256, path_of

WEIGHTS = {
    "smollm2-135m": 134_515_008,
    "gemma3-270m": 268_098_176,
    "qwen2.5-coder-0.5b": 630_167_424,
    "qwen2.5-coder-1.5b": 1_777_088_000,
}
ADAPTERS, EXPERTS = "adapters.safetensors", "experts.safetensors"  # of a sparse model, and of an upcycled one
PARTS = ("smollm2-135m-sparse90", "smollm2-135m-moe-upcycled")  # each with the recipe.py that made it


@dataclass(frozen=True)
class Model:
    """A model that needs no hub."""

    gguf: str
    """The file that it is made of, a key of `toolkit.downloads.DOWNLOADS`."""
    weights: int
    """How many weights that file has."""
    parts: str | None = None
    """A folder under `data/models/` whose file makes this model of the dense one; None for a dense model."""


MODELS = {name: Model(name, weights) for name, weights in WEIGHTS.items()}
MODELS |= {name: Model("smollm2-135m", WEIGHTS["smollm2-135m"], name) for name in PARTS}


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a name stands for, downloaded if it is an embedded model's; None for a folder or a hub id."""
    if name in MODELS:
        return downloads.fetch(MODELS[name].gguf)
    path = path_of(name)
    return path if path.suffix == ".gguf" or path.is_file() else None


def parts_of(name: str) -> Path | None:
    """The file that makes a named model of its dense one; None for any other model."""
    folder = MODELS[name].parts if name in MODELS else None
    if folder is None:
        return None
    place = paths.root() / "data" / "models" / folder
    return next(file for kind in (ADAPTERS, EXPERTS) if (file := place / kind).exists())


def gguf_sha256(file: Path) -> str:
    """The SHA-256 of a file, or of each of its pieces."""
    from toolkit.models.gguf_header import read_header

    return " ".join(map(file_sha256, read_header(file).files))


def fingerprint(name: str) -> str:
    """A text that changes with a model's weights: the SHA-256 of a GGUF file, or sizes and times of a folder's files.

    An id on the hub stands for itself.
    """
    if (file := gguf_file(name)) is not None:
        return gguf_sha256(file)
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else ()
    return " ".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files) or name
