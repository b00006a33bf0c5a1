"""Text by transformers' `generate`, printed as it comes, and where the time went."""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence

from toolkit.commands.folder import Folder
from toolkit.commands.opening import Opened
from toolkit.commands.sampling import sampling_of
from toolkit.errors import UserError
from toolkit.offload.sampling import Sampler
from toolkit.offload.speculation import Speculation
from toolkit.timeline import TRANSFERS, Recorder

ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1}  # each token is printed as it comes


def tell_peak(model: Opened) -> None:
    """Say how much memory the process took, of its limit if it had one."""
    words = f"the process took {model.peak.look() / 1e6:.0f} MB of memory at its peak, without files"
    print(words if model.limit is None else model.memory(), file=sys.stderr)


def prompt_of(options: Namespace, tokenizer, config):
    """The prompt as transformers takes it.

    Raises `UserError` for no token, one that the model lacks, or too many tokens.
    """
    from toolkit import hub
    from toolkit.vocabulary import check_vocabulary

    with hub.foreign_code(options.folder, "its tokenizer fails"):
        prompt = tokenizer(options.prompt, return_tensors="pt")
    given = prompt["input_ids"].shape[1]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    check_length(options, given, positions)
    check_vocabulary(prompt["input_ids"], config.get_text_config().vocab_size, lambda: tokenizer)
    return prompt


def check_length(options: Namespace, given: int, positions: int | None) -> None:
    """Raise `UserError` for a prompt without tokens, or of more than leave room for the text."""
    if not given:
        raise UserError(f"--prompt {options.prompt!r}: this model's tokenizer makes no token of it; give a word")
    if positions and given + options.max_new_tokens > positions:
        raise UserError(
            f"a prompt of {given} tokens and --max-new-tokens {options.max_new_tokens}: expected {positions} together "
            "at most, the positions that this model knows"
        )


