"""`python -m toolkit pack`: prune or quantise a model and write it packed.

torch takes seconds to import, so the checks that do without it come first.
"""

import io
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path

from toolkit import memory_limits
from toolkit.commands.packers import (
    COMMON,
    FORMATS,
    HEADS,
    PACKERS,
    Option,
    choose,
    is_packed,
    open_source,
    option_owners,
    torch_dtype,
)
from toolkit.errors import Parser, UserError
from toolkit.files import new_folder

EVALUATED = {"sequence_length": 512, "windows": 4}  # a few seconds for a model of 135 M parameters
CHECK_BYTES, EVALUATION_BYTES = 300 << 20, 200 << 20  # for activations and buffers beside a packed folder
LOGIT_BYTES = 4  # of a logit: its own two, and those of copies of some
PASSING = 8 << 20  # blocks of memory of this size go back when they are freed; smaller ones come and go all the time
SOME = 100  # tokens, one of which makes a text that the tokenizer takes
DESCRIPTION = "Prune or quantise a model and write it packed."
DETAILS = """\
`--method spqr` has a format of its own: 3 bits a weight, the only width that its kernels have, and a share of outliers
in fp16, which lie as CSR or PTCSR, whichever multiplies a matrix faster on this machine.

`--method neurons` has a format of its own, too. A neuron is needed where its output exceeds a threshold; --sparsity
says which share of outputs does not. A model that has thresholds of its own keeps them. --sparsity 0 leaves a ReLU's
own zeros. --predictors says how a token's neurons are known before they are read.

`--method experts` is for mixtures of experts, such as the toolkit's smollm2-135m-moe-upcycled. --bits
quantises the routed experts alone, by HQQ. With --mixed 0.25 a quarter of each layer's experts, those that the
calibration text uses least, take 2 bits and the others --bits 4.

A folder that pack wrote is packed again from the weights that it decodes to: `--method dense --format huffman` changes
its format. `--method kept` copies its layers, whatever their format, and packs the head alone.

One decoder block is in memory at a time. If `pack` is interrupted or killed, the same command goes on behind the last
block that was written.
"""


def pack(
    model: str,
    out: Path,
    method: str = "wanda",
    *,
    head: str | None = None,
    sparsity: float | None = None,
    pattern: str | None = None,
    format: Sequence[str] | None = None,
    int8: bool | None = None,
    outliers: float | None = None,
    predictors: str | None = None,
    bits: int | None = None,
    mixed: float | None = None,
    dtype: str | None = None,
    corpus: str = "wiki-slice",
    windows: int = 16,
    sequence_length: int = 1024,
    memory: float | str | None = None,
    evaluate: bool = True,
) -> str:
    """Prune or quantise a model and write it packed; return a line on what was written.

    The parameters are the options of the command. None stands for the default of the method (`PACKERS`). Raises
    `UserError` for options that do not go together, and as `toolkit.pack` does.
    """
    options = Namespace(**locals())
    packer = choose(options)
    packer.check(options)
    _check_place(options.out)
    if options.head != HEADS[0]:
        _check_head(options.model)
    print(f"{options.model}: {packer.help}", file=sys.stderr)
    memory_limits.return_large_blocks(PASSING)
    begin = partial(_begin, options)
    from toolkit.storage.unfinished import removed

    with removed(options.out), _checked_folder(options.out) as place:
        written, tokenizer = packer.pack(Namespace(**vars(options) | {"out": place, "begin": begin}))
        summary = [*_sizes(place, written), *_compared(place, options, written, tokenizer)]
    del written
    print(f"{options.out}: written", file=sys.stderr)
    summary += _second_reading(options.model)
    if options.evaluate:
        summary.append(_quality(options, tokenizer))
    return f"{options.out}: " + "; ".join(summary)


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    methods = _listed("methods:", {name: packer.help for name, packer in PACKERS.items()})
    formats = _listed("formats, of which several can lie side by side; `run` takes each of them:", FORMATS)
    epilog = f"{methods}\n{formats}\n{DETAILS}"
    parser = commands.add_parser(
        "pack", help="prune or quantise a model and write it packed", description=DESCRIPTION, epilog=epilog, **style
    )
    parser.set_defaults(command=_run)
    models = "such as smollm2-135m, a GGUF file, a folder in Hugging Face's layout or of pack, or an id on the hub"
    parser.add_argument("model", help=models)
    parser.add_argument("--method", default="wanda", choices=PACKERS, metavar="NAME", help="see below (default: wanda)")
    group = parser.add_argument_group("options of some methods, with the defaults there")
    for name, owners in option_owners().items():
        option = next(iter(owners.values()))
        group.add_argument(f"--{name}", default=None, help=f"{option.help} ({_defaults(owners)})", **option.settings)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    corpora = "calibration text: wiki-slice (default), python-sources, wikitext-2, c4, or several joined by +"
    parser.add_argument("--corpus", default="wiki-slice", help=corpora)
    for option in COMMON:
        parser.add_argument(f"--{option.name}", default=option.default, help=option.help, **option.settings)
    parser.add_argument("--memory", metavar="SIZE", help="refuse to begin if packing takes more, such as 2GB")
    parser.add_argument(
        "--no-evaluate", dest="evaluate", action="store_false", help="do not measure perplexity before and after"
    )


