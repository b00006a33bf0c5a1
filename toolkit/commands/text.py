"""Text from a packed model: open it, print the text as it comes, and say where the time went."""

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from toolkit import memory_limits
from toolkit.errors import UserError, unknown
from toolkit.timeline import TRANSFERS

ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1}  # each token is printed as it comes
SHORT = 32  # letters of a prompt that is surely multiplied with the packed form


@contextmanager
def opened(
    options: Namespace, kind: str, budgets: Mapping[str, int | None], memory_bytes: int | None = None
) -> Iterator:
    """The model of a folder that `pack` wrote, of this kind, its tokenizer, and the model that drafts for it, or None.

    `memory_bytes` is the limit for the process, if one is given. Says what memory the process will take and, at the
    end, what it took. Raises `UserError` before weights are read if the process's limit does not allow for it.
    """
    with ExitStack() as stack:
        stack.callback(gc.unfreeze)
        peak = stack.enter_context(memory_limits.Peak())
        with _collector_paused():
            from toolkit import hub

            memory_limits.return_large_blocks()
            stack.enter_context(hub.lean())  # before anything imports transformers' models
            from toolkit.commands.memory import within_limit
            from toolkit.interchange.reading import load_tokenizer
            from toolkit.kernels.engine import compiled
            from toolkit.offload.model import OffloadedModel

            settings = {name: getattr(options, name) for name in ("policy", "verify", "device", "reader")}
            if options.residency or options.neurons:
                settings["demand"] = _demand(options)
            method, draft = method_of(kind, options.weights, options.device), None
            kernels = f"{method or kind}-{options.dram}-{len(options.prompt) > SHORT}"  # that will be compiled
            tokenizer = load_tokenizer(options.folder if options.folder.is_file() else options.folder / "model")
            with within_limit(options, tokenizer, kernels, budgets, memory_bytes) as limits:
                if options.draft:
                    draft, limits = stack.enter_context(_opened_draft(options, limits)), {}
                model = OffloadedModel.open(options.folder, method, beside=draft, **limits, **settings)
            stack.enter_context(model)
        yield model, tokenizer, draft
        compiled.note_run(kernels)
        took = f"{peak.look() / 1e6:.0f}"
        words = f"the process took {took} MB of memory at its peak, without files"
        print(words if memory_bytes is None else f"peak {took} of {memory_bytes / 1e6:.0f} MB", file=sys.stderr)


def kind_of_file(file: Path) -> str:
    """The kind of a GGUF file: "experts" for a mixture, else "gguf". Raises `UserError` for one that is damaged."""
    with _collector_paused():
        from toolkit.models.gguf_header import read_header
        from toolkit.offload.variant import GGUF

    return "experts" if any(".ffn_down_exps." in name for name in read_header(file).tensors) else GGUF


def _demand(options: Namespace):
    """How units are read on demand. Raises `UserError` for a policy that needs to know what comes."""
    from toolkit.offload.options import Demand
    from toolkit.policies.residencies import online, residency_of

    name, chosen = options.residency, {"neurons": options.neurons} if options.neurons else {}
    if name is None:
        return Demand(**chosen)
    if name not in online():
        raise unknown("residency policy", name, online())
    return Demand(residency=lambda layer, units, rows: residency_of(name, units, rows), **chosen)


def _opened_draft(options: Namespace, budgets: Mapping[str, int | None]):
    """The draft. Raises `UserError` unless it is whole in memory: reads would cost as much as it saves."""
    from toolkit.offload.model import OffloadedModel
    from toolkit.offload.variant import variant_to_run

    method = method_of(variant_to_run(options.draft), None, options.device)
    draft = OffloadedModel.open(options.draft, method, verify=options.verify, device=options.device, **budgets)
    if draft.placement and draft.placement.storage:
        draft.close()
        raise UserError(
            f"--draft {options.draft}: {draft.placement.storage} of its layers do not fit into --dram {options.dram}: "
            "expected memory for all of it; raise --dram or leave --draft out"
        )
    return draft


def method_of(form: str, weights: str | None, device: str) -> str | None:
    """The name that `toolkit.policies.methods` has for it; None for neurons and experts, which are run in one way.

    Raises `UserError` for a format without a product.
    """
    from toolkit.offload.model import STRATEGIES
    from toolkit.policies.methods import PACKED, known_methods, usual_method

    if form in STRATEGIES:
        return None
    if weights is None:
        return usual_method(form, device != "cpu")
    if weights == "decoded":
        return form
    with_product = [name.removesuffix(PACKED) for name in known_methods() if name.endswith(PACKED)]
    if form not in with_product:
        raise UserError(
            f"--weights packed: {form} has no product of its own, only {', '.join(with_product)}; leave --weights out"
        )
    return f"{form}{PACKED}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Inside the block the garbage collector is paused: imports make millions of objects that stay.

    The collector takes a quarter of the time to import torch and transformers. Afterwards it leaves these objects out,
    until `gc.unfreeze`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


