"""The packers of `pack --method`: the options of each, its early checks, and its work.

torch takes seconds to import, so nothing here imports it before the work begins.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from toolkit.errors import UserError, share, unknown, whole
from toolkit.pattern import resolve

WRITTEN = "bfloat16"  # the type of packed weights unless another is asked for, whatever is quickest to prune in
SPARSE_BITMASK = "sparse-bitmask"
FORMATS = {
    "endor": "non-zeros and a bitmap (default); multiplied packed",
    "csr": "non-zeros with their column numbers",
    "two_four": "two non-zeros of four, for --pattern 2:4",
    "huffman": "every bit of dense weights, their exponents in a Huffman code; multiplied packed",
    "zstd": "the dense bytes, compressed",
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

    def check(self, value: object) -> None:
        """Raise `UserError` for a value that the command line would refuse, too."""
        parse, choices = self.settings.get("type", str), self.settings.get("choices")
        for one in value if isinstance(value, list | tuple) else (value,):
            if choices and one not in choices:
                raise unknown(self.name, one, choices)
            try:
                parse(str(one))
            except (ArgumentTypeError, ValueError) as error:
                raise UserError(f"--{self.name} {one!s:.99}: {error}") from error


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

    Raises `UserError` for an option that only other packers take, and for a value that an option does not have.
    """
    if options.method not in PACKERS:
        raise unknown("method", options.method, PACKERS)
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
        elif name in own:
            owners[packer.name].check(value)
    for option in COMMON:
        if (value := getattr(options, option.name.replace("-", "_"))) is not None:
            option.check(value)
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
    from toolkit.storage.packing import Linears

    if options.format == [SPARSE_BITMASK]:
        return _pack_checkpoint(options)
    if options.method != "dense":
        _try_formats(options)
    unchanged = options.method == "dense" and not options.int8  # nothing is computed
    variants = {name: _encoder(options, name) for name in options.format}
    sparsity = 0.0 if options.method == "dense" else resolve(options.sparsity, options.pattern)[0]
    layout = Linears(variants if options.int8 else tuple(options.format), sparsity)
    recipe = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
    return _pack_blocks(options, layout, partial(_pruning, options), recipe, WRITTEN if unchanged else None)


def _pruning(options: Namespace, tokenizer):
    """The treatment that prunes a model's blocks, and smooths them for int8."""
    from toolkit.quantization.smoothquant import Smoothing
    from toolkit.sparsity.layerwise import Changing, Pruning

    change = None
    if options.method != "dense":
        change = Pruning.by(options.method, options.sparsity, options.pattern)
    streamed = options.int8 or bool(change and change.statistic)
    windows = calibration(options).draw_from_corpus(tokenizer) if streamed else None
    return Smoothing(change, windows) if options.int8 else Changing(change, windows)


def _pack_checkpoint(options: Namespace) -> tuple:
    """Prune the whole model in memory, and write it as a checkpoint of compressed-tensors."""
    from toolkit.interchange import save_model
    from toolkit.models.blocks import cast_parameters
    from toolkit.sparsity import load_pruned

    settings = {"sparsity": options.sparsity, "pattern": options.pattern, "calibration": calibration(options)}
    dtype = torch_dtype(options.dtype or (WRITTEN if options.method == "dense" else None))
    model, tokenizer, _ = load_pruned(options.model, options.method, **settings, dtype=dtype)
    cast_parameters(model, torch_dtype(options.dtype or WRITTEN))
    save_model(model, options.out, tokenizer)
    return model, tokenizer