def _run(options: Namespace) -> None:
    print(pack(**{name: value for name, value in vars(options).items() if name != "command"}))


def _begin(options: Namespace, model, layout):
    """Where the written blocks of a model on demand are until all are written; None for a model that is in memory.

    Raises `UserError` if memory or disk are too small.
    """
    from toolkit.commands.pack_memory import check_needs
    from toolkit.models.named import fingerprint
    from toolkit.models.on_demand import is_on_demand
    from toolkit.quantization.spqr import SpQR
    from toolkit.sparsity import METHODS
    from toolkit.storage.unfinished import Unfinished, folder_of

    if not is_on_demand(model):
        return None
    change = SpQR if options.method == "spqr" else METHODS.get(options.method)
    check_needs(options, model, layout, gram=getattr(change, "statistic", None) == "gram")
    left_out = ("out", "evaluate", "memory")
    recipe = {name: value for name, value in vars(options).items() if name not in left_out}
    recipe |= {"dtype": str(model.dtype), "source": fingerprint(options.model)}
    unfinished = Unfinished(folder_of(options.out), recipe)
    if unfinished.other:
        print(f"{options.out}: begun anew, since the blocks that were written have other options", file=sys.stderr)
    if unfinished.number:
        print(f"{options.out}: goes on behind {unfinished.number} written blocks", file=sys.stderr)
    return unfinished


@contextmanager
def _checked_folder(folder: Path) -> Iterator[Path]:
    """A path where a folder is made and checked; it becomes `folder` at the end of the block, or goes with an error."""
    with new_folder(folder, made=False) as place:
        try:
            yield place
        except UserError as error:
            raise UserError(str(error).replace(str(place), str(folder))) from error


def _defaults(owners: Mapping[str, Option]) -> str:
    """Which packers take an option, and its default there."""
    words: dict[str, list[str]] = {}
    for packer, option in owners.items():
        default = " ".join(option.default) if isinstance(option.default, list) else option.default
        words.setdefault(f": {default}" if default else "", []).append(packer)
    return "; ".join(", ".join(packers) + default for default, packers in words.items())


def _listed(title: str, lines: Mapping[str, str]) -> str:
    """Names and what they are, under a title, as help shows them."""
    width = max(map(len, lines)) + 2
    rows = (textwrap.wrap(text, 116 - width) for text in lines.values())
    indented = (f"\n{' ' * (width + 2)}".join(row) for row in rows)
    return f"{title}\n" + "".join(f"  {name:{width}}{text}\n" for name, text in zip(lines, indented, strict=True))