def prompt_of(options: Namespace, tokenizer, config):
    """The token ids of the prompt. Raises `UserError` for no token, one that the model lacks, or too many tokens."""
    from toolkit import hub
    from toolkit.quality.vocabulary import check_vocabulary

    with hub.foreign_code(options.folder, "its tokenizer fails"):
        prompt = tokenizer(options.prompt, return_tensors="pt")
    given = prompt["input_ids"].shape[1]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not given:
        raise UserError(f"--prompt {options.prompt!r}: this model's tokenizer makes no token of it; give a word")
    check_vocabulary(prompt["input_ids"], config.get_text_config().vocab_size, lambda: tokenizer)
    if positions and given + options.max_new_tokens > positions:
        raise UserError(
            f"a prompt of {given} tokens and --max-new-tokens {options.max_new_tokens}: expected {positions} together "
            "at most, the positions that this model knows"
        )
    return prompt


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
            do_sample=options.sample,
            streamer=Clocked(tokenizer, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **ONE_TEXT,
            **drafting,
        )
    made_s = came_s[prompt["input_ids"].numel() :]
    if (count := len(made_s)) < options.max_new_tokens:
        print(f"\nthe model ended its text after {count} of {options.max_new_tokens} tokens", file=sys.stderr)
    return made_s


def generate_from_checkpoint(options: Namespace) -> None:
    """Generate with a checkpoint, whole in memory."""
    from toolkit.interchange.reading import load_dense_model, load_tokenizer

    model, tokenizer = load_dense_model(options.folder), load_tokenizer(options.folder)
    generate(options, model, tokenizer, model.config)


def generate_timed(options: Namespace, model, tokenizer, kind: str, draft=None) -> None:
    """Generate, then print how fast that was, what memory held, and where the time went.

    `kind` is "bundled", "experts", or any other for layers.
    """
    _tell_ignored(options, model.model.generation_config)
    begun_s = model.recorder.now_s()
    drafting = {} if draft is None else {"draft": draft, "draft_tokens": options.draft_tokens}
    made_s = generate(options, model, tokenizer, model.model.config, **drafting)
    ended_s = model.recorder.now_s()
    print(f"\n{_speed(made_s)}; {_held(model, kind)}", file=sys.stderr)
    if draft is not None:
        print(_drafted(model.speculation), file=sys.stderr)
    rows = model.timeline.window(begun_s, ended_s).nearest()
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


def _speed(made_s: Sequence[float]) -> str:
    """The time of the first token, which has the prompt in it, and the rate of those after it."""
    first_s, last_s = made_s[0], made_s[-1]
    speed = f"{len(made_s)} tokens in {last_s:.1f} s: the first after {first_s:.1f} s"
    return speed + (f", then {(len(made_s) - 1) / (last_s - first_s):.1f} a second" if last_s > first_s else "")


def _drafted(counts) -> str:
    return (
        f"draft: {counts.tokens_a_pass:.1f} tokens a pass, {counts.acceptance:.0%} of {counts.drafted} drafted tokens "
        f"accepted; {counts.draft_s:.1f} s drafting, {counts.check_s:.1f} s checking; {counts.close} tokens within "
        "rounding of another one"
    )


def _held(model, kind: str) -> str:
    """How much of the layers, or of their neurons or experts, is in memory, and the bytes of memory."""
    parts = {"bundled": _held_neurons, "experts": _held_experts}.get(kind, _held_layers)(model)
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    return f"{parts}; {' and '.join(held)} held"


def _held_layers(model) -> str:
    where = model.placement
    on_device = f"{where.device} layers on the device, " if model.device.tier == "device" else ""
    parts = len(getattr(model.model.get_output_embeddings(), "parts", ()))
    head = f", {parts} of them parts of the head" if parts else ""
    return f"{on_device}{where.dram} layers in DRAM, {where.storage} on disk{head} ({model.mode} reads)"


def _held_neurons(model) -> str:
    stores = [ffn.store for ffn in model.strategy.ffns]
    share = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
    hot = sum(int(mask.sum()) for mask in model.strategy.hot) / sum(map(len, model.strategy.hot))
    on_device = f"{hot:.0%} of the neurons on the device, " if model.device.tier == "device" else ""
    computed = "held" if model.strategy.ffns[0].computes_held else "predicted"
    return f"{on_device}{share:.0%} of the neurons in DRAM ({model.mode} reads), computed with the {computed} ones"


def _held_experts(model) -> str:
    caches = [ffn.slots.cache for ffn in model.strategy.ffns]
    room = sum(cache.slots for cache in caches) / sum(cache.experts for cache in caches)
    needed, late = (sum(getattr(cache.of_experts, name) for cache in caches) for name in ("needed", "late"))
    hits = f"{1 - late / max(needed, 1):.0%} of the experts were there when needed"
    return f"DRAM for {room:.0%} of the experts ({model.mode} reads), {hits}"
