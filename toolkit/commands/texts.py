"""Several texts of `run`, or one as JSON: prompts from a file or standard input, and an object for each text."""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path

from toolkit import hub
from toolkit.commands.memory import check_context
from toolkit.commands.opening import ModelSource, Opened
from toolkit.commands.sampling import sampling_of
from toolkit.commands.text import check_length, drafted, speed, tell_end, tell_stages
from toolkit.errors import UserError, disk_trouble
from toolkit.offload.generation import PASS, Request, Reuse
from toolkit.offload.overhead import TextRoom
from toolkit.vocabulary import check_known

STANDARD_INPUT = "-"


def read_prompts(place: str) -> list[str]:
    """The prompts of a file, or of standard input for "-": one a line, or lines of JSON with a `prompt` each.

    Lines of JSON begin with a brace, the first one of the file too. Empty lines are left out. Raises `UserError` for a
    file that cannot be read, and for a line that is no such object.
    """
    try:
        read = standard_input() if place == STANDARD_INPUT else Path(place).read_bytes()
        lines = [line.removesuffix("\r") for line in read.decode("utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {place}: byte {error.start + 1} is no UTF-8; convert the file") from None
    except OSError as error:
        raise disk_trouble(error, place) or error from error
    if not lines:
        raise UserError(f"--prompts {place}: holds no prompt; write one a line")
    if lines[0].lstrip().startswith("{"):
        return [_prompt(place, number, line) for number, line in enumerate(lines, 1)]
    return lines


def check_standard_input() -> None:
    """Raise `UserError` if the caller closed it."""
    if sys.stdin is None:
        raise UserError("standard input is closed: give it a file, or a pipe")


def standard_input() -> bytes:
    """All of it. Raises `UserError` if the caller closed it."""
    check_standard_input()
    return sys.stdin.buffer.read()


def _prompt(place: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"--prompts {place}: line {number} of those that are not empty is no object with a prompt")
    return prompt


def room_of(options: Namespace, source: ModelSource, several: bool) -> TextRoom:
    """The room that the longest of the prompts and its text take."""
    prompt = max(len(tokens_of_prompt(options, source, text)) for text in options.prompts)
    check_context(options, prompt)
    return TextRoom(prompt, options.max_new_tokens, options.context or 0, PASS if several else None)


def tokens_of_prompt(options: Namespace, source: ModelSource, text: str) -> list[int]:
    """The token ids of a prompt. Raises `UserError` for no token, one that the model lacks, or too many tokens."""
    with hub.foreign_code(options.folder, "its tokenizer fails"):
        tokens = source.tokenizer(text)["input_ids"]
    check_length(options, len(tokens), source.positions)
    check_known(min(tokens), max(tokens), source.words, lambda: source.tokenizer)
    return tokens


def write_text(options: Namespace, opened: Opened) -> None:
    """Print the prompt and its text, then how fast that was, what memory held, and where the time went."""
    model, source, made_s = opened.model, opened.source, list[float]()
    prompt = tokens_of_prompt(options, source, options.prompt)
    writer = opened.writer(len(prompt) + options.max_new_tokens)
    print(source.tokenizer.decode(prompt, skip_special_tokens=True), end="", flush=True)
    begun_s = model.recorder.now_s()
    for piece in writer.continued(prompt, Request(sampling_of(options), options.max_new_tokens)):
        print(piece.text, end="", flush=True)
        made_s.append(model.recorder.now_s() - begun_s)
    print(flush=True)
    tell_end(options, len(made_s))
    print(f"\n{speed(made_s)}; {model.held}", file=sys.stderr)
    if counts := getattr(model, "counts", None):
        print(drafted(counts), file=sys.stderr)
    tell_stages(model.recorder, begun_s, model.recorder.now_s())


def write_texts(options: Namespace, opened: Opened) -> None:
    """Continue each prompt and print its text, or with `--json` an object. A text depends on its own prompt alone."""
    prompts = [tokens_of_prompt(options, opened.source, text) for text in options.prompts]
    writer = opened.writer(max(map(len, prompts)) + options.max_new_tokens + 1, reuse=Reuse.ALONE)
    request = Request(sampling_of(options), options.max_new_tokens, tuple(options.stop))
    for prompt, tokens in zip(options.prompts, prompts, strict=True):
        begun_s, read, pieces = time.perf_counter(), writer.model.read_bytes, []
        if not options.json:
            print(prompt, end="", flush=True)
        for piece in writer.continued(tokens, request):
            pieces.append(piece)
            if not options.json:
                print(piece.text, end="", flush=True)
        spent_s, read = time.perf_counter() - begun_s, writer.model.read_bytes - read
        row = _row(prompt, pieces, spent_s, read, opened.peak.look())
        print(json.dumps(row, ensure_ascii=False) if options.json else "", flush=True)
        if not options.json:
            words = "{tokens} tokens in {seconds} s; {mb_per_token} MB read a token; peak {peak_mb} MB"
            print(words.format(**row), file=sys.stderr)


def _row(prompt: str, pieces: list, seconds: float, read: int, peak: int) -> dict[str, object]:
    """A text as JSON: seconds and bytes are those of its prompt, too."""
    tokens = sum(piece.is_new for piece in pieces)
    return {
        "prompt": prompt,
        "text": "".join(piece.text for piece in pieces),
        "tokens": tokens,
        "end": pieces[-1].end,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 3),
        "mb_per_token": round(read / max(tokens, 1) / 1e6, 3),
        "peak_mb": round(peak / 1e6),
    }
