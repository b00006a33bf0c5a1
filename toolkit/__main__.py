"""The command line without notebooks: `python -m toolkit pack` and `python -m toolkit run`."""

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from toolkit.errors import UserError, run_command

SPARSE_BITMASK = "sparse-bitmask"  # compressed-tensors' layout: a checkpoint of other tools, which `run` loads whole
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
EVALUATED = {"sequence_length": 512, "windows": 4}  # a few seconds for a model of 135 M parameters
SEEDS = 2**32
SPQR = "spqr"  # the method that quantises
NEURONS = "neurons"  # the method that keeps all weights and stores FFNs by neuron; the other methods prune
PRUNES = {"sparsity": 0.5, "pattern": None, "format": ("endor",), "int8": False}  # options of those, and their defaults
QUANTISES = {"bits": 3, "outliers": 0.01}  # options of SpQR, and their defaults
BY_NEURON = {"sparsity": 0.8, "predictors": "few_bits"}  # options of the method neurons, and their defaults
BUNDLED = "bundled"  # the variant that this method writes
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
WEIGHTS_HELP = """\
--weights decoded makes each matrix dense before its product: the text is that of the packed model in memory.
--weights packed multiplies with the packed form where a single token is computed, which is quicker where memory limits.
Its sums run in another order, so the last digits differ, and now and then another token is the likeliest.
Without the option, spqr is multiplied packed on a CPU, since decoding takes far longer than the product; all else is
decoded.
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 if all is well, 2 for bad input, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream of somebody else's
            stream.reconfigure(errors="backslashreplace")  # paths and texts may hold what the terminal cannot show
    options = _parser().parse_args(arguments)
    kept = "; the same command goes on where it was" if getattr(options, "method", None) == SPQR else ""
    return run_command(lambda: options.command(options), stopped=f"stopped; nothing was left behind{kept}")


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


def run(options: argparse.Namespace) -> None:
    """Generate text with a packed model, printed as it comes."""
    budgets = _check_numbers(options)
    _check_prompt(options.prompt)
    if (options.folder / "config.json").is_file() and not (options.folder / "index.json").is_file():
        return _run_checkpoint(options)
    from toolkit.offload import glance

    form = glance.format_to_run(options.folder, options.format)
    if form == BUNDLED:
        return _run_neurons(options, budgets["dram_bytes"])
    if options.device == "cpu" and budgets["dram_bytes"] is not None:
        glance.check_dram(options.folder, form, options.policy, budgets["dram_bytes"])

    with ExitStack() as stack:
        with _collector_paused():
            from toolkit.models import hub

            stack.enter_context(hub.lean())  # before anything imports transformers' models
            from toolkit.offload.model import OffloadedModel

            settings = {name: getattr(options, name) for name in ("policy", "verify", "device")}
            settings |= {"reader": options.reader} if options.reader else {}
            method = _method(form, options.weights, options.device)
            opened = OffloadedModel.open(options.folder, method, **budgets, **settings)
            model = stack.enter_context(opened)
            tokenizer = model.tokenizer
        begun_s = model.recorder.now_s()
        count = _generate(options, model, tokenizer, model.model.config)
        _tell(model, count, begun_s, _held_layers(model))
    return None


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
    from toolkit.errors import unknown
    from toolkit.sparsity import resolve

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
    from toolkit.files import new_folder

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

    from toolkit.errors import unknown
    from toolkit.formats import FORMATS, QUANTISED
    from toolkit.pruning import METHODS
    from toolkit.sparsity import resolve

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


def _quality(options: argparse.Namespace, dtype, tokenizer) -> str:
    """Perplexity of the dense model, and of what was written as `run` opens it."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.text import load_tokens

    print(f"{options.out}: written; evaluating (--no-evaluate leaves this out)", file=sys.stderr)
    try:
        tokens = load_tokens(options.corpus, tokenizer, "evaluation")
        after = _packed_perplexity(options, tokens)
        before = _perplexity(load_model(options.model, dtype or fast_dtype())[0], tokens)
    except UserError as error:
        return f"not evaluated: {error}"
    text = f"{options.corpus}, {after.windows} windows of {after.sequence_length} tokens"
    return f"perplexity {before:.1f} dense, {after:.1f} packed ({text})"


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


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise UserError("--prompt is empty: give the model at least a word to go on from")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: its character {error.start + 1} is a broken byte") from error


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


def _run_neurons(options: argparse.Namespace, dram_bytes: int | None) -> None:
    """A model whose neurons are read when a token needs them."""
    given = {"--weights": options.weights, "--device-memory": options.device_memory}
    given |= {"--device": options.device != "cpu", "--reader kvikio": options.reader == "kvikio"}
    given |= {"--policy": options.policy != "pipelined"}
    for name in [name for name, value in given.items() if value]:
        raise UserError(f"{name}: {options.folder} holds neurons, which the CPU reads and uses; leave {name} out")
    with ExitStack() as stack:
        with _collector_paused():
            from toolkit.models import hub

            stack.enter_context(hub.lean())
            from toolkit.offload.neuron_model import NeuronModel

            settings = {"dram_bytes": dram_bytes, "reader": options.reader, "verify": options.verify}
            model = stack.enter_context(NeuronModel.open(options.folder, **settings))
            tokenizer = model.tokenizer
        begun_s = model.recorder.now_s()
        count = _generate(options, model, tokenizer, model.model.config)
        _tell(model, count, begun_s, _held_neurons(model))


