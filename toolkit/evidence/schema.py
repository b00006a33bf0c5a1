"""The values that parameters may take, checked before a notebook does any work.

A value must be of its default's type, and within what the default and the parameter's name say: a whole number is from
1, or from 0 where that is the default, and a share above 0 and at most 1. An entry of `notebooks/parameters.yaml` says
what differs, and the registries that hold the choices. Only values that a user has set are checked: the notebook's own
defaults and presets are the project's, and tests check them. So registries, and torch with them, are imported only for
a parameter that somebody changes.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit import paths
from toolkit.errors import UserError, did_you_mean
from toolkit.evidence.catalogue import PRESETS, Notebook
from toolkit.records import load_yaml
from toolkit.registry import Registry

FILE = "notebooks/parameters.yaml"
WORDS = {str: "text that is not empty", int: "a whole number", float: "a number", bool: "true or false"}
LONGEST = 160  # characters of a value in an error


@dataclass(frozen=True)
class Rule:
    """The values that one parameter may take. `notebooks/parameters.yaml` says what its fields mean.

    `kind` is the type of a value or, for a `list`, of its items.
    """

    kind: type
    list: bool = False
    choices: Sequence[object] = ()
    parts: bool = False
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    holds: Sequence[object] = ()
    fewest: int = 1
    most: int | None = None

    def check(self, label: str, value: object) -> None:
        """Raise `UserError` that names the label, the value and what is expected, unless the value is allowed."""
        items = value if self.list and isinstance(value, list) else [value]
        wrong = [item for item in items if not self._allows(item)]
        if wrong or (self.list and not self._allows_list(value)):
            shown = json.dumps(value, default=str)
            shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} …"
            hint = did_you_mean(wrong[0], map(str, self.names())) if wrong and isinstance(wrong[0], str) else ""
            raise UserError(f"{label} = {shown}: expected {self}{hint}")

    def names(self) -> Sequence[object]:
        """The choices, with the names that a registry of the toolkit holds in the place of `module:NAME`."""
        return [name for choice in self.choices for name in _names(choice)]

    def __str__(self) -> str:
        """The expected value, in words."""
        one = "one of " + ", ".join(map(str, self.names())) if self.choices else WORDS[self.kind]
        if self.parts:
            one += " (or a part of it: NAME/8 has an eighth of the rows)"
        bounds = {"from": self.at_least, "to": self.at_most, "above": self.above, "below": self.below}
        one = " ".join([one, *(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound))])
        if not self.list:
            return one
        size = f"{self.fewest}" if self.most == self.fewest else f"{self.fewest} or more"
        held = f"; it must have {', '.join(map(str, self.holds))}" if self.holds else ""
        return f"a list of {size}, none of them twice, each {one}{held}"

    def _allows_list(self, value: object) -> bool:
        return (
            isinstance(value, list)
            and self.fewest <= len(value) <= (self.most or len(value))
            and len(set(value)) == len(value)
            and set(self.holds) <= set(value)
        )

    def _allows(self, value: object) -> bool:
        if type(value) is not self.kind and (type(value), self.kind) != (int, float):
            return False
        if isinstance(value, str) and not (value and value.isprintable()):
            return False
        if self.kind in (int, float) and not (
            math.isfinite(value) and self.at_least <= value <= self.at_most and self.above < value < self.below
        ):
            return False
        # opt-66b/8 is a part of opt-66b
        return not self.choices or (re.sub(r"/[1-9][0-9]*\Z", "", value) if self.parts else value) in self.names()


def check_parameters(notebook: Notebook, parameters: Mapping[str, object]) -> None:
    """Check the values that are in none of the notebook's presets.

    Raises `UserError` that names notebook, parameter, value and expectation for the first one that is not allowed.
    """
    known, presets = rules(notebook), [notebook.preset(name) for name in PRESETS]
    for name, rule in known.items():
        own = {repr(preset[name]) for preset in presets}  # 1, 1.0 and true are three values, in a list as well
        if name in parameters and repr(parameters[name]) not in own:
            rule.check(f"{notebook.id}: {name}", parameters[name])


def rules(notebook: Notebook) -> dict[str, Rule]:
    """The rules of a notebook's parameters by name; none for a default that has no type, such as None.

    The items of a list that is empty by default have the type of those that a preset names. An entry for all notebooks
    is joined with what this one asks beside that.
    """
    file = _entries(paths.root() / FILE)
    common, own = file.get("parameters", {}), file.get("notebooks", {}).get(notebook.id, {})
    known = {}
    for name, default in notebook.parameters.items():
        values = [default, *(notebook.preset(preset)[name] for preset in PRESETS)] if default == [] else [default]
        items = [item for value in values for item in (value if isinstance(value, list) else [value])]
        kinds = [type(item) for item in items]
        kind = float if float in kinds else next(iter(kinds), None)
        if kind in WORDS:
            said = common.get(name, {}) | own.get(name, {}) or _range(name, kind, items)
            known[name] = Rule(kind, isinstance(default, list), **said)
    return known


def _range(name: str, kind: type, items: Sequence) -> dict[str, float]:
    """The range of a parameter without an entry, by its name and its default's items."""
    if kind is int:
        return {"at_least": 1 if items and min(items) > 0 else 0}
    return {"above": 0, "at_most": 1} if name.endswith(("share", "shares")) else {}


@cache
def _entries(file: Path) -> dict:
    """The file's entries; one for several parameters, "op, twin_layer", is each one's."""
    entries = load_yaml(file) if file.is_file() else {}
    named = entries.get("parameters", {}).items()
    return entries | {"parameters": {name: entry for names, entry in named for name in names.split(", ")}}


def _names(choice: object) -> Collection[object]:
    """A choice, or the names in a registry."""
    return Registry(choice) if isinstance(choice, str) and choice.startswith("toolkit.") else (choice,)
