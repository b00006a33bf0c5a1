"""Three multiple-choice tasks that need no hub, each a few hundred short items made with a fixed seed.

An item is a context, its choices and the index of the right one. Wrong choices come from the same source as the right
one, so neither length nor frequency of a choice gives the answer away.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

from toolkit.quality.corpora import Article, load_articles

SEED = 0
CONTINUATION_ITEMS, CONTEXT_WORDS, CONTINUATION_WORDS = 600, 20, 6
LAST_WORD_ITEMS, SENTENCE_WORDS = 600, range(8, 21)
LIKE_FREQUENCY = 12  # words of neighbouring frequency rank that choices are drawn from
CHOICES = 4
PAIRS_EACH = 200  # of each phenomenon of agreement
Pair = tuple[str, str, str]  # a context, the form that agrees and the form that does not


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
class Item:
    """One question: which of `choices` continues `context`? `choices[answer]` does."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class LocalTask:
    """A task: how to make its items, and how many choices each has."""

    items: Callable[[], list[Item]]
    choices: int

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.choices

    def rows(self) -> list[dict]:
        """The items as plain dictionaries, as lm-eval wants them."""
        return [asdict(item) | {"choices": list(item.choices)} for item in self.items()]


def continuation_items() -> list[Item]:
    """Words 21–26 of a paragraph after its first 20; the wrong ones are words 21–26 of the same article's others."""
    chance = random.Random(SEED)
    needed = CONTEXT_WORDS + CONTINUATION_WORDS
    pools = ([words for words in _paragraphs(article) if len(words) >= needed] for article in _articles())
    items = []
    for pool in pools:
        for position, words in enumerate(pool if len(pool) >= CHOICES else []):
            others = chance.sample(pool[:position] + pool[position + 1 :], CHOICES - 1)
            options = [" ".join(each[CONTEXT_WORDS:needed]) for each in (words, *others)]
            if len(set(options)) == CHOICES:
                items.append(_shuffled(" ".join(words[:CONTEXT_WORDS]), options, chance))
    return _sample(items, CONTINUATION_ITEMS, chance)


def last_word_items() -> list[Item]:
    """The last word of a sentence; the wrong ones end other sentences and are about as frequent in the articles.

    Words are ranked by frequency and cut into blocks of 12; a choice comes from the right word's block. Each word is
    the right one at most once, so frequency within a block tells nothing.
    """
    chance = random.Random(SEED)
    counts = Counter(word for article in _articles() for word in re.findall(r"[a-z]+", article.text.lower()))
    sentences = list(_sentences())
    chance.shuffle(sentences)
    endings = {words[-1]: words[:-1] for words in sentences}  # one sentence for each last word
    ranked = sorted(endings, key=lambda word: (-counts[word], word))
    items = []
    for start in range(0, len(ranked), LIKE_FREQUENCY):
        block = ranked[start : start + LIKE_FREQUENCY]
        for word in block:
            context = endings[word]
            others = [other for other in block if other != word and other not in context]
            if len(others) >= CHOICES - 1:
                items.append(_shuffled(" ".join(context), [word, *chance.sample(others, CHOICES - 1)], chance))
    return _sample(items, LAST_WORD_ITEMS, chance)


def agreement_items() -> list[Item]:
    """Minimal pairs of grammatical agreement from templates, after BLiMP (Warstadt et al., 2020).

    Each template is filled in both numbers (or genders) equally often, so a model that always prefers one form scores
    half.
    """
    chance = random.Random(SEED)
    items = []
    for phenomenon in (_subject_verb, _determiner_noun, _anaphor):
        items += [_shuffled(context, list(forms), chance) for context, *forms in _balanced(phenomenon(), chance)]
    chance.shuffle(items)
    return items


def _subject_verb() -> Iterator[Pair]:
    """The verb agrees with the subject across a noun of the other number: "The keys near the garden → are"."""
    for noun, other, link, verb in itertools.product(PEOPLE + THINGS, PEOPLE + THINGS, LINKS, VERBS):
        if noun != other:
            for number in (0, 1):
                context = f"The {noun[number]} {link} the {other[1 - number]}"
                yield context, verb[number], verb[1 - number]


def _determiner_noun() -> Iterator[Pair]:
    """The noun agrees with its determiner across an adjective: "Mary found these old → maps"."""
    for buyer, verb, words, adjective, noun in itertools.product(MEN + WOMEN, FOUND, DETERMINERS, ADJECTIVES, THINGS):
        for number in (0, 1):
            yield f"{buyer} {verb} {words[number]} {adjective}", noun[number], noun[1 - number]


def _anaphor() -> Iterator[Pair]:
    """The reflexive agrees with its antecedent in gender and number: "The guards often blamed → themselves".

    No other noun stands between, unlike in `_subject_verb`: SmolLM2 takes the nearer noun for the antecedent so firmly
    that it falls far below chance, and pruning, which takes a model towards chance, would seem to help it.
    """
    subjects = [(name, "himself") for name in MEN] + [(name, "herself") for name in WOMEN]
    subjects += [(f"The {plural}", "themselves") for _, plural in PEOPLE]
    for index, ((subject, right), adverb, verb) in enumerate(itertools.product(subjects, ADVERBS, REFLEXIVE_VERBS)):
        yield f"{subject} {adverb} {verb}", right, [form for form in REFLEXIVES if form != right][index % 2]


def _balanced(found: Iterable[Pair], chance: random.Random) -> list[Pair]:
    """`PAIRS_EACH` pairs, as many with a form right as with it wrong: drawn two by two, each with a mirror of it."""
    mirrored: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        mirrored.setdefault(pair[1:], []).append(pair)
    couples = [forms for forms in mirrored if forms < forms[::-1]]
    chosen = []
    for index in range(PAIRS_EACH // 2):
        forms = couples[index % len(couples)]
        for pool in (mirrored[forms], mirrored[forms[::-1]]):
            chosen.append(pool.pop(chance.randrange(len(pool))))
    return chosen


def _shuffled(context: str, options: list[str], chance: random.Random) -> Item:
    """The item whose first option is right, with its options in random order."""
    right, choices = options[0], chance.sample(options, len(options))
    return Item(context, tuple(choices), choices.index(right))


def _sample(items: list[Item], count: int, chance: random.Random) -> list[Item]:
    return chance.sample(items, min(count, len(items)))


@cache
def _articles() -> tuple[Article, ...]:
    return tuple(load_articles("evaluation"))


def _paragraphs(article: Article) -> Iterator[list[str]]:
    """Paragraphs of prose, in words; headings and list items are shorter than any item needs."""
    return (paragraph.split() for paragraph in article.text.split("\n\n"))


def _sentences() -> Iterator[list[str]]:
    """Sentences that end in a plain lower-case word, in words and without their full stop."""
    for article in _articles():
        for paragraph in article.text.split("\n\n"):
            for sentence in re.split(r"(?<=[a-z]{3}[.])\s+(?=[A-Z])", paragraph):
                words = sentence.split()
                if len(words) in SENTENCE_WORDS and re.fullmatch(r"[a-z]{4,}\.", words[-1]) and words[0][0].isupper():
                    yield [*words[:-1], words[-1][:-1]]


LOCAL_TASKS = {
    "local_continuation": LocalTask(continuation_items, CHOICES),
    "local_last_word": LocalTask(last_word_items, CHOICES),
    "local_agreement": LocalTask(agreement_items, 2),
}
