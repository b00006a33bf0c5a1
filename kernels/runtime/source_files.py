"""The kernels' source files, as they are when Python begins to import kernels.

Compiled code may be kept only for the sources that it was compiled from. Python reads a module when it is first
imported, which may be hours after the process began, so files that have changed since then vouch for nothing.
"""

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def state() -> list[tuple]:
    """Each file with its size and times. A file that is changed and put back has another change time."""
    files = ((file, file.stat()) for file in sorted(FOLDER.rglob("*.py")) if file.is_file())
    return [(file, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for file, found in files]


AT_IMPORT = state()  # `toolkit.kernels` imports this module before any other


def changed() -> bool:
    """Whether a file was changed, added or removed since."""
    try:
        return state() != AT_IMPORT
    except OSError:  # one is just being removed
        return True


@cache
def contents() -> str:
    """SHA-256 of all names and contents, as hexadecimal: of what was imported, if nothing has `changed` afterwards."""
    digest = hashlib.sha256()
    for file, *_ in AT_IMPORT:
        code = file.read_bytes()
        digest.update(f"{file.relative_to(FOLDER)} {len(code)}\n".encode() + code)
    return digest.hexdigest()
