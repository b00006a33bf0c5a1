"""The index of a checkpoint that lies in several safetensors files: which file holds each tensor."""

from pathlib import Path

from toolkit.errors import UserError
from toolkit.records import line, load_json

INDEX = "model.safetensors.index.json"


def weight_map(index: Path, error: type[UserError] = UserError) -> dict[str, str]:
    """The name of each tensor's file, which lies beside the index.

    Raises `error` for an index that cannot be read, or that names a place elsewhere: a path with `../` would have
    another folder's weights read.
    """
    found = load_json(index, error)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise error(f"{index}: has no weight_map")
    for name, file in names.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise error(f"{index}: names {line(file)} for {name!r:.99}; expected the name of a file beside it")
    return names