def _pack_blocks(
    options: Namespace,
    layout,
    treatment: Callable,
    recipe: Mapping[str, object] | None = None,
    computed: str | None = None,
) -> tuple:
    """Write a model block by block; return it, as far as it is in memory, and its tokenizer.

    `treatment` makes what treats the blocks, from the tokenizer; `layout` may be a function of that. `computed` is the
    type to compute in; None for the quickest.
    """
    from toolkit.models import fast_dtype
    from toolkit.models.origin import origin
    from toolkit.storage.packing import pack_model

    written, dtype = torch_dtype(options.dtype or WRITTEN), torch_dtype(options.dtype or computed) or fast_dtype()
    model, tokenizer = open_source(options.model, dtype)
    if is_packed(options.model):
        written = dtype = _own_dtype(options, model)
    target = model if dtype == written else open_source(options.model, written)[0]
    treats = treatment(tokenizer)
    layout = layout(treats) if callable(layout) else layout
    unfinished = options.begin(model, layout)
    head, followers = _head(options, target, tokenizer)
    pack_model(
        model,
        options.out,
        layout,
        options.model,
        tokenizer,
        description={"source": origin(options.model), **(recipe or {})},
        head=head,
        files=getattr(treats, "files", None),
        treatment=treats,
        written=target,
        followers=followers,
        unfinished=unfinished,
        check=True,
    )
    return target, tokenizer


def is_packed(name: str) -> bool:
    """Whether a model's name is that of a folder that `pack` wrote."""
    return (Path(name) / "index.json").is_file() and not (Path(name) / "config.json").exists()


def open_source(name: str, dtype) -> tuple:
    """The model of `open_model` and its tokenizer; of a folder that `pack` wrote, in the type that it has."""
    from toolkit.interchange.reading import load_tokenizer
    from toolkit.models.loading import open_model
    from toolkit.offload.stored import stored_model
    from toolkit.offload.variant import variant_to_run
    from toolkit.storage.store import Store

    if not is_packed(name):
        return open_model(name, dtype)
    store = Store.open(name)
    return stored_model(store, variant_to_run(store.folder)), load_tokenizer(store.model_folder)


def _own_dtype(options: Namespace, model):
    """The type of a packed folder's weights. Raises `UserError` if `--dtype` asks for another one."""
    if options.dtype and torch_dtype(options.dtype) != model.dtype:
        own = str(model.dtype).removeprefix("torch.")
        raise UserError(f"--dtype {options.dtype}: {options.model} has weights in {own}, and keeps them; leave it out")
    return model.dtype


def pack_kept(options: Namespace) -> tuple:
    """Write the layers of a packed folder as they are, and pack its head."""
    from toolkit.offload.kept import KeptFiles, KeptLayers
    from toolkit.storage.store import Store

    store = Store.open(options.model)
    recipe = {"source": store.model["source"]} if "source" in store.model else {}
    return _pack_blocks(options, KeptLayers(store), lambda tokenizer: KeptFiles(store), recipe)


def check_kept(options: Namespace) -> None:
    """Raise `UserError` for a model that is no folder which `pack` wrote, or a head that stays."""
    if not is_packed(options.model):
        raise UserError(f"{options.model}: --method kept takes a folder that pack wrote; name one, or another method")
    if options.head == HEADS[0]:
        raise UserError("--head whole: nothing would change; choose dense, int8 or spqr")


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
    from toolkit.quantization.spqr import SpQR
    from toolkit.sparsity.layerwise import Changing
    from toolkit.storage.packing import ChangedLinears

    def treatment(tokenizer) -> Changing:
        return Changing(SpQR(options.outliers), calibration(options).draw_from_corpus(tokenizer))

    recipe = {name: getattr(options, name) for name in ("method", "outliers")}
    return _pack_blocks(options, ChangedLinears("spqr", fastest), treatment, recipe)


