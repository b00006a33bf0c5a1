"""Minimal pairs of English agreement from templates: subject and verb, determiner and noun, anaphor and antecedent.

Each template is filled in both numbers (or genders) equally often: a model that always prefers one form scores half.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

PAIRS_EACH = 200


def _plural(nouns: str) -> list[tuple[str, str]]:
    """Regular nouns as (singular, plural)."""
    return [(noun, noun + "s") for noun in nouns.split()]


# singular, plural
PEOPLE = _plural("author teacher senator pilot farmer doctor student lawyer painter guard")
THINGS = _plural("key picture letter report chair window garden bottle river engine map bridge")
VERBS = [("is", "are"), ("was", "were"), ("has", "have")]
DETERMINERS = [("this", "these"), ("that", "those")]

LINKS = ["near", "behind", "beside", "next to", "in front of"]
ADJECTIVES = ["old", "red", "small", "strange", "heavy", "famous", "broken", "new"]
FOUND = ["bought", "found", "painted", "described", "sold", "noticed"]
ADVERBS = ["often", "never", "once", "always", "rarely"]
REFLEXIVES = ["himself", "herself", "themselves"]
REFLEXIVE_VERBS = ["hurt", "blamed", "admired", "introduced", "defended", "described"]
MEN = ["John", "David", "Peter", "Robert", "James", "Michael"]
WOMEN = ["Mary", "Susan", "Anna", "Linda", "Sarah", "Laura"]


@dataclass(frozen=True)
class Pair:
    """A context with the form that agrees and the form that does not."""

    context: str
    right: str
    wrong: str


def pairs(chance: random.Random) -> Iterator[Pair]:
    """`PAIRS_EACH` distinct pairs of each phenomenon; `chance` picks among all that the templates give."""
    for phenomenon in (subject_verb, determiner_noun, anaphor):
        yield from _balanced(list(phenomenon()), chance)


def subject_verb() -> Iterator[Pair]:
    """The verb agrees with the subject across a noun of the other number: "The keys near the garden → are"."""
    for noun, other, link, verb in itertools.product(PEOPLE + THINGS, PEOPLE + THINGS, LINKS, VERBS):
        if noun != other:
            for number in (0, 1):
                context = f"The {noun[number]} {link} the {other[1 - number]}"
                yield Pair(context, verb[number], verb[1 - number])


def determiner_noun() -> Iterator[Pair]:
    """The noun agrees with its determiner across an adjective: "Mary found these old → maps"."""
    for buyer, verb, words, adjective, noun in itertools.product(MEN + WOMEN, FOUND, DETERMINERS, ADJECTIVES, THINGS):
        for number in (0, 1):
            yield Pair(f"{buyer} {verb} {words[number]} {adjective}", noun[number], noun[1 - number])


def anaphor() -> Iterator[Pair]:
    """The reflexive agrees with its antecedent in gender and number: "The guards often blamed → themselves".

    No other noun stands between, unlike in `subject_verb`: SmolLM2 takes the nearer noun for the antecedent so firmly
    that it falls far below chance, and pruning, which takes a model towards chance, would seem to help it.
    """
    subjects = [(name, "himself") for name in MEN] + [(name, "herself") for name in WOMEN]
    subjects += [(f"The {plural}", "themselves") for _, plural in PEOPLE]
    for index, ((subject, right), adverb, verb) in enumerate(itertools.product(subjects, ADVERBS, REFLEXIVE_VERBS)):
        yield Pair(f"{subject} {adverb} {verb}", right, [form for form in REFLEXIVES if form != right][index % 2])


def _balanced(found: list[Pair], chance: random.Random) -> list[Pair]:
    """As many pairs with a form right as with it wrong: drawn two by two, each with a mirror of it."""
    mirrored: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        mirrored.setdefault((pair.right, pair.wrong), []).append(pair)
    couples = [forms for forms in mirrored if forms < forms[::-1]]
    chosen = []
    for index in range(PAIRS_EACH // 2):
        right, wrong = couples[index % len(couples)]
        for forms in ((right, wrong), (wrong, right)):
            pool = mirrored[forms]
            chosen.append(pool.pop(chance.randrange(len(pool))))
    return chosen
