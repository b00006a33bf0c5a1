"""Finds the project files that a piece of code uses. It reads imports and runs nothing.

A module that reads data files says so in a constant, `READS = ("data/hardware/*.yaml",)`: patterns below the checkout.
The caller fills in a name in braces, such as `{paper}`; without a value it stands for every name. When one of these
files changes, the sweep reruns the notebook and the cache makes the artefact again.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from toolkit import paths

# module prefix -> folder of the checkout; the longest prefix wins
PACKAGES = {"toolkit.kernels": "kernels", "toolkit": "toolkit"}


def dependencies(*modules: str) -> list[Path]:
    """Every project file that the named modules import, themselves and the data they read included, sorted.

    Imports inside functions count too.
    """
    return _closure({file for module in modules for file in _files(module)}, {})


def imports(code: str, **names: str) -> list[Path]:
    """Every project file that a piece of Python source imports, transitively and sorted, with the data they read.

    `names` fills in the names that `READS` leaves open: `imports(code, paper="endor")`.
    """
    return _closure({file for module in _imported(ast.parse(code), package="") for file in _files(module)}, names)


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents. Comments, blank lines and layout of Python code do not change it."""
    return digest(*(f"{file.relative_to(paths.root())}\0{_meaning(file)}" for file in sorted(files)))


def digest(*texts: str) -> str:
    """SHA-256 of the texts in their order, as hexadecimal."""
    return hashlib.sha256("\0\0".join(texts).encode()).hexdigest()


def _meaning(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return ast.dump(ast.parse(text))
    if file.suffix == ".yaml":
        return "\n".join(line for line in text.splitlines() if not re.match(r"\s*(#|$)", line))
    return text


def _closure(files: set[Path], names: Mapping[str, str]) -> list[Path]:
    found, data, todo = set(), set(), set(files)
    while todo:
        file = todo.pop()
        found.add(file)
        imported, patterns = _direct(file)
        todo |= imported - found
        data |= {match for pattern in patterns for match in paths.root().glob(_filled(pattern, names))}
    return sorted(found | data)


def _filled(pattern: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], "*"), pattern)


def _direct(file: Path) -> tuple[frozenset[Path], tuple[str, ...]]:
    """The files that a module imports itself, and the patterns of those that it reads."""
    return _direct_at(file, file.stat().st_mtime_ns)


@cache
def _direct_at(file: Path, mtime_ns: int) -> tuple[frozenset[Path], tuple[str, ...]]:
    del mtime_ns  # only a cache key: an edited file is read again
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    modules = _imported(tree, _package_of(file))
    return frozenset(found for module in modules for found in _files(module)), _reads(tree)


def _reads(tree: ast.Module) -> tuple[str, ...]:
    """The value of the module's constant `READS`; nothing if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(it, ast.Name) and it.id == "READS" for it in node.targets):
            return ast.literal_eval(node.value)
    return ()


def _imported(tree: ast.AST, package: str) -> set[str]:
    """The dotted names that a syntax tree imports; `from a import b` gives both `a` and `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def _files(module: str) -> list[Path]:
    """The files that importing `module` runs: its own and its parents' `__init__`. None for a foreign module."""
    parts = module.split(".")
    found = (_file(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    return [file for file in found if file]


def _file(module: str) -> Path | None:
    for prefix, folder in PACKAGES.items():
        if module == prefix or module.startswith(prefix + "."):
            base = paths.root().joinpath(folder, *module[len(prefix) + 1 :].split("."))
            candidates = (base / "__init__.py", base.with_name(base.name + ".py"))
            return next((file for file in candidates if file.is_file()), None)
    return None


def _package_of(file: Path) -> str:
    for prefix, folder in PACKAGES.items():
        if file.is_relative_to(paths.root() / folder):
            return ".".join([prefix, *file.parent.relative_to(paths.root() / folder).parts])
    return ""