def _held_neurons(model) -> str:
    held = sum(ffn.store.num_used for ffn in model.ffns) / sum(ffn.store.window.neurons for ffn in model.ffns)
    return f"{held:.0%} of the neurons in DRAM ({model.mode} reads); {model.budget.used_bytes / 1e6:.1f} MB DRAM held"


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


def _write(options: argparse.Namespace, model, tokenizer) -> None:
    from toolkit.interchange import save_model
    from toolkit.storage.packing import pack_model

    if [*options.format] == [SPARSE_BITMASK]:
        return save_model(model, options.out, tokenizer)
    made = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
    variants = {name: _encoder(options, name) for name in options.format}
    return pack_model(model, options.out, variants, options.model, tokenizer, made)


def _sizes(folder: Path, model) -> list[str]:
    """What was written, beside the dense weights."""
    from toolkit.models import decoder_blocks, decoder_linears
    from toolkit.storage.store import Store

    weights = [linear.weight for block in decoder_blocks(model) for linear in decoder_linears(block).values()]
    dense, count = sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights)
    if not (folder / "index.json").is_file():
        packed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return [f"{packed / 1e6:.1f} MB in all; dense {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB"]
    store, found = Store.open(folder), [f"decoder weights dense {dense / 1e6:.1f} MB"]
    for variant in store.variants:
        packed = store.nbytes(variant)
        bits = 8 * packed / count
        found.append(f"{variant} {packed / 1e6:.1f} MB ({packed / dense:.1%}, {bits:.2f} bits a weight on disk)")
    return [*found, f"all the rest {store.rest_bytes / 1e6:.1f} MB"]


def _held_layers(model) -> str:
    where, on_device = model.placement, model.device.tier == "device"
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    return (
        f"{where.device} layers on the device, " if on_device else ""
    ) + f"{where.dram} in DRAM, {where.storage} on disk ({model.mode} reads); {' and '.join(held)} held"


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


def _bytes(option: str, text: str | None) -> int | None:
    """A number of bytes such as 500MB or 1.5GiB. Raises `UserError` for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|)", text)
    if found is None:
        raise UserError(f"{option} {text}: expected a size such as 500MB or 1.5GiB")
    return round(float(found[1]) * UNITS[found[2]])


def _dtype(name: str):
    import torch

    return getattr(torch, name)


def _parser() -> argparse.ArgumentParser:
    from toolkit.offload.glance import POLICIES, READERS

    parser = argparse.ArgumentParser(prog="python -m toolkit", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="pack | run")
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    packing = commands.add_parser(
        "pack",
        help="prune or quantise a model and write it packed",
        description=pack.__doc__,
        epilog=FORMATS_HELP,
        **raw,
    )
    packing.set_defaults(command=pack)
    packing.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    packing.add_argument(
        "--method",
        default="wanda",
        help="how to prune: dense (not at all), magnitude, wanda (default) or sparsegpt; or spqr, which quantises; or "
        "neurons, which stores FFNs by neuron",
    )
    packing.add_argument("--sparsity", type=float, help="share of zeros (default: 0.5; neurons: 0.8)")
    packing.add_argument("--pattern", help="N:M instead, such as 2:4")
    packing.add_argument("--format", nargs="+", help="one or several; see below (default: endor)")
    packing.add_argument("--bits", type=int, help="of spqr's weights: 3")
    packing.add_argument("--outliers", type=float, help="of spqr: share of weights kept in fp16 (default: 0.01)")
    packing.add_argument(
        "--predictors", help="of neurons: few_bits (default; a copy in 4 bits), low_rank, gate or none"
    )
    packing.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    packing.add_argument("--dtype", help=f"float32, float16 or bfloat16 (default: {WRITTEN})")
    packing.add_argument(
        "--int8", action="store_true", default=None, help="decoder weights in int8, smoothed by SmoothQuant first"
    )
    packing.add_argument("--corpus", default="wiki-slice", help="calibration text (default: wiki-slice)")
    packing.add_argument("--windows", type=int, default=16, help="calibration windows (default: 16; the papers: 128)")
    packing.add_argument("--sequence-length", type=int, default=1024, help="tokens of a window (default: 1024)")
    packing.add_argument(
        "--no-evaluate", dest="evaluate", action="store_false", help="do not measure perplexity before and after"
    )
    running = commands.add_parser(
        "run", help="generate text with a packed model", description=run.__doc__, epilog=WEIGHTS_HELP, **raw
    )
    running.set_defaults(command=run)
    running.add_argument("folder", type=Path, help="what pack wrote")
    running.add_argument("--prompt", required=True)
    running.add_argument("--max-new-tokens", type=int, default=40)
    running.add_argument("--dram", help="hard limit for weights and buffers, such as 500MB (default: none)")
    running.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    running.add_argument("--device-memory", help="hard limit for a GPU's memory, such as 8GB (default: most of it)")
    running.add_argument("--format", help="one of those that were packed (default: endor, else the first by name)")
    running.add_argument("--weights", choices=["decoded", "packed"], help="see below (default: decoded; spqr: packed)")
    running.add_argument("--policy", default="pipelined", choices=[*POLICIES], help="default: pipelined")
    running.add_argument(
        "--reader", choices=READERS, help="default: threads, or aio for neurons; kvikio reads straight into a GPU"
    )
    running.add_argument("--no-verify", dest="verify", action="store_false", help="trust the files' checksums unread")
    running.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    running.add_argument("--seed", type=int, default=0, help="of --sample (default: 0)")
    return parser


if __name__ == "__main__":
    # torch's threads wait for each other by spinning. Beside a busy process that took nine tenths of the speed away, so
    # they sleep; torch reads this once, when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
