"""The safetensors files of a folder: which tensors they hold by their headers, and what the index of several names."""

from contextlib import suppress
from pathlib import Path

from toolkit.errors import UserError
from toolkit.records import line, load_json, regular_size

INDEX = "model.safetensors.index.json"


def stored_shapes(folder: Path) -> list[tuple[int, ...]]:
    """The shapes of all tensors in a folder's files. A damaged file counts as empty: loading it says what is wrong."""
    from safetensors import SafetensorError, safe_open

    shapes: list[tuple[int, ...]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(SafetensorError, OSError, ValueError):
            regular_size(path)
            file = safe_open(path, framework="pt")
            shapes += [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 (not a dict)
    return shapes


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
