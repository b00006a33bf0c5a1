"""`run` with several prompts, as JSON, and with what chooses tokens."""

import io
import json

import pytest
from gguf_files import CASES, write

from tests import chat_model
from tests.chat_model import answer, text_of
from toolkit.__main__ import main
from toolkit.commands.texts import read_prompts
from toolkit.interchange.reading import load_tokenizer

PROMPTS = {"5 6": [5, 6], "11": [11], "7 8 9": [7, 8, 9]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return chat_model.make(tmp_path_factory.mktemp("texts") / "tiny")


@pytest.fixture
def written(capfd):
    """`written(folder, *options)`: what `run` prints."""

    def run(folder, *options):
        capfd.readouterr()
        assert main(["run", str(folder), "--max-new-tokens", "6", *options]) == 0
        return capfd.readouterr().out

    return run


def test_prompts_of_a_file_give_an_object_each_as_alone(tiny, written, tmp_path, monkeypatch):
    model, folder = tiny
    tokenizer = load_tokenizer(folder / "model")
    expected = [text_of(tokenizer, tokens, answer(model, tokens, 6, ends=())) for tokens in PROMPTS.values()]
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("\n\n".join(PROMPTS) + "\n")
    objects.write_text("\n".join(json.dumps({"prompt": prompt, "id": 3}) for prompt in PROMPTS))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes())))
    for place in (lines, objects, "-"):
        rows = [json.loads(line) for line in written(folder, "--prompts", str(place), "--json").splitlines()]
        assert [row["prompt"] for row in rows] == list(PROMPTS)
        assert [row["text"] for row in rows] == expected
    numbers = {"tokens", "seconds", "tokens_per_second", "mb_per_token", "peak_mb"}
    assert rows[0].keys() == {"prompt", "text", "end"} | numbers
    assert all(row["tokens"] <= 6 and row["seconds"] > 0 and row["peak_mb"] > 100 for row in rows)
    (alone,) = written(folder, "--prompt", "11", "--json").splitlines()
    assert json.loads(alone)["text"] == expected[1]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"11\n")))
    (piped,) = written(folder, "--prompt", "-", "--json").splitlines()
    assert json.loads(piped)["prompt"] == "11"
    assert json.loads(piped)["text"] == expected[1]
    plain = written(folder, "--prompts", str(lines))
    assert plain.splitlines() == [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    stop = expected[0][3:6]
    assert written(folder, "--prompt", "5 6", "--stop", stop) == f"5 6{expected[0][:3]}\n"


def test_only_the_ends_of_lines_part_prompts(tmp_path):
    """Unicode's other line separators are part of a prompt; JSON leaves them as they are."""
    prompts, file = ["one\u2028two", "three\x85four\x0b"], tmp_path / "prompts"
    file.write_bytes("\r\n\r\n".join(prompts).encode())
    assert read_prompts(str(file)) == prompts
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
    file.write_bytes("\n".join(lines).encode())
    assert read_prompts(str(file)) == prompts


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_all_ways_draw_the_same_text_by_a_seed(tiny, written, tmp_path, kind):
    """By transformers' loop or the decoder without torch, and by the writer; the text of another seed differs."""
    place, prompt = tiny[1], "5 6"
    if kind == "file":
        place, prompt = tmp_path / "model.gguf", "the he"
        write(CASES["llama"].model(), CASES["llama"], place)
    texts = []
    for seed in "12":
        drawn = ["--prompt", prompt, "--temperature", "1.5", "--top-p", "0.9", "--top-k", "30", "--seed", seed]
        texts.append(written(place, *drawn).removesuffix("\n"))
        assert texts[-1] == prompt + json.loads(written(place, *drawn, "--json"))["text"]
    assert texts[0] != texts[1]


WRONG = [
    (["--prompts", "FILE"], b'{"prompt": "5"}\n{"text": "6"}', "line 2 of those that are not empty is no object"),
    (["--prompts", "FILE"], b"5\n\xff", "byte 3 is no UTF-8"),
    ([], b"", "one of the arguments --prompt --prompts is required"),
    (["--prompt", "5", "--top-k", "3"], b"", "--top-k 3: nothing is drawn at temperature 0"),
]


@pytest.mark.parametrize(("options", "contents", "words"), WRONG)
def test_bad_options_are_one_line_before_work_starts(tiny, tmp_path, capfd, options, contents, words):
    (file := tmp_path / "prompts").write_bytes(contents)
    assert main(["run", str(tiny[1]), *(word.replace("FILE", str(file)) for word in options)]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert words in error


@pytest.mark.parametrize("command", [["run", "--prompt", "-"], ["run", "--prompts", "-"], ["chat"]])
def test_a_closed_standard_input_is_one_line(tiny, capfd, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", None)
    name, *options = command
    assert main([name, str(tiny[1]), *options]) == 2
    assert "error: standard input is closed" in capfd.readouterr().err
