"""`python -m toolkit pack`: prune or quantise a model and write it packed.

torch takes seconds to import, so the checks that do without it come first.
"""

import io
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from toolkit.commands.packers import FORMATS, HEADS, PACKERS, WRITTEN, Option, choose, option_owners, torch_dtype
from toolkit.errors import Parser, UserError, whole
from toolkit.files import new_folder

EVALUATED = {"sequence_length": 512, "windows": 4}  # a few seconds for a model of 135 M parameters
SOME = 100  # tokens, one of which makes a text that the tokenizer takes
DTYPES = ("float32", "float16", "bfloat16")
DETAILS = """\
`--method spqr` has a format of its own: 3 bits a weight, the only width that its kernels have, and a share of outliers
in fp16, which lie as CSR or PTCSR, whichever multiplies a matrix faster on this machine. If it is interrupted, the same
command goes on at the decoder block that it was at.

`--method neurons` has a format of its own, too. A neuron is needed where its output exceeds a threshold; --sparsity
says which share of outputs does not. A model that has thresholds of its own keeps them. --sparsity 0 leaves a ReLU's
own zeros. --predictors says how a token's neurons are known before they are read.

`--method experts` is for mixtures of experts, such as the toolkit's smollm2-135m-moe-upcycled. --bits
quantises the routed experts alone, by HQQ. With --mixed 0.25 a quarter of each layer's experts, those that the
calibration text uses least, take 2 bits and the others --bits 4.
"""


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    methods = _listed("methods:", {name: packer.help for name, packer in PACKERS.items()})
    formats = _listed("formats, of which several can lie side by side; `run` takes each of them:", FORMATS)
    epilog = f"{methods}\n{formats}\n{DETAILS}"
    parser = commands.add_parser(
        "pack", help="prune or quantise a model and write it packed", description=pack.__doc__, epilog=epilog, **style
    )
    parser.set_defaults(command=pack)
    models = "such as smollm2-135m, a GGUF file, a folder in Hugging Face's layout, or an id on the hub"
    parser.add_argument("model", help=models)
    parser.add_argument("--method", default="wanda", choices=PACKERS, metavar="NAME", help="see below (default: wanda)")
    group = parser.add_argument_group("options of some methods, with the defaults there")
    for name, owners in option_owners().items():
        option = next(iter(owners.values()))
        group.add_argument(f"--{name}", default=None, help=f"{option.help} ({_defaults(owners)})", **option.settings)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, help=f"default: {WRITTEN}")
    corpora = "calibration text: wiki-slice (default), python-sources, wikitext-2 or c4"
    parser.add_argument("--corpus", default="wiki-slice", help=corpora)
    parser.add_argument("--windows", type=whole, default=16, help="calibration windows (default: 16; the papers: 128)")
    parser.add_argument("--sequence-length", type=whole, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument(
        "--no-evaluate", dest="evaluate", action="store_false", help="do not measure perplexity before and after"
    )


def pack(options: Namespace) -> None:
    """Prune or quantise a model and write it packed."""
    packer = choose(options)
    packer.check(options)
    _check_place(options.out)
    if options.head != HEADS[0]:
        _check_head(options.model)
    print(f"{options.model}: {packer.help}", file=sys.stderr)
    with _checked_folder(options.out) as place:
        model, tokenizer = packer.pack(Namespace(**vars(options) | {"out": place}))
        summary = [*_sizes(place, model), *_compared(place, options.out, model, tokenizer)]
    del model
    print(f"{options.out}: written", file=sys.stderr)
    summary += _second_reading(options.model)
    if options.evaluate:
        summary.append(_quality(options, tokenizer))
    print(f"{options.out}: " + "; ".join(summary))


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
    return [*shown, f"all the rest {store.rest_bytes / 1e6:.1f} MB"]


def _compared(place: Path, folder: Path, model, tokenizer) -> list[str]:
    """How far the logits of what was written are from the model's. `run` makes one token with it, too.

    Raises `UserError` if the logits are too far from the model's, or if `run` would refuse the folder.
    """
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.logit_check import check_logits

    print(f"{folder}: comparing its logits with the model's", file=sys.stderr)
    try:
        error = check_logits(place, model)
        _run_once(place, tokenizer, model.config.get_text_config().vocab_size)
    except BudgetError as trouble:
        return [f"logits not compared: {trouble}"]
    return [f"logits within {error:.1g} of their standard deviation"]


def _second_reading(name: str) -> list[str]:
    """Whether another reader of a user's GGUF file finds the same model in it; nothing for a model of another kind."""
    from toolkit import hub
    from toolkit.models.loading import MODELS, gguf_file

    if name in MODELS or (file := gguf_file(name)) is None:
        return []
    from toolkit.models.gguf_second_reading import kept_comparison

    print(f"{name}: comparing the file with another reading of it", file=sys.stderr)
    with hub.quiet():
        return [kept_comparison(file)]


def _run_once(folder: Path, tokenizer, words: int) -> None:
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
    from toolkit.models import fast_dtype, load_model
    from toolkit.models.cutting import thresholds_of
    from toolkit.quality import load_tokens

    print(f"{options.out}: evaluating (--no-evaluate leaves this out)", file=sys.stderr)
    try:
        tokens = load_tokens(options.corpus, tokenizer, "evaluation")
        after = _packed_perplexity(options, tokens)
        model = load_model(options.model, torch_dtype(options.dtype) or fast_dtype())[0]
        before, kind = (
            brief_perplexity(model, tokens),
            "dense" if thresholds_of(model) is None else "with its thresholds",
        )
    except UserError as error:
        return f"not evaluated: {error}"
    except KeyboardInterrupt as error:
        raise type(error)(f"stopped; {options.out} is complete, but was not evaluated") from error
    text = f"{options.corpus}, {after.windows} windows of {after.sequence_length} tokens"
    return f"perplexity {before:.1f} {kind}, {after:.1f} packed ({text})"


def _packed_perplexity(options: Namespace, tokens):
    if not (options.out / "index.json").is_file():
        from toolkit.interchange import load_dense_model

        return brief_perplexity(load_dense_model(options.out), tokens)
    from toolkit.offload.model import OffloadedModel

    form = options.format[0] if options.format else None
    with OffloadedModel.open(options.out, form, verify=False) as model:
        return brief_perplexity(model.model, tokens)


def brief_perplexity(model, tokens):
    """Perplexity over few windows, no longer than the model's positions."""
    from toolkit.quality import perplexity

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    sequence_length = min(EVALUATED["sequence_length"], positions or EVALUATED["sequence_length"])
    return perplexity(model, tokens, sequence_length, EVALUATED["windows"])