class _Undone(Exception):
    """Ends the making of a folder, so that nothing is made."""


def _check_place(folder: Path) -> None:
    """Raise the `UserError` that writing this folder would raise, before the work that leads up to it."""
    try:
        with suppress(_Undone), new_folder(folder):
            raise _Undone
    except UserError as error:
        raise UserError(f"--out {error}") from error
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}: name a new folder in a writable place") from error


def _check_head(model: str) -> None:
    """Raise the `UserError` that packing a model's head would raise, before the work that leads up to it."""
    from toolkit.models.loading import check_model, read_config
    from toolkit.models.skeleton import check_head_alone

    if is_packed(model):
        from toolkit.storage.store import Store

        check_head_alone(Store.open(model).config())
        return
    check_model(model)
    check_head_alone(read_config(model))


def _sizes(folder: Path, model) -> list[str]:
    """The bytes written, beside those of the dense weights of the same matrices."""
    from toolkit.storage.store import Store

    if not (folder / "index.json").is_file():
        packed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return [f"{packed / 1e6:.1f} MB in all; dense {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB"]
    store = Store.open(folder)
    rest = {run.name for run in store.index.rest}
    weights = [parameter for name, parameter in model.named_parameters() if name not in rest]
    dense, count = sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights)
    shown = [f"packed matrices dense {dense / 1e6:.1f} MB"]
    for variant in store.variants:
        packed = store.nbytes(variant)
        bits, on_disk = (8 * nbytes / count for nbytes in (store.tensor_bytes(variant), packed))
        sizes = f"{packed / dense:.1%}; {bits:.2f} bits a weight, {on_disk:.2f} on disk with padding"
        shown.append(f"{variant} {packed / 1e6:.1f} MB ({sizes})")
    source = store.index.model.get("source", {})
    coded = [f"the source had {bits} bits a weight"] if (bits := source.get("bits_a_weight", 16)) < 16 else []
    return [*shown, f"all the rest {store.rest_bytes / 1e6:.1f} MB", *coded]


def _compared(place: Path, options: Namespace, model, tokenizer) -> list[str]:
    """How far the logits of what was written are from the model's. `run` makes one token with it, too.

    Both keep `--memory`.

    Raises `UserError` if the logits are too far from the model's, or if `run` would refuse the folder.
    """
    from toolkit.models import decoder_blocks
    from toolkit.models.on_demand import is_on_demand
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.logit_check import check_logits, check_stored

    print(f"{options.out}: comparing its logits with the model's", file=sys.stderr)
    try:
        room = None
        if is_on_demand(model):
            room = _room(options, 2 * max(map(_nbytes, decoder_blocks(model))) + CHECK_BYTES)
        error = check_logits(place, model) if room is None else check_stored(place, room)
        _run_once(place, options, tokenizer, model.config.get_text_config().vocab_size)
    except BudgetError as trouble:
        return [f"logits not compared: {trouble}"]
    return [f"logits within {error:.1g} of their standard deviation"]


def _second_reading(name: str) -> list[str]:
    """Whether another reader of a user's GGUF file finds the same model in it; nothing for a model of another kind."""
    from toolkit import hub
    from toolkit.models.named import MODELS, gguf_file

    if name in MODELS or (file := gguf_file(name)) is None:
        return []
    from toolkit.models.gguf_second_reading import kept_comparison

    print(f"{name}: comparing the file with another reading of it", file=sys.stderr)
    with hub.quiet():
        return [kept_comparison(file)]


