"""`python -m toolkit run`: generate text with a packed model.

torch takes seconds to import, so the checks that do without it come first.
"""

import argparse
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from toolkit.errors import UserError
from toolkit.offload import early_checks

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SEEDS = 2**32
BUNDLED = "bundled"  # the variant that `pack --method neurons` writes
WEIGHTS_HELP = """\
--weights decoded makes each matrix dense before its product: the text is that of the packed model in memory.
--weights packed multiplies with the packed form where a single token is computed, which is quicker where memory limits.
Its sums run in another order, so the last digits differ, and now and then another token is the likeliest.
Without the option, spqr is multiplied packed on a CPU, since decoding takes far longer than the product; all else is
decoded.
"""


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser(
        "run", help="generate text with a packed model", description=run.__doc__, epilog=WEIGHTS_HELP, **style
    )
    parser.set_defaults(command=run)
    parser.add_argument("folder", type=Path, help="what pack wrote")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--dram", help="hard limit for weights and buffers, such as 500MB (default: none)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--device-memory", help="hard limit for a GPU's memory, such as 8GB (default: most of it)")
    parser.add_argument("--format", help="one of those that were packed (default: endor, else the first by name)")
    parser.add_argument("--weights", choices=["decoded", "packed"], help="see below (default: decoded; spqr: packed)")
    parser.add_argument("--policy", default="pipelined", choices=[*early_checks.POLICIES], help="default: pipelined")
    readers = "default: threads, or aio for neurons; kvikio reads straight into a GPU"
    parser.add_argument("--reader", choices=early_checks.READERS, help=readers)
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="trust the files' checksums unread")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: 0)")


def run(options: argparse.Namespace) -> None:
    """Generate text with a packed model, printed as it comes."""
    budgets = _check_numbers(options)
    _check_prompt(options.prompt)
    if (options.folder / "config.json").is_file() and not (options.folder / "index.json").is_file():
        return _run_checkpoint(options)
    form = early_checks.format_to_run(options.folder, options.format)
    if form != BUNDLED and options.device == "cpu" and budgets["dram_bytes"] is not None:
        early_checks.check_dram(options.folder, form, options.policy, budgets["dram_bytes"])
    return _run_packed(options, form, budgets)


