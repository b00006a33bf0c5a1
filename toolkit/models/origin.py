"""The facts of its source that a packed folder holds: bytes, a hash, and bits a weight.

    origin("model.gguf")   # {"name": "model.gguf", "bytes": 1117320768, "sha256": ..., "sha256_of": "the files", ...}

A GGUF file is hashed whole. A folder's shards may have hundreds of gigabytes: their headers and sizes are hashed.
"""

import hashlib
from pathlib import Path

from toolkit.models.named import gguf_file, gguf_sha256

LENGTH = 8  # bytes of the length of a safetensors header


def origin(name: str) -> dict[str, object]:
    """The facts of a model's files, as plain JSON. An id on the hub has its name alone."""
    if (file := gguf_file(name)) is not None:
        from toolkit.models.gguf_header import read_header

        header = read_header(file)
        nbytes = sum(tensor.nbytes for tensor in header.tensors.values())
        facts = {"bytes": sum(each.stat().st_size for each in header.files), "sha256": gguf_sha256(file)}
        return {"name": name, **facts, "sha256_of": "the files", "bits_a_weight": round(8 * nbytes / header.weights, 2)}
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if not files:
        return {"name": name}
    facts = {"bytes": sum(each.stat().st_size for each in files), "sha256": _of_headers(files)}
    return {"name": name, **facts, "sha256_of": "headers and sizes"}


def _of_headers(files: list[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            start = stream.read(LENGTH)
            header = stream.read(int.from_bytes(start, "little"))
        found.update(f"{file.name} {file.stat().st_size} ".encode() + header)
    return found.hexdigest()
