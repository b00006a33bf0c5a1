"""Finds the project files that a piece of code uses. It reads imports and runs nothing.

A name that a package re-exports (`from toolkit.models import decoder_blocks`) leads to the module that defines it, and
not to all imports of the package's `__init__`. So does an attribute of a package (`import toolkit as tk`, `tk.prune`,
`tk.residency.Lru`), unless the package itself is used in another way.

A module that reads data files says so in a constant, `READS = ("data/hardware/*.yaml",)`: patterns below the checkout.
The caller fills in a name in braces, such as `{paper}`; without a value it stands for every name. When one of these
files changes, the sweep reruns the notebook and the cache makes the artefact again.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from toolkit import paths
from toolkit.source_facts import Facts, digest, facts, meaning

# module prefix -> folder of the checkout; the longest prefix wins
PACKAGES = {"toolkit.kernels": "kernels", "toolkit": "toolkit"}
# they find, keep and refuse things; no result depends on them
PLUMBING = tuple(
    f"toolkit.{name}"
    for name in ("errors", "paths", "files", "memory_limits", "progress", "sources", "source_facts", "cache")
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
    return _closure(_targets(facts(code), package=""), names)


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents. Comments, blank lines and layout of Python code do not change it.

    It is the same in a checkout and in a wheel of it, so both share what is kept.
    """
    named = {paths.name_in_checkout(file): file for file in files}
    ordered = sorted(named.items(), key=lambda pair: pair[0].split("/"))
    texts = {name: meaning(file.read_text(encoding="utf-8"), file.suffix) for name, file in ordered}
    return digest(*(f"{name}\0{text}" for name, text in texts.items()))


def _closure(files: set[Path], names: Mapping[str, str], left_out: Collection[Path] = ()) -> list[Path]:
    found = _imported(frozenset(files), frozenset(left_out))
    patterns = {_filled(pattern, names) for file in found for pattern in _facts_of(file).reads}
    return sorted({*found, *(match for pattern in patterns for match in paths.root().glob(pattern))})


_known: dict[tuple[frozenset[Path], frozenset[Path]], dict[Path, int]] = {}  # files, and when they were changed


def _imported(files: frozenset[Path], left_out: frozenset[Path]) -> Collection[Path]:
    """These files and all that they import, but for those left out. It is asked again and again of the same ones."""
    known = _known.get((files, left_out))
    if known and all(file.exists() and file.stat().st_mtime_ns == changed for file, changed in known.items()):
        return known
    found, todo = dict[Path, int](), set(files)
    while todo:
        file = todo.pop()
        found[file] = file.stat().st_mtime_ns
        todo |= _targets(_facts_of(file), _package_of(file)).difference(found, left_out)
    _known[files, left_out] = found
    return found


def _filled(pattern: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], "*"), pattern)


def _facts_of(file: Path) -> Facts:
    return _facts_at(file, file.stat().st_mtime_ns)


@cache
def _facts_at(file: Path, mtime_ns: int) -> Facts:
    del mtime_ns  # only a cache key: an edited file is read again
    return facts(file.read_text(encoding="utf-8"), str(file))


def _targets(known: Facts, package: str) -> set[Path]:
    """The files that the imports anywhere in a text lead to."""
    found = {_file(module) for module in known.modules}
    for module, name, uses in known.names:
        found |= _origins(_absolute(module, package), name, uses)
    return {file for file in found if file}


def _origins(module: str, name: str, uses: Iterable[str]) -> set[Path | None]:
    """The files that an imported name leads to: of a package the origins of its attributes, if only they are used."""
    whole = f"{module}.{name}" if name else module
    file = _origin(module, name) if name else _file(module)
    is_package = file is not None and file.name == "__init__.py" and file == _file(whole)
    if not is_package or not uses or "" in uses:
        return {file}
    parts = [use.partition(".") for use in uses]
    return set().union(*(_origins(whole, first, [rest]) for first, _, rest in parts))


def _origin(module: str, name: str) -> Path | None:
    """The file that `from module import name` leads to: a submodule, the one that defines the name, or the module's."""
    if submodule := _file(f"{module}.{name}"):
        return submodule
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return file
    passed_on = _facts_of(file).passed_on.get(name)
    if passed_on is None:
        return file
    return _origin(_absolute(passed_on[0], _package_of(file)), passed_on[1]) or file


def _absolute(module: str, package: str) -> str:
    """The name of a module that may begin with a dot for each level above the package."""
    name = module.lstrip(".")
    if (level := len(module) - len(name)) == 0:
        return name
    base = ".".join(package.split(".")[: len(package.split(".")) - level + 1])
    return ".".join(part for part in (base, name) if part)


def _file(module: str) -> Path | None:
    for prefix, folder in PACKAGES.items():
        if module == prefix or module.startswith(prefix + "."):
            base = os.path.join(_code(folder), *module[len(prefix) + 1 :].split("."))
            candidates = (os.path.join(base, "__init__.py"), f"{base}.py")
            return next((Path(file) for file in candidates if os.path.isfile(file)), None)
    return None


def _package_of(file: Path) -> str:
    for prefix, folder in PACKAGES.items():
        if file.is_relative_to(_code(folder)):
            return ".".join([prefix, *file.parent.relative_to(_code(folder)).parts])
    return ""


def _code(folder: str) -> Path:
    return paths.root() / paths.below_root(f"{folder}/")