def _check_numbers(options: argparse.Namespace) -> dict[str, int | None]:
    """Check the options that are numbers; return the budgets."""
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}: expected a whole number from 1")
    if not 0 <= options.seed < SEEDS:
        raise UserError(f"--seed {options.seed}: expected a whole number from 0 to {SEEDS - 1}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise UserError(f"unknown device {options.device!r}; expected cpu, cuda, or one of several GPUs as cuda:1")
    budgets = {"dram_bytes": ("--dram", options.dram), "device_bytes": ("--device-memory", options.device_memory)}
    return {name: _bytes(*given) for name, given in budgets.items()}


def _bytes(option: str, text: str | None) -> int | None:
    """A number of bytes such as 500MB or 1.5GiB. Raises `UserError` for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|)", text)
    if found is None:
        raise UserError(f"{option} {text}: expected a size such as 500MB or 1.5GiB")
    return round(float(found[1]) * UNITS[found[2]])


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise UserError("--prompt is empty: give the model at least a word to go on from")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: its character {error.start + 1} is a broken byte") from error


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


def _method(form: str, weights: str | None, device: str) -> str:
    """The name that `toolkit.policies.methods` has for it. Raises `UserError` for a format without a product."""
    from toolkit.formats import READABLE
    from toolkit.policies.methods import PACKED

    if weights is None:
        weights = "packed" if form in READABLE and READABLE[form].multiplied_packed and device == "cpu" else "decoded"
    if weights == "decoded" or form == "dense":
        return form
    with_product = [name for name, known in READABLE.items() if known.has_matvec and not known.is_dense]
    if form not in with_product:
        raise UserError(
            f"--weights packed: {form} has no product of its own, only {', '.join(with_product)}; leave --weights out"
        )
    return f"{form}{PACKED}"


def _run_packed(options: argparse.Namespace, form: str, budgets: dict[str, int | None]) -> None:
    """A folder that `pack` wrote: layers in one of its formats, or neurons that are read when a token needs them."""
    by_neuron = form == BUNDLED
    if by_neuron:
        _check_neurons(options)
    with ExitStack() as stack:
        with _collector_paused():
            from toolkit.models import hub

            stack.enter_context(hub.lean())  # before anything imports transformers' models
            from toolkit.offload.model import OffloadedModel

            settings = {name: getattr(options, name) for name in ("policy", "verify", "device", "reader")}
            method = None if by_neuron else _method(form, options.weights, options.device)
            opened = OffloadedModel.open(options.folder, method, **budgets, **settings)
            model = stack.enter_context(opened)
            tokenizer = model.tokenizer
        begun_s = model.recorder.now_s()
        count = _generate(options, model, tokenizer, model.model.config)
        _tell(model, count, begun_s, _held_neurons(model) if by_neuron else _held_layers(model))


def _check_neurons(options: argparse.Namespace) -> None:
    """Refuse options that a folder of neurons does not have."""
    given = {"--weights": options.weights, "--device-memory": options.device_memory}
    given |= {"--device": options.device != "cpu", "--reader kvikio": options.reader == "kvikio"}
    given |= {"--policy": options.policy != "pipelined"}
    for name in [name for name, value in given.items() if value]:
        raise UserError(f"{name}: {options.folder} holds neurons, which the CPU reads and uses; leave {name} out")


def _run_checkpoint(options: argparse.Namespace) -> None:
    """A checkpoint of another tool, dense in memory."""
    given = {"--format": options.format, "--dram": options.dram, "--device-memory": options.device_memory}
    given |= {"--weights packed": options.weights == "packed", "--device": options.device != "cpu"}
    for name in [name for name, value in given.items() if value]:
        raise UserError(
            f"{name}: {options.folder} is a checkpoint, which is loaded whole on the CPU; pack endor for it"
        )
    from toolkit.interchange.reading import load_dense_model, load_tokenizer

    model, tokenizer = load_dense_model(options.folder), load_tokenizer(options.folder)
    _generate(options, model, tokenizer, model.config)


def _generate(options: argparse.Namespace, model, tokenizer, config) -> int:
    """Print the prompt and the text that follows it; return how many tokens were made."""
    from transformers import TextStreamer, set_seed

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
    set_seed(options.seed)
    tokens = model.generate(
        **prompt,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.sample,
        streamer=TextStreamer(tokenizer),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    if (made := tokens.shape[1] - given) < options.max_new_tokens:
        print(f"\nthe model ended its text after {made} of {options.max_new_tokens} tokens", file=sys.stderr)
    return made


def _tell(model, tokens: int, begun_s: float, held: str) -> None:
    """What was generated, how fast, and where the time went."""
    ended_s = model.recorder.now_s()
    seconds = ended_s - begun_s
    print(f"\n{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second; {held}", file=sys.stderr)
    table = model.timeline.window(begun_s, ended_s).breakdown()
    moved = table["nbytes"].where(table["stage"].isin(["read", "copy"]), 0) / 1e6
    shown = table.assign(moved_mb=moved)[["stage", "seconds", "share_percent", "moved_mb"]]
    print(shown.to_string(index=False, float_format="{:.1f}".format), file=sys.stderr)
    print(
        "each instant counts once; `read` is the time that only the disk took, `other` is all but the linears",
        file=sys.stderr,
    )


def _held_layers(model) -> str:
    where, on_device = model.placement, model.device.tier == "device"
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    return (
        f"{where.device} layers on the device, " if on_device else ""
    ) + f"{where.dram} in DRAM, {where.storage} on disk ({model.mode} reads); {' and '.join(held)} held"


def _held_neurons(model) -> str:
    stores = [ffn.store for ffn in model.strategy.ffns]
    share = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
    held = model.budgets["dram"].used_bytes / 1e6
    return f"{share:.0%} of the neurons in DRAM ({model.mode} reads); {held:.1f} MB DRAM held"
