"""The packers of `pack --method`: the options of each, its early checks, and its work.

torch takes seconds to import, so nothing here imports it before the work begins.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from toolkit.errors import UserError, share
from toolkit.pattern import resolve

WRITTEN = "bfloat16"  # the type of packed weights unless another is asked for, whatever is quickest to prune in
SPARSE_BITMASK = "sparse-bitmask"
FORMATS = {
    "endor": "non-zeros and a bitmap (default); the only one of these that is also multiplied packed",
    "csr": "non-zeros with their column numbers",
    "two_four": "two non-zeros of four, for --pattern 2:4",
    "zstd": "the dense bytes, compressed",
    "lz4": "the dense bytes, compressed more quickly and less",
    "dense": "the dense bytes, to compare with",
    SPARSE_BITMASK: "a checkpoint of its own, in the layout of compressed-tensors 0.9 to 0.14, which reads it with "
    "transformers 4; transformers 5 does not. `run` loads it whole, without a memory budget",
}
PREDICTORS = ("few_bits", "low_rank", "gate", "none")
EXPERT_BITS = (16, 4, 2)
HEADS = ("whole", "dense", "int8", "spqr")
HEAD_OUTLIERS = 0.01
HEAD_WINDOWS = 4  # of the calibration text that the head's 3 bits see; a pass over the model takes long


@dataclass(frozen=True)
class Option:
    """An option that only some packers take: `--name`. `settings` go to `argparse.add_argument`."""

    name: str
    default: object
    help: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Packer:
    """A way to pack, chosen by `--method`.

    `check` raises `UserError` for values of its options that it cannot use, without importing torch. `pack` imports
    what it needs, writes the folder `options.out` and returns the model as it was written, and its tokenizer.
    `resumable`: after an interruption the same command goes on where it was.
    """

    name: str
    help: str
    pack: Callable[[Namespace], tuple]
    options: tuple[Option, ...] = ()
    check: Callable[[Namespace], None] = lambda options: None
    resumable: bool = False


def choose(options: Namespace) -> Packer:
    """The packer that `--method` names; the defaults of its options are filled in.

    Raises `UserError` for an option that only other packers take.
    """
    packer = PACKERS[options.method]
    own = {option.name: option.default for option in packer.options}
    for name, owners in option_owners().items():
        value = getattr(options, name)
        if name not in own and value is not None:
            typed = "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
            raise UserError(
                f"--{name}{typed}: an option of --method {', '.join(owners)}, not of {packer.name}; leave --{name} out"
            )
        if name in own and value is None:
            setattr(options, name, own[name])
    return packer


def option_owners() -> dict[str, dict[str, Option]]:
    """The options that only some packers take, by name, with their form in each packer that takes them."""
    owners: dict[str, dict[str, Option]] = {}
    for packer in PACKERS.values():
        for option in packer.options:
            owners.setdefault(option.name, {})[packer.name] = option
    return owners


def calibration(options: Namespace):
    """The calibration text that the options name."""
    from toolkit.sparsity import Calibration

    return Calibration(options.corpus, options.windows, options.sequence_length)


def torch_dtype(name: str | None):
    """The torch type of this name; None for None."""
    import torch

    return name and getattr(torch, name)


def pack_pruned(options: Namespace) -> tuple:
    """Prune the model, or keep its weights as they are, and write it in one or several formats."""
    from toolkit.interchange import save_model
    from toolkit.models.blocks import cast_parameters
    from toolkit.quantization.smoothquant import load_smoothed
    from toolkit.sparsity import load_pruned
    from toolkit.storage.packing import Linears, pack_model

    if options.method != "dense" and SPARSE_BITMASK not in options.format:
        _try_formats(options)
    load = load_smoothed if options.int8 else load_pruned
    settings = {"sparsity": options.sparsity, "pattern": options.pattern, "calibration": calibration(options)}
    unchanged = options.method == "dense" and not options.int8  # nothing is computed
    dtype = torch_dtype(options.dtype or (WRITTEN if unchanged else None))
    model, tokenizer, *_ = load(options.model, options.method, **settings, dtype=dtype)
    cast_parameters(model, torch_dtype(options.dtype or WRITTEN))
    if options.format == [SPARSE_BITMASK]:
        save_model(model, options.out, tokenizer)
    else:
        recipe = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
        variants = {name: _encoder(options, name) for name in options.format}
        pack_model(
            model,
            options.out,
            Linears(variants),
            options.model,
            tokenizer,
            description=recipe,
            head=_head(options, model, tokenizer),
        )
    return model, tokenizer


def check_pruned(options: Namespace) -> None:
    """Raise `UserError` for a sparsity, a pattern, or formats and other options that do not go together."""
    resolve(options.sparsity, options.pattern)
    if options.head != HEADS[0] and SPARSE_BITMASK in options.format:
        raise UserError(f"--head {options.head}: {SPARSE_BITMASK} has no place for it; leave --head out")
    if SPARSE_BITMASK in options.format and len(options.format) > 1:
        raise UserError(f"--format {SPARSE_BITMASK} makes a folder of its own: pack the other formats into another one")
    if options.int8 and SPARSE_BITMASK in options.format:
        raise UserError(f"--int8: {SPARSE_BITMASK} has no place for scales; pack endor, zstd or dense instead")


def _try_formats(options: Namespace) -> None:
    """Pack a small matrix as the model will be, so that a format that cannot hold it is refused before the work."""
    import torch

    from toolkit.sparsity import METHODS

    sparsity, pattern = resolve(options.sparsity, options.pattern)
    weight = METHODS["magnitude"](torch.rand(64, 64) + 1, None, sparsity, pattern)
    for name in options.format:
        try:
            _encoder(options, name)(weight)
        except UserError as error:
            hint = "; add --pattern 2:4" if options.pattern is None else ""
            raise UserError(f"--format {name} cannot hold weights pruned like this: {error}{hint}") from error


def _encoder(options: Namespace, name: str) -> Callable:
    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled

    return partial(Scaled.encode if options.int8 else encode, name)


def pack_spqr(options: Namespace) -> tuple:
    """Quantise the model by SpQR and write it."""
    from toolkit.formats.spqr import fastest
    from toolkit.models.blocks import cast_parameters
    from toolkit.quantization.spqr import SpQR
    from toolkit.sparsity import load_changed
    from toolkit.storage.packing import ChangedLinears, pack_model

    dtype = torch_dtype(options.dtype)
    quantised = load_changed(options.model, SpQR(options.outliers), calibration(options), dtype)
    cast_parameters(quantised.model, dtype or torch_dtype(WRITTEN))
    recipe = {name: getattr(options, name) for name in ("method", "outliers")}
    head = _head(options, quantised.model, quantised.tokenizer)
    pack_model(
        quantised.model,
        options.out,
        ChangedLinears(quantised, "spqr", fastest),
        options.model,
        quantised.tokenizer,
        description=recipe,
        head=head,
    )
    return quantised.model, quantised.tokenizer


def _head(options: Namespace, model, tokenizer) -> Callable | None:
    """The encoder of the output head's parts, in 3 bits calibrated on the text; None where it stays as it is."""
    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled
    from toolkit.formats.spqr import fastest
    from toolkit.quantization.spqr import SpQR
    from toolkit.sparsity.calibration import head_gram

    if options.head == "whole":
        return None
    if options.head == "spqr":
        gram = head_gram(model, calibration(options).draw_from_corpus(tokenizer)[:HEAD_WINDOWS])
        return lambda weight: fastest(SpQR(HEAD_OUTLIERS)(weight.float(), gram), model.dtype)
    return partial(Scaled.encode if options.head == "int8" else encode, "dense")


