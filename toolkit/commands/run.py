"""`python -m toolkit run`: generate text with a packed model.

torch takes seconds to import, so the checks that do without it come first.
"""

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

from toolkit.commands.folder import Folder
from toolkit.commands.kv_type import add_kv_type
from toolkit.commands.opening import kind_in, kind_of, opened, place_of
from toolkit.commands.sampling import add_sampling_options, sampling_of
from toolkit.commands.text import generate_from_checkpoint, generate_timed, tell_peak
from toolkit.commands.texts import STANDARD_INPUT, read_prompts, room_of, standard_input, write_text, write_texts
from toolkit.errors import UserError, whole
from toolkit.memory_limits import bytes_of
from toolkit.offload.variant import GGUF
from toolkit.registry import Registry

WHOLE_LAYERS = ("--weights", "--reader kvikio", "--policy")  # options of layers that are streamed whole
READ_IN_PARTS = "holds {}, which the CPU reads and uses; leave it out"
ABSENT = {  # by kind of folder: options that it does not have, and why
    "checkpoint": (
        (
            "--draft",
            "--format",
            "--memory",
            "--dram",
            "--device-memory",
            "--weights packed",
            "--device",
            "--residency",
            "--neurons",
            "--kv-type",
        ),
        "is a checkpoint, which is loaded whole on the CPU; pack endor for it",
    ),
    GGUF: (
        ("--reader kvikio", "--device", "--device-memory", "--neurons"),
        "is a GGUF file, whose blocks the CPU reads and multiplies; leave it out",
    ),
    "bundled": (WHOLE_LAYERS, READ_IN_PARTS.format("neurons")),
    "experts": ((*WHOLE_LAYERS, "--device-memory", "--device", "--neurons"), READ_IN_PARTS.format("experts")),
}
WEIGHTS_HELP = """\
On a CPU, --weights packed is the default for formats with a product of their own (endor, spqr, dense). It multiplies
with the packed form where a single token is computed, which is the quick way: up to three times as fast where memory
limits. Its sums run in another order, so the last digits differ, and now and then another token is the likeliest.
--weights decoded makes each matrix dense before its product: the text is that of the packed model in memory.

--neurons predicted computes each token with the neurons that are predicted for it: the text is the same at every limit.
--neurons held computes with all neurons that memory holds then, also those that earlier tokens needed, as LLM in a
flash does: they may repair what a predictor misses, and the text depends on --dram and on what was generated before.

--draft FOLDER2 has that copy, or a smaller model of the same vocabulary, propose tokens, and the model of the folder
check several of them in one pass. The text is the full model's own. The draft has to fit whole into --dram, beside what
the model itself needs; what both have in common, such as embeddings and head, is held once. Either may be a GGUF file.
"""


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser(
        "run", help="generate text with a packed model", description=run.__doc__, epilog=WEIGHTS_HELP, **style
    )
    parser.set_defaults(command=run, default_of=parser.get_default)
    parser.add_argument("folder", type=Path, help="what pack wrote, a GGUF file, or the name of one that is downloaded")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="the text that the model goes on from; - reads it from standard input")
    several = "prompts of a file, or of standard input for -: one a line, or lines of JSON with a prompt each"
    given.add_argument("--prompts", metavar="FILE", help=several)
    parser.add_argument("--max-new-tokens", type=whole, default=40)
    memory = "hard limit for all that the process takes, such as 1GB: libraries, weights, buffers, key-value cache"
    parser.add_argument("--memory", help=memory)
    parser.add_argument("--dram", help="hard limit for weights and buffers alone, such as 500MB (default: none)")
    context = "tokens of prompt and text that --memory leaves room for (default: those of this call)"
    parser.add_argument("--context", type=whole, help=context)
    add_kv_type(parser)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--device-memory", help="hard limit for a GPU's memory, such as 8GB (default: most of it)")
    parser.add_argument("--format", help="one of those that were packed (default: endor, else the first by name)")
    parser.add_argument(
        "--weights", choices=["decoded", "packed"], help="see below (default: packed, if the format can)"
    )
    policies = {"choices": Registry("toolkit.offload.ways:POLICIES"), "metavar": "NAME"}
    how = "how reads and products follow each other: pipelined (default) or sequential"
    parser.add_argument("--policy", default="pipelined", help=how, **policies)
    parser.add_argument("--residency", metavar="NAME", help="which neurons or experts stay in memory: lru, lfu, ...")
    which = "of a folder of neurons: a token is computed with those predicted (default) or held; see below"
    parser.add_argument("--neurons", choices=Registry("toolkit.offload.variant:NEURONS"), metavar="NAME", help=which)
    readers = "aio (default), or threads where the system has none; kvikio reads straight into a GPU"
    parser.add_argument("--reader", choices=Registry("toolkit.storage.readers:READERS"), metavar="NAME", help=readers)
    parser.add_argument("--draft", type=Path, metavar="FOLDER2", help="a packed copy or a smaller model; see below")
    parser.add_argument("--draft-tokens", type=whole, help="drafted a pass (default: while a further one is worth it)")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="trust the files' checksums unread")
    add_sampling_options(parser)
    written = "an object for each prompt: text, tokens, seconds, tokens_per_second, mb_per_token, peak_mb"
    parser.add_argument("--json", action="store_true", help=written)


