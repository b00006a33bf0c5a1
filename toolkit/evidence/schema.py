"""The values that parameters may take: `notebooks/parameters.yaml`, checked before a notebook does any work.

Only values that a user has set are checked: the notebook's own defaults and presets are the project's, and tests check
them. So the tables that name choices, and torch with them, are imported only for a parameter that somebody changes.
"""

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit import paths
from toolkit.errors import UserError, did_you_mean
from toolkit.evidence.catalogue import PRESETS, Notebook
from toolkit.records import load_yaml

FILE = "notebooks/parameters.yaml"
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
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    list: bool = False
    holds: tuple[object, ...] = ()
    fewest: int = 1
    most: int | None = None

    def check(self, label: str, value: object) -> None:
        """Raise `UserError` that names the label, the value and what is expected, unless the value is allowed."""
        if not self._allows(value):
            shown = json.dumps(value, default=str)
            shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} …"
            raise UserError(f"{label} = {shown}: expected {self}{self._meant(value)}")

    def names(self) -> Sequence[object]:
        """The choices, with the names that a registry of the toolkit holds in the place of `module:NAME`."""
        return [name for choice in self.choices for name in _names(choice)]

    def __str__(self) -> str:
        """The expected value, in words."""
        one = "one of " + ", ".join(map(str, self.names())) if self.choices else WORDS[self.type]
        if self.parts:
            one += " (or a part of it: NAME/8 has an eighth of the rows)"
        bounds = {"from": self.at_least, "to": self.at_most, "above": self.above, "below": self.below}
        one = " ".join([one, *(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound))])
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
        if not _is_of(self.type, value):
            return False
        if self.type in ("integer", "number") and not (
            self.at_least <= value <= self.at_most and self.above < value < self.below
        ):
            return False
        return not self.choices or (_whole(value) if self.parts else value) in self.names()

    def _meant(self, value: object) -> str:
        """A hint at the choice that is like the first wrong one."""
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and not self._allows_item(item):
                return did_you_mean(item, map(str, self.names()))
        return ""


def check_parameters(notebook: Notebook, parameters: Mapping[str, object]) -> None:
    """Check the values that are in none of the notebook's presets.

    Raises `UserError` that names notebook, parameter, value and expectation for the first one that is not allowed. A
    parameter without an entry in `notebooks/parameters.yaml` takes values like its default.
    """
    known, presets = rules(notebook.id), [notebook.preset(name) for name in PRESETS]
    for name, value in parameters.items():
        own = any(_same(preset.get(name), value) for preset in presets)
        if not own and (rule := known.get(name) or _like(notebook.parameters.get(name))):
            rule.check(f"{notebook.id}: {name}", value)


def rules(id: str) -> dict[str, Rule]:
    """The rules of a notebook's parameters by name: those for all notebooks, with what this one asks beside that."""
    found = _entries(paths.root() / FILE)
    common, own = found.get("parameters", {}), found.get("notebooks", {}).get(id, {})
    return {name: _rule((common.get(name) or {}) | own.get(name, {})) for name in common | own}


def _rule(entry: Mapping[str, object]) -> Rule:
    return Rule(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})


@cache
def _entries(file: Path) -> dict:
    return load_yaml(file) if file.is_file() else {}


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


def _same(known: object, value: object) -> bool:
    """Whether two values are equal and of one type: 1, 1.0 and true are three values, in a list as well."""
    return repr(known) == repr(value)


def _whole(name: str) -> str:
    """The name of which `name` is a part, such as opt-66b of opt-66b/8; `name` itself if it is no part."""
    return re.sub(r"/[1-9][0-9]*\Z", "", name)


@cache
def _names(choice: object) -> tuple[object, ...]:
    """A choice, or the names in a registry: the keys of a table, or what a function returns."""
    registry = re.fullmatch(r"(toolkit[\w.]*):(\w+)", str(choice))
    if not registry:
        return (choice,)
    table = getattr(importlib.import_module(registry[1]), registry[2])
    return tuple(table() if callable(table) else table)