def pack_neurons(options: Namespace) -> tuple:
    """Store the model's FFNs by neuron, for `run` to read those that a token needs."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.models.blocks import cast_parameters
    from toolkit.offload.neuron_folder import fit_neurons
    from toolkit.quality import load_tokens
    from toolkit.storage.packing import pack_model

    model, tokenizer = load_model(options.model, torch_dtype(options.dtype) or fast_dtype())
    tokens, wanted = load_tokens(options.corpus, tokenizer, "calibration"), (options.sparsity, options.predictors)
    layout, files = fit_neurons(model, options.model, tokens, *wanted, calibration(options))
    cast_parameters(model, torch_dtype(options.dtype or WRITTEN))
    head = _head(options, model, tokenizer)
    pack_model(model, options.out, layout, options.model, tokenizer, head=head, files=files)
    return model, tokenizer


def check_sparsity(options: Namespace) -> None:
    """Raise `UserError` for an impossible share of zeros."""
    resolve(options.sparsity, None)


def pack_by_expert(options: Namespace) -> tuple:
    """Store each expert of a mixture by itself, for `run` to read those that a token needs."""
    from toolkit.models import load_model
    from toolkit.storage.experts import WholeExperts
    from toolkit.storage.packing import pack_model

    model, tokenizer = load_model(options.model, torch_dtype(options.dtype or WRITTEN))
    bits = None if options.bits == EXPERT_BITS[0] else options.bits
    WholeExperts(bits).check(model)
    if options.mixed:
        bits = _bits_by_usage(options, model, tokenizer)
    pack_model(model, options.out, WholeExperts(bits), options.model, tokenizer, head=_head(options, model, tokenizer))
    return model, tokenizer


def _bits_by_usage(options: Namespace, model, tokenizer) -> list[list[int]]:
    """The bits of each expert of each layer, by the calibration text's routing."""
    from toolkit.policies.expert_bits import bits_by_usage
    from toolkit.quality import load_tokens
    from toolkit.sparsity.recording import record_routing
    from toolkit.sparsity.statistics import usage_of

    tokens = load_tokens(options.corpus, tokenizer, "calibration")
    trace = record_routing(model, options.model, tokens, options.corpus, options.windows, options.sequence_length)
    return bits_by_usage([usage_of(trace, layer).numpy() for layer in range(trace.layers)], options.mixed, options.bits)


