"""`python -m toolkit run`: generate text with a packed model.

torch takes seconds to import, so the checks that do without it come first.
"""

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

from toolkit import downloads
from toolkit.commands.compare import compare
from toolkit.commands.text import generate_from_checkpoint, generate_timed, kind_of_file, opened
from toolkit.errors import UserError, whole
from toolkit.offload.variant import GGUF, variant_to_run

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SEEDS = 2**32
POLICIES = ("pipelined", "sequential")
READERS = ("threads", "aio", "kvikio")
NEURONS = ("predicted", "held")
NOT_COMPARED = (
    "--draft",
    "--memory",
    "--weights",
    "--policy",
    "--reader",
    "--device",
    "--device-memory",
    "--sample",
    "--neurons",
)
WHOLE_LAYERS = ("--compare", "--weights", "--reader kvikio", "--policy")  # options of layers that are streamed whole
READ_IN_PARTS = "holds {}, which the CPU reads and uses; leave it out"
ABSENT = {  # by kind of folder: options that it does not have, and why
    "checkpoint": (
        (
            "--compare",
            "--draft",
            "--format",
            "--memory",
            "--dram",
            "--device-memory",
            "--weights packed",
            "--device",
            "--residency",
            "--neurons",
        ),
        "is a checkpoint, which is loaded whole on the CPU; pack endor for it",
    ),
    GGUF: (
        ("--compare", "--reader kvikio", "--device", "--device-memory", "--neurons"),
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
    parser.set_defaults(command=run)
    parser.add_argument("folder", type=Path, help="what pack wrote, a GGUF file, or the name of one that is downloaded")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=whole, default=40)
    memory = "hard limit for all that the process takes, such as 1GB: libraries, weights, buffers, key-value cache"
    parser.add_argument("--memory", help=memory)
    parser.add_argument("--dram", help="hard limit for weights and buffers alone, such as 500MB (default: none)")
    context = "tokens of prompt and text that --memory leaves room for (default: those of this call)"
    parser.add_argument("--context", type=whole, help=context)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--device-memory", help="hard limit for a GPU's memory, such as 8GB (default: most of it)")
    parser.add_argument("--format", help="one of those that were packed (default: endor, else the first by name)")
    parser.add_argument(
        "--weights", choices=["decoded", "packed"], help="see below (default: packed, if the format can)"
    )
    parser.add_argument("--policy", default="pipelined", choices=POLICIES, help="default: pipelined")
    parser.add_argument("--residency", metavar="NAME", help="which neurons or experts stay in memory: lru, lfu, ...")
    which = "of a folder of neurons: those that a token is computed with; see below (default: predicted)"
    parser.add_argument("--neurons", choices=NEURONS, help=which)
    readers = "default: aio, or threads where the system has none; kvikio reads straight into a GPU"
    parser.add_argument("--reader", choices=READERS, help=readers)
    parser.add_argument("--draft", type=Path, metavar="FOLDER2", help="a packed copy or a smaller model; see below")
    parser.add_argument("--draft-tokens", type=whole, help="drafted a pass (default: while a further one is worth it)")
    parser.add_argument("--compare", action="store_true", help="a table of all ways, and llama.cpp, instead of text")
    gguf = "a GGUF file that llama.cpp runs in --compare (default: the one that was packed, if it was one)"
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=gguf)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table of --compare to this file, too")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="trust the files' checksums unread")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: 0)")


def run(options: argparse.Namespace) -> None:
    """Generate text with a packed model, printed as it comes."""
    budgets = _check_numbers(options)
    options.prompt = _checked_prompt(options.prompt)
    _check_draft(options)
    if options.gguf and not options.compare:
        raise UserError(f"--gguf {options.gguf}: a rival's file, of --compare alone; leave it out, or add --compare")
    if options.context and not options.memory:
        raise UserError(f"--context {options.context}: --memory leaves room for so many; add it, or leave this out")
    if options.csv and not options.compare:
        raise UserError(f"--csv {options.csv}: the table of --compare goes there; add --compare, or leave it out")
    options.folder = place_of(options.folder)
    kind = kind_of(options.folder, options.format)
    _check_kind(options, kind)
    print(f"opening {options.folder}", file=sys.stderr, flush=True)  # what is imported now takes seconds
    if kind == GGUF:
        _check_kind(options, kind := kind_of_file(options.folder))
    if kind == "checkpoint":
        generate_from_checkpoint(options)
    elif options.compare:
        compare(options, kind, budgets)
    else:
        with opened(options, kind, budgets, bytes_of("--memory", options.memory)) as (model, tokenizer, draft):
            generate_timed(options, model, tokenizer, kind, draft)