def _nbytes(module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def _room(options: Namespace, nbytes: int) -> int:
    """The memory that `--memory` and the machine leave but for some bytes."""
    memory_limits.trim()
    left = memory_limits.free_bytes()
    if (limit := memory_limits.bytes_of("--memory", options.memory)) is not None:
        left = min(left, limit - memory_limits.anonymous_bytes())
    return max(left - nbytes, 0)


def _run_once(folder: Path, given: Namespace, tokenizer, words: int) -> None:
    """Make one token as `run` does, and print nothing. Raises the `UserError` that `run` would raise.

    Nothing runs if none of the tokenizer's first texts has only tokens of the model, which has ids below `words`.
    """
    from toolkit.commands.run import add_parser  # which itself takes names from here

    parser = Parser()
    add_parser(parser.add_subparsers())
    prompt = _known_text(tokenizer, words)
    if prompt is None:
        return
    options = parser.parse_args(["run", str(folder), f"--prompt={prompt}", "--max-new-tokens=1", "--no-verify"])
    if (folder / "index.json").is_file() and _room(given, 0) < memory_limits.free_bytes():
        options.memory = given.memory  # else less than it is free, and `run` keeps to that
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        options.command(options)


def _known_text(tokenizer, words: int) -> str | None:
    """A text of ids below `words`; None without one among the first. Raises `UserError` if the tokenizer fails on all.

    One that has no token for unknown words fails on some.
    """
    from toolkit import hub

    failure = None
    for number in range(-1, SOME):
        try:
            with hub.foreign_code("the model's tokenizer fails"):
                text = "a" if number < 0 else tokenizer.decode([number])
                ids = tokenizer(text)["input_ids"]
        except UserError as error:
            failure = error
            continue
        if ids and max(ids) < words:
            return text
    if failure:
        raise failure
    return None


def _quality(options: Namespace, tokenizer) -> str:
    """Perplexity of the model as it was, and of what was written as `run` opens it."""
    from toolkit.models import fast_dtype
    from toolkit.models.cutting import thresholds_of
    from toolkit.models.streams import run_in_step
    from toolkit.quality import load_tokens
    from toolkit.sparsity.calibration import AND

    corpus = options.corpus.split(AND)[0]
    print(f"{options.out}: evaluating (--no-evaluate leaves this out)", file=sys.stderr)
    try:
        tokens = load_tokens(corpus, tokenizer, "evaluation")
        after = _packed_perplexity(options, tokens)
        model = open_source(options.model, torch_dtype(options.dtype) or fast_dtype())[0]
        before = brief_perplexity(model, tokens, run=partial(run_in_step, model, title="evaluating the model"))
        kind = "dense" if thresholds_of(model) is None else "with its thresholds"
        kind = "as it was" if is_packed(options.model) else kind
    except UserError as error:
        return f"not evaluated: {error}"
    except KeyboardInterrupt as error:
        raise type(error)(f"stopped; {options.out} is complete, but was not evaluated") from error
    text = f"{corpus}, {after.windows} windows of {after.sequence_length} tokens"
    return f"perplexity {before:.1f} {kind}, {after:.1f} packed ({text})"


def _packed_perplexity(options: Namespace, tokens):
    if not (options.out / "index.json").is_file():
        from toolkit.interchange import load_dense_model

        return brief_perplexity(load_dense_model(options.out), tokens)
    from toolkit.offload.model import OffloadedModel
    from toolkit.storage.store import Store

    form = options.format[0] if options.format else None
    store = Store.open(options.out)
    logits = EVALUATED["sequence_length"] * store.config().get_text_config().vocab_size * LOGIT_BYTES
    with OffloadedModel.open(
        options.out, form, verify=False, dram_bytes=_room(options, logits + EVALUATION_BYTES)
    ) as model:
        return brief_perplexity(model.model, tokens)


def brief_perplexity(model, tokens, **settings):
    """Perplexity over few windows, no longer than the model's positions."""
    from toolkit.quality import perplexity

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    sequence_length = min(EVALUATED["sequence_length"], positions or EVALUATED["sequence_length"])
    return perplexity(model, tokens, sequence_length, EVALUATED["windows"], **settings)