def check_experts(options: Namespace) -> None:
    """Raise `UserError` for 2 bits of some experts unless the others have 4."""
    if options.mixed and options.bits != 4:
        raise UserError(f"--mixed {options.mixed} with --bits {options.bits}: give --bits 4, which the others have")


PRUNING_METHODS = {
    "wanda": "prune by weight times norm of its input (default)",
    "magnitude": "prune by weight, without calibration",
    "sparsegpt": "prune and make up for the error in the other weights",
    "dense": "do not prune",
}
HEAD = Option(
    "head",
    HEADS[0],
    "output head: whole, in memory; or packed as dense (16 bits), int8 or spqr (4.4 bits), and read like layers",
    {"choices": HEADS, "metavar": "FORM"},
)
PRUNING = (
    HEAD,
    Option("sparsity", 0.5, "share of zeros", {"type": float}),
    Option("pattern", None, "N:M instead, such as 2:4"),
    Option("format", ["endor"], "one or several; see below", {"nargs": "+", "choices": FORMATS, "metavar": "NAME"}),
    Option("int8", False, "decoder weights in int8, smoothed by SmoothQuant first", {"action": "store_true"}),
)
OUTLIERS = Option("outliers", 0.01, "share of weights kept in fp16", {"type": share})
NEURONS = (
    HEAD,
    Option("sparsity", 0.8, "share of zeros", {"type": float}),
    Option("predictors", "few_bits", "which neurons to read before an FFN", {"choices": PREDICTORS}),
)
BITS = "of an expert's weight: 16, or 4 in groups of 64, or 2 in groups of 16"
MIXED = "share of each layer's experts, least used by the calibration text, in 2 bits"
EXPERTS = (
    HEAD,
    Option("bits", 16, BITS, {"type": int, "choices": EXPERT_BITS}),
    Option("mixed", 0.0, MIXED, {"type": share}),
)
BY_EXPERT = "store each expert of a mixture of experts by itself"
PACKERS: dict[str, Packer] = {  # in the order in which the help lists them
    packer.name: packer
    for packer in (
        *(Packer(name, help, pack_pruned, PRUNING, check_pruned) for name, help in PRUNING_METHODS.items()),
        Packer("spqr", "quantise to 3 bits by SpQR", pack_spqr, (OUTLIERS, HEAD), resumable=True),
        Packer(
            "neurons",
            "keep all weights, and store FFNs by neuron",
            pack_neurons,
            NEURONS,
            check_sparsity,
        ),
        Packer("experts", BY_EXPERT, pack_by_expert, EXPERTS, check_experts),
    )
}
