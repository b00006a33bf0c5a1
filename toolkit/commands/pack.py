"""`python -m toolkit pack`: prune or quantise a model and write it packed.

torch takes seconds to import, so the checks that do without it come first.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolkit.errors import UserError, unknown
from toolkit.files import new_folder
from toolkit.sparsity import resolve

SPARSE_BITMASK = "sparse-bitmask"  # compressed-tensors' layout: a checkpoint of other tools, which `run` loads whole
EVALUATED = {"sequence_length": 512, "windows": 4}  # a few seconds for a model of 135 M parameters
SPQR = "spqr"  # the method that quantises
NEURONS = "neurons"  # the method that keeps all weights and stores FFNs by neuron; the other methods prune
PRUNES = {"sparsity": 0.5, "pattern": None, "format": ("endor",), "int8": False}  # options of those, and their defaults
QUANTISES = {"bits": 3, "outliers": 0.01}  # options of SpQR, and their defaults
BY_NEURON = {"sparsity": 0.8, "predictors": "few_bits"}  # options of the method neurons, and their defaults
DTYPES = ("float32", "float16", "bfloat16")
WRITTEN = "bfloat16"  # the type of packed weights, unless asked for: bytes count, whatever is quickest to prune in
FORMATS_HELP = """\
formats of `pack --format`, of which several can lie side by side; `run` takes each of them:
  endor           non-zeros and a bitmap (default); the only one of these that is also multiplied packed
  csr             non-zeros with their column numbers
  two_four        two non-zeros of four, for --pattern 2:4
  zstd, lz4       the dense bytes, compressed
  dense           the dense bytes, to compare with
  sparse-bitmask  a checkpoint of its own, in the layout of compressed-tensors 0.9 to 0.14. Read by those versions with
                  transformers 4, and by `toolkit.interchange.load_dense_model` and `run` here. transformers 5 does not
                  read it. `run` loads it whole, without a memory budget.

`pack --method spqr` quantises and has a format of its own: 3 bits a weight and a share of outliers in fp16, which lie
as CSR or PTCSR, whichever multiplies a matrix faster on this machine. If it is interrupted, the same command goes on
at the decoder block that it was at.

