"""Finds the project files that a piece of code uses. It reads imports and runs nothing.

A name that a package re-exports (`from toolkit.models import decoder_blocks`) leads to the module that defines it, and
not to all imports of the package's `__init__`.

A module that reads data files says so in a constant, `READS = ("data/hardware/*.yaml",)`: patterns below the checkout.
The caller fills in a name in braces, such as `{paper}`; without a value it stands for every name. When one of these
files changes, the sweep reruns the notebook and the cache makes the artefact again.
"""

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from toolkit import paths

# module prefix -> folder of the checkout; the longest prefix wins
PACKAGES = {"toolkit.kernels": "kernels", "toolkit": "toolkit"}
# they find, keep and refuse things; no result depends on them
PLUMBING = tuple(
    f"toolkit.{name}" for name in ("errors", "paths", "files", "memory_limits", "progress", "sources", "cache")
)


def dependencies(*modules: str, without: Iterable[str] = ()) -> list[Path]:
    """The project files on which the named modules' results depend: the modules, their imports and the data they read.

    Imports inside functions count too. The modules of `without` are left out, with what only they import: registries,
    so that a new entry changes nothing for the others, and modules that the key covers in another way. `PLUMBING` is
    left out, too.
    """
    left_out = {file for module in (*without, *PLUMBING) if (file := _file(module))}
    return _closure({file for module in modules if (file := _file(module))}, {}, left_out)


def imports(code: str, **names: str) -> list[Path]:
    """Every project file that a piece of Python source imports, transitively and sorted, with the data they read.

    `names` fills in the names that `READS` leaves open: `imports(code, paper="endor")`.
    """
    return _closure(_targets(ast.parse(code), package=""), names)


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents. Comments, blank lines and layout of Python code do not change it."""
    return digest(
        *(
            f"{file.relative_to(paths.root())}\0{_meaning(file.read_text(encoding='utf-8'), file.suffix)}"
            for file in sorted(files)
        )
    )


def digest(*texts: str) -> str:
    """SHA-256 of the texts in their order, as hexadecimal."""
    return hashlib.sha256("\0\0".join(texts).encode()).hexdigest()


@cache  # many notebooks share most of their modules
def _meaning(text: str, suffix: str) -> str:
    """A digest of what a file means, without comments and layout."""
    if suffix == ".py":
        return digest(ast.dump(ast.parse(text)))
    if suffix == ".yaml":
        return digest("\n".join(line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)))
    return digest(text)


def _closure(files: set[Path], names: Mapping[str, str], left_out: Collection[Path] = ()) -> list[Path]:
    found, data, todo = set(), set(), set(files)
    while todo:
        file = todo.pop()
        found.add(file)
        imported, patterns = _direct(file)
        todo |= imported.difference(found, left_out)
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
    return frozenset(_targets(tree, _package_of(file))), _reads(tree)


def _reads(tree: ast.Module) -> tuple[str, ...]:
    """The value of the module's constant `READS`; nothing if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(it, ast.Name) and it.id == "READS" for it in node.targets):
            return ast.literal_eval(node.value)
    return ()


def _targets(tree: ast.AST, package: str) -> set[Path]:
    """The files that the imports anywhere in a syntax tree lead to."""
    found: set[Path | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {_origin(_module_of(node, package), alias.name) for alias in node.names}
    return {file for file in found if file}


def _origin(module: str, name: str) -> Path | None:
    """The file that `from module import name` leads to: a submodule, the one that defines the name, or the module's."""
    if submodule := _file(f"{module}.{name}"):
        return submodule
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return file
    passed_on = _passed_on(file, file.stat().st_mtime_ns).get(name)
    return (_origin(*passed_on) if passed_on else None) or file


@cache
def _passed_on(file: Path, mtime_ns: int) -> dict[str, tuple[str, str]]:
    """The names that a package's `__init__` imports from elsewhere and does not bind again: module and name there."""
    del mtime_ns  # only a cache key
    tree, package = ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), _package_of(file)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    others = [node for statement in tree.body if statement not in imports for node in ast.walk(statement)]
    bound = {node.id for node in others if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in others if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    origins = {al.asname or al.name: (_module_of(node, package), al.name) for node in imports for al in node.names}
    return {name: origin for name, origin in origins.items() if name not in bound}


def _module_of(node: ast.ImportFrom, package: str) -> str:
    base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
    return ".".join(part for part in (base, node.module) if part)


def _file(module: str) -> Path | None:
    for prefix, folder in PACKAGES.items():
        if module == prefix or module.startswith(prefix + "."):
            base = _code(folder).joinpath(*module[len(prefix) + 1 :].split("."))
            candidates = (base / "__init__.py", base.with_name(base.name + ".py"))
            return next((file for file in candidates if file.is_file()), None)
    return None


def _package_of(file: Path) -> str:
    for prefix, folder in PACKAGES.items():
        if file.is_relative_to(_code(folder)):
            return ".".join([prefix, *file.parent.relative_to(_code(folder)).parts])
    return ""


def _code(folder: str) -> Path:
    return paths.root() / paths.below_root(f"{folder}/")
