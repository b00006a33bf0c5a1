"""What values a notebook's parameters may take: `notebooks/parameters.yaml`, checked before a notebook does any work.

Names of methods, models or machines come from the toolkit's own tables, whose files are read and not run: the command
line checks its parameters without importing torch.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import yaml

from toolkit import paths
from toolkit.errors import UserError, did_you_mean, unknown

FILE = "notebooks/parameters.yaml"
PARTS = ("parameters", "notebooks")
TYPES = {"text": str, "integer": int, "number": int | float, "boolean": bool}
WORDS = {
    "text": "text that is not empty",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
LONGEST = 160  # characters of a value in an error


@dataclass(frozen=True)
class Rule:
    """The values that one parameter may take. `notebooks/parameters.yaml` says what each field means."""

    type: str = "text"
    choices: tuple[object, ...] = ()
    parts: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    list: bool = False
    holds: tuple[object, ...] = ()
    fewest: int = 1
    most: int | None = None

    def check(self, label: str, value: object) -> None:
        """Raise `UserError` that names the label, the value and what is expected, unless the value is allowed."""
        if not self._allows(value):
            raise UserError(f"{label} = {_shown(value)}: expected {self}{self._meant(value)}")

    def __str__(self) -> str:
        """What is expected, in words."""
        one = WORDS[self.type]
        if self.choices:
            one = "one of " + ", ".join(map(str, _names(self.choices)))
        if self.parts:
            one += " (or a part of it: NAME/8 has an eighth of the rows)"
        bounds = {"from": self.at_least, "to": self.at_most, "above": self.above, "below": self.below}
        one = " ".join([one, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])
        if not self.list:
            return one
        size = f"{self.fewest}" if self.most == self.fewest else f"{self.fewest} or more"
        held = f"; it must have {', '.join(map(str, self.holds))}" if self.holds else ""
        return f"a list of {size}, none of them twice, each {one}{held}"

    def _allows(self, value: object) -> bool:
        if not self.list:
            return self._allows_item(value)
        return (
            isinstance(value, list)
            and all(map(self._allows_item, value))
            and self.fewest <= len(value) <= (self.most or len(value))
            and len(set(value)) == len(value)
            and set(self.holds) <= set(value)
        )

    def _allows_item(self, value: object) -> bool:
        return (
            _is_of(self.type, value)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (not self.choices or (_whole(value) if self.parts else value) in _names(self.choices))
        )

    def _meant(self, value: object) -> str:
        """A hint at the choice that is like the first wrong one."""
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and not self._allows_item(item):
                return did_you_mean(item, map(str, _names(self.choices)))
        return ""


def check_parameters(id: str, parameters: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Raise `UserError` that names notebook, parameter, value and expectation for the first value that is not allowed.

    A parameter without an entry in `notebooks/parameters.yaml` takes values like its default.
    """
    known = rules(id)
    for name, value in parameters.items():
        if rule := known.get(name) or _like(defaults.get(name)):
            rule.check(f"{id}: {name}", value)


def rules(id: str) -> dict[str, Rule]:
    """The rules of a notebook's parameters by name: those for all notebooks, with what this one asks beside that."""
    common, special = _entries(paths.root() / FILE)
    own = special.get(id, {})
    return {name: _rule(name, common.get(name, {}) | own.get(name, {})) for name in common | own}


def _rule(name: str, entry: Mapping[str, object]) -> Rule:
    keys = [field.name for field in fields(Rule)]
    if stray := [key for key in entry if key not in keys]:
        raise unknown(f"key of {name} in {FILE}", stray[0], keys)
    if entry.get("type", "text") not in TYPES:
        raise unknown(f"type of {name} in {FILE}", entry["type"], TYPES)
    return Rule(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})


@cache
def _entries(file: Path) -> tuple[dict, dict]:
    """The entries for all notebooks by name, and those of single notebooks by id and name; none without the file."""
    if not file.is_file():
        return {}, {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        common, special = (dict(found.get(part) or {}) for part in PARTS)
        return _mappings(common), {id: _mappings(entries) for id, entries in special.items()}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {' '.join(str(error).split())}") from error


def _mappings(entries: dict) -> dict[str, dict]:
    return {name: dict(entry or {}) for name, entry in entries.items()}


def _like(default: object) -> Rule | None:
    """The rule that a default stands for; None if it says nothing."""
    first = default[0] if isinstance(default, list) and default else default
    kind = next((name for name in TYPES if _is_of(name, first)), None)
    return Rule(kind, list=isinstance(default, list)) if kind else None


def _is_of(kind: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, TYPES[kind]):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "text":
        return bool(value) and value.isprintable()
    return isinstance(value, int) or math.isfinite(value)


def _whole(name: str) -> str:
    """The name of which `name` is a part, such as opt-66b of opt-66b/8; `name` itself if it is no part."""
    return re.sub(r"/[1-9][0-9]*\Z", "", name)


def _names(choices: tuple[object, ...]) -> list[object]:
    """The choices, with the names that a table holds in the place of `FILE:TABLE`."""
    names = []
    for choice in choices:
        table = re.fullmatch(r"(.+\.(?:py|yaml)):(\w+)", str(choice))
        names += _table(paths.root(), paths.below_root(table[1]), table[2]) if table else [choice]
    return names


@cache
def _table(root: Path, file: str, name: str) -> list[object]:
    """The keys of the dict `name` in a Python file, or the field `name` of each record in YAML files (a pattern)."""
    try:
        if file.endswith(".yaml"):
            texts = (path.read_text(encoding="utf-8") for path in sorted(root.glob(file)))
            return [record[name] for text in texts for record in yaml.safe_load(text)]
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=found)], value=ast.Dict(keys=keys))
                    | ast.AnnAssign(target=ast.Name(id=found), value=ast.Dict(keys=keys))
                ) if found == name:
                    return [ast.literal_eval(key) for key in keys]
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {root / file}: {' '.join(str(error).split())}") from error
    raise UserError(f"{FILE}: no table {name} with literal keys in {file}")


def _shown(value: object) -> str:
    """A value as `--set` takes it, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"