`pack --method neurons` keeps all weights. It stores each FFN by neuron, for `run` to read those that a token needs. A
neuron is needed where its output exceeds a threshold; --sparsity says which share of outputs does not (default: 0.8). A
model that has thresholds of its own keeps them. --sparsity 0 leaves a ReLU's own zeros. --predictors says how a token's
neurons are told before they are read.
"""


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser(
        "pack",
        help="prune or quantise a model and write it packed",
        description=pack.__doc__,
        epilog=FORMATS_HELP,
        **style,
    )
    parser.set_defaults(command=pack)
    parser.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    parser.add_argument(
        "--method",
        default="wanda",
        help="how to prune: dense (not at all), magnitude, wanda (default) or sparsegpt; or spqr, which quantises; or "
        "neurons, which stores FFNs by neuron",
    )
    parser.add_argument("--sparsity", type=float, help="share of zeros (default: 0.5; neurons: 0.8)")
    parser.add_argument("--pattern", help="N:M instead, such as 2:4")
    parser.add_argument("--format", nargs="+", help="one or several; see below (default: endor)")
    parser.add_argument("--bits", type=int, help="of spqr's weights: 3")
    parser.add_argument("--outliers", type=float, help="of spqr: share of weights kept in fp16 (default: 0.01)")
    parser.add_argument("--predictors", help="of neurons: few_bits (default; a copy in 4 bits), low_rank, gate or none")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--dtype", help=f"float32, float16 or bfloat16 (default: {WRITTEN})")
    parser.add_argument(
        "--int8", action="store_true", default=None, help="decoder weights in int8, smoothed by SmoothQuant first"
    )
    parser.add_argument("--corpus", default="wiki-slice", help="calibration text (default: wiki-slice)")
    parser.add_argument("--windows", type=int, default=16, help="calibration windows (default: 16; the papers: 128)")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument(
        "--no-evaluate", dest="evaluate", action="store_false", help="do not measure perplexity before and after"
    )


def pack(options: argparse.Namespace) -> None:
    """Prune or quantise a model and write it packed."""
    _check_method(options)
    _check_contradictions(options)
    _check_pruning(options)
    _check_place(options.out)
    dtype = options.dtype and _dtype(options.dtype)
    if options.method == SPQR:
        model, tokenizer = _write_quantised(options, dtype)
    elif options.method == NEURONS:
        model, tokenizer = _write_neurons(options, dtype)
    else:
        _check_formats(options)
        print(f"{options.model}: pruning by {options.method} (kept, if it was done before)", file=sys.stderr)
        model, tokenizer = _pruned(options, dtype)
        _write(options, model.to(dtype or _dtype(WRITTEN)), tokenizer)
    told = _sizes(options.out, model)
    del model
    if options.evaluate:
        told.append(_quality(options, dtype, tokenizer))
    print(f"{options.out}: " + "; ".join(told))


def _check_method(options: argparse.Namespace) -> None:
    """Refuse options of another method than the one that is asked for, and fill in the defaults."""
    own = {SPQR: QUANTISES, NEURONS: BY_NEURON}.get(options.method, PRUNES)
    for name in (PRUNES | QUANTISES | BY_NEURON).keys() - own.keys():
        if (given := getattr(options, name)) is not None:
            value = "" if given is True else f" {' '.join(given) if isinstance(given, list) else given}"
            reason = {SPQR: "quantises", NEURONS: "keeps all weights"}.get(options.method, "does not quantise")
            reason = "stores no neurons" if name == "predictors" else reason
            raise UserError(f"--{name}{value}: --method {options.method} {reason}; leave --{name} out")
    for name, value in (PRUNES | QUANTISES | BY_NEURON | own).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.bits != QUANTISES["bits"]:
        raise UserError(f"--bits {options.bits}: SpQR's format has {QUANTISES['bits']} bits a weight; leave --bits out")
    if not 0 <= options.outliers <= 1:
        raise UserError(f"--outliers {options.outliers}: expected a share of the weights from 0 to 1, such as 0.01")


def _check_contradictions(options: argparse.Namespace) -> None:
    if SPARSE_BITMASK in options.format and len(options.format) > 1:
        raise UserError(f"--format {SPARSE_BITMASK} makes a folder of its own: pack the other formats into another one")
    if options.int8 and SPARSE_BITMASK in options.format:
        raise UserError(f"--int8: {SPARSE_BITMASK} has no place for scales; pack endor, zstd or dense instead")


def _check_pruning(options: argparse.Namespace) -> None:
    """Check how to prune, before torch is imported."""
    resolve(options.sparsity, options.pattern)
    for option, value in {"--windows": options.windows, "--sequence-length": options.sequence_length}.items():
        if value < 1:
            raise UserError(f"{option} {value}: expected a whole number from 1")
    if options.dtype not in (None, *DTYPES):
        raise unknown("dtype", options.dtype, DTYPES)


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


def _check_formats(options: argparse.Namespace) -> None:
    """Pack a small matrix as the model will be, so that a format that cannot hold it is refused before the work."""
    import torch

    from toolkit.formats import FORMATS, QUANTISED
    from toolkit.pruning import METHODS

    if options.method not in (methods := ["dense", *METHODS, SPQR, NEURONS]):
        raise unknown("method", options.method, methods)
    for name in options.format:
        if name in QUANTISED:
            raise UserError(f"--format {name}: its weights are quantised; use --method {SPQR} without --format")
        if name not in (choices := [*FORMATS, SPARSE_BITMASK]):
            raise unknown("format", name, choices)
    if options.method == "dense" or SPARSE_BITMASK in options.format:
        return
    sparsity, pattern = resolve(options.sparsity, options.pattern)
    weight = METHODS["magnitude"](torch.rand(64, 64) + 1, None, sparsity, pattern)
    for name in options.format:
        try:
            _encoder(options, name)(weight)
        except UserError as error:
            hint = "; add --pattern 2:4" if options.pattern is None else ""
            raise UserError(f"--format {name} cannot hold weights pruned like this: {error}{hint}") from error


def _encoder(options: argparse.Namespace, name: str) -> Callable:
    from functools import partial

    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled

    return partial(Scaled.encode if options.int8 else encode, name)


def _pruned(options: argparse.Namespace, dtype) -> tuple:
    """The model as it will be packed, and its tokenizer."""
    from toolkit.pruning import Calibration, load_pruned
    from toolkit.quantization.smoothed import load_smoothed

    calibration = Calibration(options.corpus, options.windows, options.sequence_length)
    load = load_smoothed if options.int8 else load_pruned
    settings = {"sparsity": options.sparsity, "pattern": options.pattern, "calibration": calibration, "dtype": dtype}
    model, tokenizer, *_ = load(options.model, options.method, **settings)
    return model, tokenizer


def _write(options: argparse.Namespace, model, tokenizer) -> None:
    from toolkit.interchange import save_model
    from toolkit.storage.packing import pack_model

    if [*options.format] == [SPARSE_BITMASK]:
        return save_model(model, options.out, tokenizer)
    made = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
    variants = {name: _encoder(options, name) for name in options.format}
    return pack_model(model, options.out, variants, options.model, tokenizer, made)


def _write_quantised(options: argparse.Namespace, dtype) -> tuple:
    """Quantise the model and write it; return it as it was written, and its tokenizer."""
    from toolkit.formats.spqr import fastest
    from toolkit.pruning import Calibration
    from toolkit.quantization.quantised import load_quantised
    from toolkit.quantization.spqr import SpQR
    from toolkit.storage.packing import pack_quantised

    print(f"{options.model}: quantising by SpQR (kept, block by block)", file=sys.stderr)
    calibration = Calibration(options.corpus, options.windows, options.sequence_length)
    found = load_quantised(options.model, SpQR(options.outliers), calibration, dtype)
    found.model.to(dtype or _dtype(WRITTEN))
    made = {name: getattr(options, name) for name in ("method", *QUANTISES)}
    pack_quantised(found, options.out, SPQR, fastest, options.model, made)
    return found.model, found.tokenizer


def _write_neurons(options: argparse.Namespace, dtype) -> tuple:
    """Store the model's FFNs by neuron; return the model, and its tokenizer."""
    from toolkit.offload.neuron_folder import make_folder
    from toolkit.pruning import Calibration

    print(f"{options.model}: fitting thresholds and predictors", file=sys.stderr)
    calibration = Calibration(options.corpus, options.windows, options.sequence_length)
    return make_folder(options.model, options.out, options.sparsity, options.predictors, calibration, dtype)