def _head(options: Namespace, model, tokenizer) -> tuple[Callable | None, list]:
    """The encoder of the output head's parts, in 3 bits calibrated on the text, and the texts that it needs.

    None for a head that stays as it is.
    """
    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled
    from toolkit.formats.spqr import fastest
    from toolkit.quantization.spqr import SpQR
    from toolkit.sparsity.grams import gram_of_head, head_stream

    if options.head == "whole":
        return None, []
    if options.head != "spqr":
        return partial(Scaled.encode if options.head == "int8" else encode, "dense"), []
    stream = head_stream(model, calibration(options).draw_from_corpus(tokenizer)[:HEAD_WINDOWS])
    gram = cache(lambda: gram_of_head(model, stream.results))
    return lambda weight: fastest(SpQR(HEAD_OUTLIERS)(weight.float(), gram()), model.dtype), [stream]


def pack_neurons(options: Namespace) -> tuple:
    """Store the model's FFNs by neuron, for `run` to read those that a token needs."""
    from toolkit.offload.neuron_folder import FittedNeurons, NeuronFit
    from toolkit.quality import load_tokens

    def treatment(tokenizer) -> NeuronFit:
        tokens = load_tokens(options.corpus, tokenizer, "calibration")
        return NeuronFit(options.model, tokens, options.sparsity, options.predictors, calibration(options))

    return _pack_blocks(options, lambda fit: FittedNeurons(fit=fit), treatment)


def check_sparsity(options: Namespace) -> None:
    """Raise `UserError` for an impossible share of zeros."""
    resolve(options.sparsity, None)


def pack_by_expert(options: Namespace) -> tuple:
    """Store each expert of a mixture by itself, for `run` to read those that a token needs."""
    from toolkit.quality import load_tokens
    from toolkit.sparsity.recording import ExpertUsage
    from toolkit.sparsity.treatment import Treatment
    from toolkit.storage.experts import WholeExperts

    bits = None if options.bits == EXPERT_BITS[0] else options.bits
    if not options.mixed:
        return _pack_blocks(options, WholeExperts(bits), lambda tokenizer: Treatment(), computed=WRITTEN)

    def treatment(tokenizer) -> ExpertUsage:
        tokens = load_tokens(options.corpus, tokenizer, "calibration")
        return ExpertUsage(tokens, options.windows, options.sequence_length)

    layout = lambda usage: WholeExperts(partial(_bits_by_usage, options, usage))  # noqa: E731
    return _pack_blocks(options, layout, treatment, computed=WRITTEN)


def _bits_by_usage(options: Namespace, usage, number: int) -> list[int]:
    """The bits of each expert of a block, by the calibration text's routing."""
    from toolkit.quantization.expert_bits import bits_by_usage

    (bits,) = bits_by_usage([usage.shares[number].numpy()], options.mixed, options.bits)
    return bits


def check_experts(options: Namespace) -> None:
    """Raise `UserError` for 2 bits of some experts unless the others have 4."""
    if options.mixed and options.bits != 4:
        raise UserError(f"--mixed {options.mixed} with --bits {options.bits}: give --bits 4, which the others have")


DTYPES = ("float32", "float16", "bfloat16")
COMMON = (
    Option("dtype", None, f"default: {WRITTEN}", {"choices": DTYPES}),
    Option("windows", 16, "calibration windows (default: 16; the papers: 128)", {"type": whole}),
    Option("sequence-length", 1024, "tokens of a window (default: 1024)", {"type": whole}),
)
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
BY_HEAD = "keep the layers of a folder that pack wrote, and pack its head"
PACKERS: dict[str, Packer] = {  # in the order in which the help lists them
    packer.name: packer
    for packer in (
        *(Packer(name, help, pack_pruned, PRUNING, check_pruned, True) for name, help in PRUNING_METHODS.items()),
        Packer("spqr", "quantise to 3 bits by SpQR", pack_spqr, (OUTLIERS, HEAD), resumable=True),
        Packer("neurons", "keep all weights, and store FFNs by neuron", pack_neurons, NEURONS, check_sparsity, True),
        Packer("experts", BY_EXPERT, pack_by_expert, EXPERTS, check_experts, True),
        Packer("kept", BY_HEAD, pack_kept, (replace(HEAD, default="spqr"),), check_kept, True),
    )
}
