"""What runners share: they open a packed model, print the text as it comes, and say where the time went."""

import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from toolkit.errors import UserError


@contextmanager
def opened(options: Namespace, method: Callable[[], str] | None, budgets: Mapping[str, int | None]) -> Iterator:
    """The model of a folder that `pack` wrote, and the one that drafts for it, if `--draft` names one.

    `method` names how the first is run, once formats can be imported.
    """
    with ExitStack() as stack:
        with _collector_paused():
            from toolkit.models import hub

            stack.enter_context(hub.lean())  # before anything imports transformers' models
            from toolkit.offload.model import OffloadedModel

            settings = {name: getattr(options, name) for name in ("policy", "verify", "device", "reader")}
            name, draft, limits = method() if method else None, None, dict(budgets)
            if options.draft:
                draft, limits = stack.enter_context(_opened_draft(options, budgets)), {}
            model = OffloadedModel.open(options.folder, name, beside=draft, **limits, **settings)
            stack.enter_context(model)
        yield model, draft


def _opened_draft(options: Namespace, budgets: Mapping[str, int | None]):
    """The draft, which is whole in memory: reading it would cost what it saves. Raises `UserError` if it is not."""
    from toolkit.commands.runners import method_of
    from toolkit.offload import early_checks
    from toolkit.offload.model import STRATEGIES, OffloadedModel

    form = early_checks.format_to_run(options.draft)
    method = None if form in STRATEGIES else method_of(form, None, options.device)
    draft = OffloadedModel.open(options.draft, method, verify=options.verify, device=options.device, **budgets)
    if draft.placement and draft.placement.storage:
        draft.close()
        raise UserError(
            f"--draft {options.draft}: {draft.placement.storage} of its layers do not fit into --dram {options.dram}: "
            "expected memory for all of it; raise --dram or leave --draft out"
        )
    return draft


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Imports make millions of objects that stay; the garbage collector would look through them again and again.

    It takes a quarter of the time to import torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prompt_of(options: Namespace, tokenizer, config):
    """What the tokenizer makes of the prompt. Raises `UserError` for no token, or more than the model's positions."""
    prompt = tokenizer(options.prompt, return_tensors="pt")
    given = prompt["input_ids"].shape[1]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not given:
        raise UserError(f"--prompt {options.prompt!r}: this model's tokenizer makes no token of it; give a word")
    if positions and given + options.max_new_tokens > positions:
        raise UserError(
            f"a prompt of {given} tokens and --max-new-tokens {options.max_new_tokens}: expected {positions} together "
            "at most, the positions that this model knows"
        )
    return prompt


def generate(options: Namespace, model, tokenizer, config, **drafting: object) -> int:
    """Print the prompt and the text that follows it; return how many tokens were made."""
    from transformers import TextStreamer, set_seed

    prompt = prompt_of(options, tokenizer, config)
    set_seed(options.seed)
    tokens = model.generate(
        **prompt,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.sample,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **drafting,
    )
    if (count := tokens.shape[1] - prompt["input_ids"].shape[1]) < options.max_new_tokens:
        print(f"\nthe model ended its text after {count} of {options.max_new_tokens} tokens", file=sys.stderr)
    return count


def generate_timed(options: Namespace, model, held: Callable[..., str], draft=None) -> None:
    """Generate, then print how fast that was, what memory `held`, and where the time went."""
    tokenizer = model.tokenizer
    begun_s = model.recorder.now_s()
    drafting = {} if draft is None else {"draft": draft, "draft_tokens": options.draft_tokens}
    tokens = generate(options, model, tokenizer, model.model.config, **drafting)
    ended_s = model.recorder.now_s()
    seconds = ended_s - begun_s
    print(f"\n{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second; {held(model)}", file=sys.stderr)
    if draft is not None:
        print(_drafted(model.speculation), file=sys.stderr)
    table = model.timeline.window(begun_s, ended_s).breakdown()
    moved = table["nbytes"].where(table["stage"].isin(["read", "copy"]), 0) / 1e6
    shown = table.assign(moved_mb=moved)[["stage", "seconds", "share_percent", "moved_mb"]]
    print(shown.to_string(index=False, float_format="{:.1f}".format), file=sys.stderr)
    print(
        "each instant counts once; `read` is the time that only the disk took, `other` is all but the linears",
        file=sys.stderr,
    )


def _drafted(counts) -> str:
    return (
        f"draft: {counts.tokens_a_pass:.1f} tokens a pass, {counts.acceptance:.0%} of {counts.drafted} drafted tokens "
        f"accepted; {counts.draft_s:.1f} s drafting, {counts.check_s:.1f} s checking; {counts.close} tokens within "
        "rounding of another one"
    )