def generate(options: Namespace, model, tokenizer, config, **drafting: object) -> list[float]:
    """Print the prompt and the text that follows it; return the seconds after which each token came.

    Raises `UserError` for settings in the folder's files with which transformers cannot generate text.
    """
    from transformers import TextStreamer, set_seed

    from toolkit import hub

    class Clocked(TextStreamer):
        """Notes when each token comes; a draft's come together."""

        def put(self, value):
            """Print tokens: first the prompt, then those that were made."""
            super().put(value)
            came_s.extend([time.perf_counter() - begun_s] * value.numel())

    prompt = prompt_of(options, tokenizer, config)
    set_seed(options.seed)
    came_s, begun_s = [], time.perf_counter()
    with hub.foreign_code(options.folder, "transformers cannot generate text with its settings"):
        model.generate(
            **prompt,
            max_new_tokens=options.max_new_tokens,
            **_choosing(options, drafting),
            streamer=Clocked(tokenizer, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **ONE_TEXT,
            **drafting,
        )
    made_s = came_s[prompt["input_ids"].numel() :]
    tell_end(options, len(made_s))
    return made_s


def _choosing(options: Namespace, drafting: Mapping[str, object]) -> dict[str, object]:
    """The settings of transformers' `generate` by which tokens are chosen.

    Without a draft the toolkit's own sampler chooses: a seed gives the same text in every command. A draft's tokens are
    checked by probabilities, with torch's random numbers.
    """
    sampling = sampling_of(options)
    if not sampling.temperature:
        return {"do_sample": False}
    if drafting:
        kept = {"top_k": sampling.top_k, "top_p": sampling.top_p}
        return {"do_sample": True, "temperature": sampling.temperature, **kept}
    from transformers import LogitsProcessor, LogitsProcessorList

    class Drawn(LogitsProcessor):
        """Leaves the chosen token alone in."""

        def __call__(self, ids, scores):
            """Scores of which that token's is the largest."""
            token = choose(scores[0].float().cpu().numpy())
            scores = scores.new_full(scores.shape, -math.inf)
            scores[0, token] = 0
            return scores

    choose = Sampler(sampling)
    return {"do_sample": False, "logits_processor": LogitsProcessorList([Drawn()])}


def tell_end(options: Namespace, made: int) -> None:
    """Say that a text is shorter than what was asked for."""
    if made < options.max_new_tokens:
        print(f"\nthe model ended its text after {made} of {options.max_new_tokens} tokens", file=sys.stderr)


def generate_from_checkpoint(options: Namespace) -> None:
    """Generate with a checkpoint, whole in memory."""
    from toolkit.interchange.reading import load_dense_model, load_tokenizer

    model, tokenizer = load_dense_model(options.folder), load_tokenizer(options.folder)
    generate(options, model, tokenizer, model.config)


def generate_timed(options: Namespace, opened: Opened) -> None:
    """Generate, then print how fast that was, what memory held, and where the time went."""
    assert isinstance(opened.source, Folder)
    model, draft = opened.model, opened.source.draft
    _tell_ignored(options, model.model.generation_config)
    begun_s = model.recorder.now_s()
    drafting = {} if draft is None else {"draft": draft, "draft_tokens": options.draft_tokens}
    made_s = generate(options, model, opened.source.tokenizer, model.model.config, **drafting)
    ended_s = model.recorder.now_s()
    print(f"\n{speed(made_s)}; {model.held}", file=sys.stderr)
    if draft is not None:
        print(drafted(model.speculation), file=sys.stderr)
    tell_stages(model.recorder, begun_s, ended_s)


def tell_stages(recorder: Recorder, begun_s: float, ended_s: float) -> None:
    """Say where the time between two instants went."""
    rows = recorder.nearest(begun_s, ended_s)
    print(_stages(rows), file=sys.stderr)
    words = "each instant counts once; `read` is the time that only the disk took, `other` is all but the linears"
    if any(stage == "compile" for stage, *_ in rows):
        words += "; `compile` is Numba, when a machine or process first needs a kernel"
    print(words, file=sys.stderr)


def _stages(rows: Sequence[tuple[str, float, int]]) -> str:
    """Where the time went, as a table: pandas would take 65 MB for it."""
    whole_s = sum(seconds for _, seconds, _ in rows) or 1.0
    lines = [f"{'stage':>7} {'seconds':>8} {'share_percent':>14} {'moved_mb':>9}"]
    for stage, seconds, nbytes in rows:
        moved_mb = nbytes / 1e6 if stage in TRANSFERS else 0.0
        lines.append(f"{stage:>7} {seconds:8.1f} {100 * seconds / whole_s:14.1f} {moved_mb:9.1f}")
    return "\n".join(lines)


def _tell_ignored(options: Namespace, settings) -> None:
    """Say which settings in the folder are ignored."""
    for name, value in ONE_TEXT.items():
        if (given := getattr(settings, name, None)) not in (None, value):
            words = "run prints one text, token by token"
            print(
                f"{options.folder}: {name} {given!r:.40} of generation_config.json is ignored: {words}", file=sys.stderr
            )


def speed(made_s: Sequence[float]) -> str:
    """The time of the first token, which has the prompt in it, and the rate of those after it."""
    first_s, last_s = made_s[0], made_s[-1]
    speed = f"{len(made_s)} tokens in {last_s:.1f} s: the first after {first_s:.2f} s"
    return speed + (f", then {(len(made_s) - 1) / (last_s - first_s):.2f} a second" if last_s > first_s else "")


def drafted(counts: Speculation) -> str:
    """The gain of a draft, in words."""
    words = (
        f"draft: {counts.tokens_a_pass:.1f} tokens a pass, {counts.acceptance:.0%} of {counts.drafted} drafted tokens "
        f"accepted; {counts.draft_s:.1f} s drafting, {counts.check_s:.1f} s checking"
    )
    return f"{words}; {counts.close} tokens within rounding of another one" if counts.close else words