def run(options: argparse.Namespace) -> None:
    """Generate text with a packed model, printed as it comes."""
    _check_numbers(options)
    several = bool(options.prompts or options.json or options.stop)
    sampling_of(options)
    options.prompts = read_prompts(options.prompts) if options.prompts else [checked_prompt(options.prompt)]
    options.prompt = options.prompts[0]
    _check_draft(options)
    if options.context and not options.memory:
        raise UserError(f"--context {options.context}: --memory leaves room for so many; add it, or leave this out")
    options.folder = place_of(options.folder)
    kind = kind_of(options.folder, options.format)
    _check_kind(options, kind)
    if several and (kind == "checkpoint" or options.draft):
        why = "a checkpoint" if kind == "checkpoint" else "--draft"
        raise UserError(f"--prompts, --json, --stop: not with {why}, which writes one text; leave them out")
    print(f"opening {options.folder}", file=sys.stderr, flush=True)  # what is imported now takes seconds
    if kind == "checkpoint":
        generate_from_checkpoint(options)
        return
    if (kind_inside := kind_in(options.folder, kind)) != kind:
        _check_kind(options, kind := kind_inside)
    elif kind == GGUF and options.residency:
        raise UserError(f"--residency: {options.folder} holds no experts; leave it out")
    with opened(options, kind, lambda source: room_of(options, source, several), timed=not several) as model:
        write = write_texts if several else generate_timed if isinstance(model.source, Folder) else write_text
        write(options, model)
        tell_peak(model)


def _check_kind(options: argparse.Namespace, kind: str) -> None:
    """Raise `UserError` for an option that this kind of folder does not have."""
    given = {
        "--draft": options.draft,
        "--format": options.format,
        "--memory": options.memory,
        "--dram": options.dram,
        "--weights": options.weights,
        "--weights packed": options.weights == "packed",
        "--device-memory": options.device_memory,
        "--device": options.device != "cpu",
        "--reader": options.reader,
        "--reader kvikio": options.reader == "kvikio",
        "--policy": options.policy != "pipelined",
        "--residency": options.residency,
        "--neurons": options.neurons,
        "--kv-type": options.kv_type,
    }
    names, why = ABSENT.get(
        kind, (("--residency", "--neurons"), "holds whole layers, not neurons or experts; leave it out")
    )
    for name in names:
        if given[name]:
            raise UserError(f"{name}: {options.folder} {why}")


def _check_numbers(options: argparse.Namespace) -> None:
    """Check the options that are numbers."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise UserError(f"unknown device {options.device!r}; expected cpu, cuda, or one of several GPUs as cuda:1")
    for name in ("memory", "dram", "device_memory"):
        bytes_of(f"--{name.replace('_', '-')}", getattr(options, name))


def _check_draft(options: argparse.Namespace) -> None:
    if options.draft_tokens and options.draft is None:
        raise UserError(f"--draft-tokens {options.draft_tokens}: of --draft alone; add --draft, or leave it out")
    if options.draft is None:
        return
    options.draft = place_of(options.draft)
    if kind_of(options.draft) == "checkpoint":
        raise UserError(f"--draft {options.draft}: is a checkpoint; name a folder that `python -m toolkit pack` wrote")


def checked_prompt(prompt: str) -> str:
    """The prompt as UTF-8; "-" stands for all of standard input, less a newline at its end.

    So it may be longer than the 128 KiB of a command's argument. Raises `UserError` for an empty one, or one with
    broken bytes.
    """
    if prompt == STANDARD_INPUT:
        prompt = standard_input().decode("utf-8", "surrogateescape").removesuffix("\n")
    if not prompt:
        raise UserError("--prompt is empty: give the model at least a word to go on from")
    with contextlib.suppress(UnicodeError):  # without a locale, Python keeps each byte beyond ASCII as a letter
        prompt = os.fsencode(prompt).decode()
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: its character {error.start + 1} is a broken byte") from error
    return prompt
