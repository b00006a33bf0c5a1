"""A writer against texts that are computed anew, with a model whose logits are drawn from all tokens before."""

from itertools import chain

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.offload import generation
from toolkit.offload.generation import Request, Reuse, Writer
from toolkit.offload.sampling import log_probabilities
from toolkit.offload.words import BROKEN, Words

WORDS, PROMPT = 40, [5, 6, 7, 8, 9, 10]


class Drawn:
    """A model without weights. `passes` are the tokens of each pass; if `whole`, it can only be emptied."""

    words, positions, read_bytes, repeats = WORDS, None, 0, False

    def __init__(self, whole=False):
        self.tokens, self.passes, self.whole = [], [], whole

    @property
    def length(self):
        return len(self.tokens)

    def scores(self, tokens):
        self.passes.append(list(tokens))
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(np.random.default_rng(self.tokens).standard_normal(WORDS).astype(np.float32))
        return np.stack(rows)

    def prefill(self, tokens):
        return self.scores(tokens)[-1]

    def step(self, token):
        return self.prefill([token])

    def cut(self, length):
        if length < self.length:
            del self.tokens[0 if self.whole else length :]


class Bytes:
    """A tokenizer whose tokens are bytes; of `names`, they are texts."""

    def __init__(self, names=None):
        self.names = names

    def decode(self, tokens, **_):
        if self.names:
            return "".join(self.names[token] for token in tokens)
        return bytes(tokens).decode("utf-8", errors="replace")


def tokens_of(writer, prompt, **request):
    return [piece.token for piece in writer.continued(prompt, Request(**({"most": 8} | request)))]


def new(**settings):
    return Writer(Drawn(settings.pop("whole", False)), Bytes(), settings.pop("ends", ()), 100, **settings)


@pytest.mark.parametrize("whole", [False, True])
def test_only_new_tokens_are_computed_and_the_text_is_that_of_an_empty_cache(whole):
    writer = new(whole=whole)
    text = PROMPT + tokens_of(writer, PROMPT)
    writer.model.passes.clear()
    assert tokens_of(writer, [*text, 1, 2]) == tokens_of(new(), [*text, 1, 2])
    # the last token of a text was never passed on, so it is new to the cache
    assert writer.model.passes[0] == [text[-1], 1, 2]
    writer.model.passes.clear()
    changed = [*text[:9], 3, *text[10:]]
    assert tokens_of(writer, changed) == tokens_of(new(), changed)
    assert writer.model.passes[0] == (changed if whole else changed[9:])
    assert tokens_of(writer, PROMPT) == tokens_of(new(), PROMPT)


def test_a_text_that_is_alone_takes_whole_passes_from_the_cache(monkeypatch):
    monkeypatch.setattr(generation, "PASS", 4)
    writer, long = new(reuse=Reuse.ALONE), list(range(11))
    tokens_of(writer, long)
    assert writer.model.passes[:3] == [long[:4], long[4:8], long[8:]]
    for text, begun in ((long, 8), ([*long[:6], 30], 4), ([*long, 12], 4), ([1], 0)):
        writer.model.passes.clear()
        assert tokens_of(writer, text) == tokens_of(new(), text)
        assert list(chain(*writer.model.passes))[: len(text) - begun] == text[begun:]
        assert writer.model.passes[0] == text[begun : begun + 4]


def passes_of(writer, prompt):
    """The passes over a prompt, before an answer begins."""
    del writer.model.passes[:]
    next(writer.continued(prompt, Request()))
    return [*writer.model.passes]


def test_a_conversation_that_goes_on_is_in_the_cache_and_a_text_has_the_same_passes_again(monkeypatch):
    monkeypatch.setattr(generation, "PASS", 4)
    writer, first = new(reuse=Reuse.PASSES), [*range(11)]
    text = [*first, *tokens_of(writer, first)]
    second = [*text, 30, 31]
    for _ in range(2):
        assert passes_of(writer, second) == [second[len(text) - 1 :]]  # an answer's last token was never passed on
    assert tokens_of(writer, second) == tokens_of(new(), second)
    for _ in range(2):
        assert passes_of(writer, first) == [first[8:]]
    assert passes_of(writer, second) == [second[11:15], second[15:19], second[19:]]
    emptied = new(reuse=Reuse.PASSES, whole=True)
    tokens_of(emptied, first)
    assert passes_of(emptied, first) == [first[:4], first[4:8], first[8:]]


def test_passes_that_score_a_prompt_are_not_those_of_another_text(monkeypatch):
    monkeypatch.setattr(generation, "PASS", 4)
    for reuse in (Reuse.PASSES, Reuse.ALONE):
        writer, prompt = new(reuse=reuse), [*range(11)]
        _, logits = writer.scored(prompt, 2)
        list(writer.continued(prompt, Request(most=3), logits=logits))
        assert passes_of(writer, prompt) == [prompt[:4], prompt[4:8], prompt[8:]]


def test_all_of_the_cache_of_a_model_that_repeats_stays(monkeypatch):
    monkeypatch.setattr(Drawn, "repeats", True)
    writer, prompt = new(reuse=Reuse.ALONE), list(range(11))
    first = [piece.token for piece in writer.continued(prompt, Request(most=3))]
    del writer.model.passes[:]
    assert [piece.token for piece in writer.continued(prompt, Request(most=3))] == first
    assert writer.model.passes[0] == prompt[-1:]


