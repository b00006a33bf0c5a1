"""The facts that a file of the project states: its meaning without comments, and the names that it imports.

Parsing all files of the engine takes two seconds. So the facts of a text are kept, by its SHA-256, in one file of the
cache; a changed text is parsed anew.
"""

import ast
import atexit
import contextlib
import hashlib
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, read_json, write_json

MOST = 3000  # texts that are kept
DOOR = "toolkit"  # an import of it alone takes nothing

ImportedName = tuple[str, str]  # module, which begins with a dot for each level, and the name


class Facts:
    """The facts of a text of Python.

    `meaning` is a digest without comments and layout. `modules` are those that it imports as a whole anywhere. `names`
    are what it imports and names: module, name ("" for the module itself), and the attributes that it uses of it, such
    as `policies.Lru`, or "" for another use. `reads` is its constant `READS`. `passed_on` are the names that it imports
    from elsewhere and does not bind again.
    """

    def __init__(self, record: dict):
        self.meaning: str = record["meaning"]
        self.modules: list[str] = record["modules"]
        self.names: list[tuple[str, str, list[str]]] = [(module, name, uses) for module, name, uses in record["names"]]
        self.reads: tuple[str, ...] = tuple(record["reads"])
        self.passed_on: dict[str, ImportedName] = {name: (it[0], it[1]) for name, it in record["passed_on"].items()}


def facts(text: str, name: str = "<text>") -> Facts:
    """The facts of a text of Python; `name` is for error messages. Raises `SyntaxError`."""
    known, key = _kept(), hashlib.sha256(text.encode()).hexdigest()
    if key not in known:
        known[key] = _parsed(ast.parse(text, filename=name))
        _note()
    return Facts(known[key])


def digest(*texts: str) -> str:
    """SHA-256 of the texts in their order, as hexadecimal."""
    return hashlib.sha256("\0\0".join(texts).encode()).hexdigest()


def meaning(text: str, suffix: str) -> str:
    """A digest of what a file of this suffix means, without comments and layout."""
    if suffix == ".py":
        return facts(text).meaning
    if suffix == ".yaml":
        return digest("\n".join(line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)))
    return digest(text)


def passed_on(tree: ast.Module) -> dict[str, ImportedName]:
    """The names that a module imports at its top, also for type checkers only, and does not bind again."""
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    statements = [*tree.body, *(node for block in checked for node in block.body)]
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    rest = [statement for statement in tree.body if statement not in (*imports, *checked)]
    others = [node for statement in rest for node in ast.walk(statement)]
    bound = {node.id for node in others if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in others if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    origins = {alias.asname or alias.name: (_module(node), alias.name) for node in imports for alias in node.names}
    return {name: origin for name, origin in origins.items() if name not in bound}


@cache
def _kept() -> dict[str, dict]:
    """The facts of texts that were parsed before, by this code and this version of Python."""
    return read_json(_file())


@cache
def _file() -> Path:
    own = digest(Path(__file__).read_text(encoding="utf-8"), sys.version)
    return paths.cache_dir() / "sources" / f"facts-{own[:16]}.json"


@cache
def _note() -> None:
    """Keep what was parsed when the process ends; once a process."""
    atexit.register(keep)


def keep() -> None:
    """Keep what was parsed, for other processes. It happens at a process's end, but a fork of another has none."""
    with contextlib.suppress(UserError):  # a cache that cannot be written
        known = read_json(_file())
        if known.keys() >= _kept().keys():
            return
        make_folder(_file().parent)
        known |= _kept()
        write_json(_file(), dict(list(known.items())[-MOST:]))


def _parsed(tree: ast.Module) -> dict:
    nodes = [*ast.walk(tree)]
    uses = _uses(nodes)
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named = [(alias.name, "", alias.asname or alias.name) for alias in aliases if alias.asname or alias.name == DOOR]
    named = [(module, name, bound) for module, name, bound in named if uses[bound] or module != DOOR]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    named += [(_module(node), alias.name, alias.asname or alias.name) for node in froms for alias in node.names]
    return {
        "meaning": digest(ast.dump(tree)),
        "modules": [alias.name for alias in aliases if not alias.asname and alias.name != DOOR],
        "names": [(module, name, sorted(uses[bound])) for module, name, bound in named],
        "reads": _reads(tree),
        "passed_on": passed_on(tree),
    }


def _uses(nodes: list[ast.AST]) -> defaultdict[str, set[str]]:
    """The attributes of each name, where they are used: "b.c" for `a.b.c`, and "" for `a` alone."""
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    uses = defaultdict[str, set[str]](set)
    for node in nodes:
        if id(node) not in inner and (dotted := _dotted(node)):
            name, _, attributes = dotted.partition(".")
            uses[name].add(attributes)
    return uses


def _dotted(node: ast.AST) -> str:
    """`a.b.c` as text; nothing for what is no name with attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _reads(tree: ast.Module) -> tuple[str, ...]:
    """The value of the module's constant `READS`; nothing if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(it, ast.Name) and it.id == "READS" for it in node.targets):
            return ast.literal_eval(node.value)
    return ()


def _module(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")