def kind_of(folder: Path, form: str | None = None) -> str:
    """The kind of a folder: "checkpoint", "bundled" (neurons), "experts", or the format of its layers; "gguf" of files.

    Raises `UserError` for a folder that nothing runs, or a format that it does not have.
    """
    if (folder / "config.json").is_file() and not (folder / "index.json").is_file():
        return "checkpoint"
    return variant_to_run(folder, form)


def place_of(place: Path) -> Path:
    """The GGUF file of a model that the toolkit knows by name, downloaded once; any other place as it is."""
    if place.exists() or str(place) not in downloads.of_kind(".gguf"):
        return place
    return downloads.fetch(str(place))


def _check_kind(options: argparse.Namespace, kind: str) -> None:
    """Raise `UserError` for an option that this kind of folder does not have."""
    given = {
        "--compare": options.compare,
        "--draft": options.draft,
        "--format": options.format,
        "--memory": options.memory,
        "--dram": options.dram,
        "--weights": options.weights,
        "--weights packed": options.weights == "packed",
        "--device-memory": options.device_memory,
        "--device": options.device != "cpu",
        "--sample": options.sample,
        "--reader": options.reader,
        "--reader kvikio": options.reader == "kvikio",
        "--policy": options.policy != "pipelined",
        "--residency": options.residency,
        "--neurons": options.neurons,
    }
    names, why = ABSENT.get(
        kind, (("--residency", "--neurons"), "holds whole layers, not neurons or experts; leave it out")
    )
    for name in names:
        if given[name]:
            raise UserError(f"{name}: {options.folder} {why}")
    for name in NOT_COMPARED if options.compare else ():
        if given[name]:
            raise UserError(f"{name}: --compare chooses it for each way, on the CPU; leave it out")


def _check_numbers(options: argparse.Namespace) -> dict[str, int | None]:
    """Check the options that are numbers; return the budgets."""
    if not 0 <= options.seed < SEEDS:
        raise UserError(f"--seed {options.seed}: expected a whole number from 0 to {SEEDS - 1}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise UserError(f"unknown device {options.device!r}; expected cpu, cuda, or one of several GPUs as cuda:1")
    bytes_of("--memory", options.memory)
    budgets = {"dram_bytes": ("--dram", options.dram), "device_bytes": ("--device-memory", options.device_memory)}
    return {name: bytes_of(*given) for name, given in budgets.items()}


def _check_draft(options: argparse.Namespace) -> None:
    if options.draft_tokens and options.draft is None:
        raise UserError(f"--draft-tokens {options.draft_tokens}: of --draft alone; add --draft, or leave it out")
    if options.draft is None:
        return
    options.draft = place_of(options.draft)
    if kind_of(options.draft) == "checkpoint":
        raise UserError(f"--draft {options.draft}: is a checkpoint; name a folder that `python -m toolkit pack` wrote")


def bytes_of(option: str, text: str | None) -> int | None:
    """A number of bytes such as 500MB or 1.5GiB. Raises `UserError` for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMG]i?B|)", text)
    if found is None:
        raise UserError(f"{option} {text:.99}: expected a size such as 500MB or 1.5GiB")
    return round(float(found[1]) * UNITS[found[2]])


def _checked_prompt(prompt: str) -> str:
    """The prompt as UTF-8. Raises `UserError` for an empty one, or one with broken bytes."""
    if not prompt:
        raise UserError("--prompt is empty: give the model at least a word to go on from")
    with contextlib.suppress(UnicodeError):  # without a locale, Python keeps each byte beyond ASCII as a letter
        prompt = os.fsencode(prompt).decode()
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: its character {error.start + 1} is a broken byte") from error
    return prompt