def test_a_model_ends_its_text_and_so_do_most_tokens_and_a_full_context():
    tokens = tokens_of(new(), PROMPT)
    pieces = list(new(ends={tokens[3]}).continued(PROMPT, Request(most=8)))
    assert [piece.token for piece in pieces] == tokens[: tokens.index(tokens[3]) + 1]
    assert pieces[-1].end == "stop"
    assert [piece.end for piece in new().continued(PROMPT, Request(most=2))] == ["", "length"]
    pieces = list(Writer(Drawn(), Bytes(), (), 9).continued(PROMPT, Request()))
    assert [piece.end for piece in pieces] == ["", "", "context"]
    with pytest.raises(UserError, match="6 tokens fills the context of 6"):
        next(Writer(Drawn(), Bytes(), (), 6).continued(PROMPT, Request()))


@pytest.mark.parametrize(("prompt", "words"), [([], "no token"), ([0, WORDS], "ids from 0 to 40")])
def test_a_prompt_that_the_model_cannot_read_is_refused(prompt, words):
    with pytest.raises(UserError, match=words):
        next(new().continued(prompt, Request()))


def test_a_cancelled_text_ends_before_its_next_pass_and_the_cache_goes_on(monkeypatch):
    monkeypatch.setattr(generation, "PASS", 4)
    writer, expected = new(), tokens_of(new(), PROMPT)
    pieces = writer.continued(PROMPT, Request(most=8), iter([False, False, False, True]).__next__)
    assert [(piece.token, piece.end) for piece in pieces] == [(expected[0], ""), (None, "cancelled")]
    assert [piece.end for piece in writer.continued([1] * 9, Request(), lambda: True)] == ["cancelled"]
    assert tokens_of(writer, PROMPT) == expected


def test_a_pass_that_fails_leaves_an_empty_cache():
    writer = new()
    tokens_of(writer, PROMPT)
    scores, writer.model.scores = writer.model.scores, lambda tokens: scores(tokens)[:0].item()
    with pytest.raises(ValueError, match="size 1"):
        tokens_of(writer, [*PROMPT, 1])
    writer.model.scores = scores
    assert writer.model.length == 0
    assert tokens_of(writer, [*PROMPT, 1]) == tokens_of(new(), [*PROMPT, 1])


def test_scores_are_those_of_single_steps(monkeypatch):
    monkeypatch.setattr(generation, "SCORES_BYTES", 4 * WORDS * 4)  # four tokens at once
    model, writer = Drawn(), new()
    scores, _ = writer.scored(PROMPT, 3)
    assert scores[0] is None
    assert len(scores) == len(PROMPT)
    for token, following, score in zip(PROMPT, PROMPT[1:], scores[1:], strict=False):
        logarithms = log_probabilities(model.step(token))
        assert score.logarithm == logarithms[following]
        assert [at for at, _ in score.likeliest] == np.argsort(-logarithms)[:3].tolist()
    pieces = list(writer.continued(PROMPT, Request(most=1, likeliest=2)))
    logarithms = log_probabilities(model.step(PROMPT[-1]))
    assert pieces[0].score.likeliest[0] == (logarithms.argmax(), logarithms.max())


def test_characters_come_whole():
    """Each token is a byte; those of "ï" and "€" are shown once all are there."""
    text = "naïve €"
    words = Words(Bytes().decode, b"so ", ())
    parts = [words.add(byte) for byte in text.encode()]
    assert "".join(parts) == text
    assert parts[:5] == ["n", "a", "", "ï", "v"]
    words.add(0xE2)
    assert words.rest() == BROKEN


STOPPED = [  # the texts of the tokens, the stop texts, what is shown after each token, and the rest
    (["a", "b", "c"], ["b"], ["a", ""], ""),
    (["a", "EN", "D", "c"], ["END"], ["a", "", ""], ""),
    (["a", "EN", "x"], ["END"], ["a", "", "ENx"], ""),
    (["aEE", "ND"], ["END"], ["aE", ""], ""),
    (["a", "EN"], ["END"], ["a", ""], "EN"),
    (["xyEND more"], ["more", "END"], ["xy"], ""),
    (["ab", "ab", "ac"], ["abac"], ["", "ab", ""], ""),
]


@pytest.mark.parametrize(("names", "stops", "shown", "rest"), STOPPED)
def test_nothing_of_a_stop_text_is_shown(names, stops, shown, rest):
    words = Words(Bytes(names).decode, (), stops)
    found = []
    for token in range(len(names)):
        found.append(words.add(token))
        if words.stopped:
            break
    assert (found, words.rest()) == (shown, rest)


def test_a_stop_text_ends_a_text():
    names = ["<" + str(number) + ">" for number in range(WORDS)]
    tokens = tokens_of(new(), PROMPT)
    stop = names[tokens[2]][1:] + names[tokens[3]][:2]
    writer = Writer(Drawn(), Bytes(names), (), 100)
    pieces = list(writer.continued(PROMPT, Request(most=8, stops=(stop,))))
    assert "".join(piece.text for piece in pieces) == names[tokens[0]] + names[tokens[1]] + "<"
    assert pieces[-1].end == "stop"
