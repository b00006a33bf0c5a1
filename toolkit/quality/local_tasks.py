"""Three multiple-choice tasks that need no hub, each a few hundred short items made with a fixed seed.

An item is a context, its choices and the index of the right one. Wrong choices are drawn from where the right one came
from, so that neither length nor frequency of a choice gives the answer away: what is left is the model's reading.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

from toolkit.quality import agreement
from toolkit.quality.corpora import Article, load_articles

SEED = 0
CONTINUATION_ITEMS, CONTEXT_WORDS, CONTINUATION_WORDS = 600, 20, 6
LAST_WORD_ITEMS, SENTENCE_WORDS = 600, range(8, 21)
LIKE_FREQUENCY = 12  # words of neighbouring frequency rank that choices are drawn from
CHOICES = 4


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
    """Minimal pairs of grammatical agreement, after BLiMP (Warstadt et al., 2020): see the module `agreement`."""
    chance = random.Random(SEED)
    items = [_shuffled(pair.context, [pair.right, pair.wrong], chance) for pair in agreement.pairs(chance)]
    chance.shuffle(items)
    return items


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
