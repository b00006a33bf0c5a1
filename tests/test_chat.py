"""`chat` with a tiny model: its turns, commands and interruptions."""

import io
import json
import re
import signal

import pytest

from tests import chat_model
from tests.chat_model import END, LAST_ANSWER, START, answer
from tests.refusals import refused_command
from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.interchange.reading import load_tokenizer
from toolkit.offload.cached_model import CachedModel
from toolkit.offload.chat_template import end_of_turn, ends_of, tokens_of

TURNS = ["5 6", "11", "7 8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return chat_model.make(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture
def passes(monkeypatch):
    """The number of tokens of each pass."""
    sizes, compute = [], CachedModel._pass
    monkeypatch.setattr(
        CachedModel, "_pass", lambda self, tokens, **more: sizes.append(len(tokens)) or compute(self, tokens, **more)
    )
    return sizes


@pytest.fixture
def talk(monkeypatch, capfd):
    """`talk(folder, lines, *options)`: what the command prints, and says beside it."""

    def run(folder, lines, *options, status=0):
        monkeypatch.setattr("sys.stdin", lines if hasattr(lines, "readline") else io.StringIO("\n".join(lines)))
        capfd.readouterr()
        assert main(["chat", str(folder), *options]) == status
        return capfd.readouterr()

    return run


def expected(model, folder, turns, system=None):
    """The answers, each computed from the whole conversation, and the number of tokens with the one that ends them."""
    tokenizer = load_tokenizer(folder / "model")
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokens_of(tokenizer, messages)
        tokens = answer(model, prompt, 200 - len(prompt))
        answers.append(chat_model.text_of(tokenizer, prompt, tokens))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, len(prompt) + len(tokens) + 1


def test_turns_are_those_of_the_whole_conversation_and_only_new_tokens_are_computed(tiny, talk, passes):
    model, folder = tiny
    answers, tokens = expected(model, folder, TURNS, "12")
    printed = talk(folder, TURNS, "--system", "12", "--context", "200", "--memory", "4GB")
    assert printed.out.splitlines() == answers
    assert sum(passes) == tokens - 1
    lines = [line for line in printed.err.splitlines() if line.startswith("[")]
    assert f"; {tokens} of 200 tokens of context]" in lines[-1]
    for words in ("a second; ", " MB read a token; ", "peak ", " of 4000 MB; "):
        assert words in lines[0]


def test_a_template_that_changes_earlier_turns_is_computed_from_there(tmp_path, talk, passes):
    model, folder = chat_model.make(tmp_path / "thoughts", LAST_ANSWER)
    answers, _ = expected(model, folder, TURNS)
    assert talk(folder, TURNS).out.splitlines() == answers


def test_a_model_without_a_template_continues_plain_text(tmp_path, talk):
    model, folder = chat_model.make(tmp_path / "plain", None)
    printed = talk(folder, ["5 6", "7"], "--context", "6")
    first = answer(model, [5, 6], 4)
    assert "no chat template" in printed.err
    assert printed.out.splitlines()[0] == chat_model.text_of(load_tokenizer(folder / "model"), [5, 6], first)
    assert "the context of 6 tokens is full and the answer ends here" in printed.err
    assert re.search(r"error: a text of \d+ tokens fills the context of 6", printed.err)


def test_commands(tiny, talk, tmp_path):
    model, folder = tiny
    answers, _ = expected(model, folder, TURNS[:1])
    saved = tmp_path / "talk.json"
    lines = [TURNS[0], f"/save {saved}", "/reset", TURNS[0], "", "/help", "/rest", "/save", "/bye", TURNS[1]]
    printed = talk(folder, lines, "--context", "200")
    assert printed.out.splitlines() == answers * 2
    roles = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": answers[0]}]
    assert json.loads(saved.read_text()) == roles
    for words in (
        "2 messages are in",
        "/quit       end",
        "did you mean '/reset'",
        "name the file, as in /save talk.json",
    ):
        assert words in printed.err


def test_a_full_context_ends_an_answer_and_later_turns_in_a_line_each(tiny, talk):
    printed = talk(tiny[1], [TURNS[0], TURNS[1], "/reset", TURNS[0]], "--context", "12")
    assert "the context of 12 tokens is full and the answer ends here: /reset begins anew" in printed.err
    assert re.search(r"error: a text of \d+ tokens fills the context of 12", printed.err)
    first, *_, last = printed.out.splitlines()
    assert first == last


def test_a_stop_text_ends_an_answer_and_a_seed_repeats_one(tiny, talk):
    model, folder = tiny
    answers, _ = expected(model, folder, TURNS[:1])
    begun = answers[0].partition(" 9")[0]
    assert talk(folder, TURNS[:1], "--stop", " 9", "--stop", "none").out == f"{begun}\n"
    drawn = ["--temperature", "1", "--top-p", "0.9", "--top-k", "20", "--context", "60"]
    one, same, other = (talk(folder, TURNS[:1], *drawn, "--seed", seed).out for seed in "112")
    assert one == same != other


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny, talk, monkeypatch):
    model, folder = tiny
    answers, _ = expected(model, folder, TURNS[:1])
    steps, step = [], CachedModel.step

    def interrupted(self, token):
        steps.append(token)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, token)

    monkeypatch.setattr(CachedModel, "step", interrupted)
    printed = talk(folder, [TURNS[0], "/reset", TURNS[0]], "--context", "200")
    stopped, whole = printed.out.splitlines()
    assert whole == answers[0]
    assert stopped == " " + " ".join(whole.split()[:3])
    assert "stopped; the answer stays as far as it came" in printed.err


def test_ctrl_c_before_an_answer_takes_its_message_back_and_at_the_prompt_drops_a_line(
    tiny, talk, monkeypatch, tmp_path
):
    class Input(io.StringIO):
        first = True

        def readline(self, *given):
            if self.first:
                self.first = False
                signal.raise_signal(signal.SIGINT)
            return super().readline(*given)

    prefill, saved = CachedModel.prefill, tmp_path / "talk.json"

    def interrupted(self, tokens):
        signal.raise_signal(signal.SIGINT)
        return prefill(self, tokens)

    monkeypatch.setattr(CachedModel, "prefill", interrupted)
    printed = talk(tiny[1], Input(f"{TURNS[0]}\n/save {saved}\n"))
    assert printed.err.count("Ctrl-C stops an answer") == 2
    assert json.loads(saved.read_text()) == []


REFUSED = [
    (["--dram", "1KB"], "budget"),
    (["--context", "5000"], "--context 5000: expected 2048 at most"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_bad_options_are_one_line(tiny, capfd, options, words):
    refused_command(["chat", str(tiny[1]), *options], words, capfd)


class _Settings:
    def __init__(self, ends):
        self.eos_token_id = ends


def test_a_turn_ends_by_all_tokens_that_the_model_names(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny[1] / "model")
    assert end_of_turn(tokenizer) == {END}
    assert ends_of(tokenizer, _Settings([1, 2]), _Settings(3), _Settings(None)) == {1, 2, 3, END}
    tokenizer.chat_template = "{{ messages[0].content }} 5 {{ messages[-1].content }} 5"
    assert end_of_turn(tokenizer) == set()  # a word is no end
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_of_turn(tokenizer) == set()


def test_a_template_cannot_leave_its_sandbox_and_its_refusal_is_told(tiny):
    tokenizer, messages = load_tokenizer(tiny[1] / "model"), [{"role": "user", "content": "5"}]
    assert tokens_of(tokenizer, messages) == [START, 4, 5, END, START, 9]
    for template, words in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|unde"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{% if %}", "cannot be used"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=words):
            tokens_of(tokenizer, messages)