def _sizes(folder: Path, model) -> list[str]:
    """What was written, beside the dense weights of the same matrices."""
    from toolkit.storage.store import Store

    if not (folder / "index.json").is_file():
        packed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return [f"{packed / 1e6:.1f} MB in all; dense {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB"]
    store = Store.open(folder)
    rest = {run.name for run in store.index.rest}
    weights = [parameter for name, parameter in model.named_parameters() if name not in rest]
    dense, count = sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights)
    found = [f"packed matrices dense {dense / 1e6:.1f} MB"]
    for variant in store.variants:
        packed = store.nbytes(variant)
        bits, on_disk = (8 * nbytes / count for nbytes in (store.tensor_bytes(variant), packed))
        sizes = f"{packed / dense:.1%}; {bits:.2f} bits a weight, {on_disk:.2f} on disk with padding"
        found.append(f"{variant} {packed / 1e6:.1f} MB ({sizes})")
    return [*found, f"all the rest {store.rest_bytes / 1e6:.1f} MB"]


def _quality(options: argparse.Namespace, dtype, tokenizer) -> str:
    """Perplexity of the model as it was, and of what was written as `run` opens it."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.models.cutting import thresholds_of
    from toolkit.text import load_tokens

    print(f"{options.out}: written; evaluating (--no-evaluate leaves this out)", file=sys.stderr)
    try:
        tokens = load_tokens(options.corpus, tokenizer, "evaluation")
        after = _packed_perplexity(options, tokens)
        model = load_model(options.model, dtype or fast_dtype())[0]
        before, kind = _perplexity(model, tokens), "dense" if thresholds_of(model) is None else "with its thresholds"
    except UserError as error:
        return f"not evaluated: {error}"
    text = f"{options.corpus}, {after.windows} windows of {after.sequence_length} tokens"
    return f"perplexity {before:.1f} {kind}, {after:.1f} packed ({text})"


def _packed_perplexity(options: argparse.Namespace, tokens):
    if [*options.format] == [SPARSE_BITMASK]:
        from toolkit.interchange import load_dense_model

        return _perplexity(load_dense_model(options.out), tokens)
    from toolkit.offload.model import OffloadedModel
    from toolkit.offload.neuron_model import NeuronModel

    if options.method == NEURONS:
        with NeuronModel.open(options.out, verify=False) as model:
            return _perplexity(model.model, tokens)
    form = SPQR if options.method == SPQR else options.format[0]
    with OffloadedModel.open(options.out, form, verify=False) as model:
        return _perplexity(model.model, tokens)


def _perplexity(model, tokens):
    from toolkit.evaluation import perplexity

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    sequence_length = min(EVALUATED["sequence_length"], positions or EVALUATED["sequence_length"])
    return perplexity(model, tokens, sequence_length, EVALUATED["windows"])


def _dtype(name: str):
    import torch

    return getattr(torch, name)
