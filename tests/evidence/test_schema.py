"""The values that parameters may take: over every notebook, preset and parameter there is."""

import copy
import math
import re

import pytest

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence.catalogue import PRESETS, notebooks
from toolkit.evidence.schema import FILE, check_parameters, rules
from toolkit.records import load_yaml

BOOKS = notebooks()
NEVER = (None, {}, [], [[]], [None], "", [""], "no such\nthing", math.nan, [math.nan], math.inf, -1, [-1])
ANY_MODEL = ("model", "second_model", "draft_model", "sharded_model", "quality_model")  # a folder or a hub's id as well


def check(id, **parameters):
    check_parameters(BOOKS[id], parameters)


def test_presets_are_allowed_and_wrong_values_are_refused_in_one_line_that_names_them():
    amiss, tried = [], set()
    for id, book in BOOKS.items():
        known = rules(book)
        assert known.keys() == book.parameters.keys()
        for name, value in (item for preset in PRESETS for item in book.preset(preset).items()):
            known[name].check(f"{id}: {name}", value)
        for name, item in wrong_values(book, known):
            if (rule := (name, repr(item), repr(known[name]))) in tried:
                continue  # a rule that several notebooks share
            tried.add(rule)
            try:
                check(id, **{name: copy.deepcopy(item)})
                amiss.append(f"{id} takes {name} = {item!r}")
            except UserError as refused:
                if not re.fullmatch(rf"{id}: {name} = .*: expected .*", str(refused)):
                    amiss.append(str(refused))
    assert amiss == []


def wrong_values(book, known):
    for name, value in book.parameters.items():
        wrong = [*NEVER, [value], *([value * 2, value[0]] if isinstance(value, list) and value else [])]
        wrong += [1, 0] if isinstance(value, bool) else [True, [True]]
        wrong += [float(value), 1.5] if type(value) is int else []
        wrong += [f"{value}x", f"x{value}"] if isinstance(value, str) and name not in ANY_MODEL else []
        yield from ((name, item) for item in wrong if item != [] or known[name].fewest)


def test_every_entry_is_of_a_parameter_that_is_there():
    found = load_yaml(paths.root() / FILE)
    named = [name for names in found["parameters"] for name in names.split(", ")]
    assert len(named) == len(set(named))
    assert set(named) <= {name for book in BOOKS.values() for name in book.parameters}
    for id, entries in found["notebooks"].items():
        assert entries.keys() <= BOOKS[id].parameters.keys()


def test_messages_name_the_parameter_its_value_and_what_was_expected():
    each = "expected a list of 1 or more, none of them twice, each"
    method = "method = \"wandaa\": expected one of magnitude, sparsegpt, wanda; did you mean 'wanda'?"
    for id, parameters, message in (
        ("quickstart", {"method": "wandaa"}, method),
        ("endor/fig04", {"sparsities": [0.3]}, f"sparsities = [0.3]: {each} a number from 0 below 1; it must have 0.5"),
    ):
        with pytest.raises(UserError) as refused:
            check(id, **parameters)
        assert str(refused.value) == f"{id}: {message}"


def test_parts_of_a_twin():
    for name in ("opt-66b", "opt-66b/8", "llama2-70b/16"):
        check("endor/fig05", measured_model=name)
    for name in ("opt-66b/0", "opt-66b/eight"):
        with pytest.raises(UserError, match="NAME/8"):
            check("endor/fig05", measured_model=name)
