"""A model in a folder of its own with its FFNs by neuron: all that `toolkit.offload.by_neuron` needs to run it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.cutting import ENTRY
from toolkit.models.ffn import FFN, decoder_ffns, known_activation
from toolkit.models.plain import plain
from toolkit.storage.bundles import bundle_ops, parts
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import tensors_beside, write_model
from toolkit.storage.store import Store

LAYOUT = "bundled"
NEEDS = "neurons_a_token"  # the entry of what an index says of its model: how many a token needs, by layer


def pack_neurons(
    model: nn.Module,
    folder: Path,
    name: str = "unnamed",
    tokenizer: object | None = None,
    thresholds: Sequence[float] | None = None,
    needs: Sequence[int] | None = None,
    files: Callable[[Path], None] | None = None,
) -> None:
    """Write a model into a new folder: its FFNs as bundles, all other tensors, configuration and tokenizer.

    Args:
        model: decoder-only, with one FFN a block.
        folder: must not exist.
        name: the model's name, for people.
        tokenizer: stored beside the configuration, in the folder `model/`.
        thresholds: of the outputs of each layer's neurons; None keeps those that the configuration has, if any.
        needs: how many neurons a token needs of each layer on average; memory is shared out by them.
        files: adds small files to the folder `model/`, such as predictors.

    Raises `UserError` for thresholds or needs of another number of layers, and as `check_packable`, `check_reopens` and
    `write_store` do.
    """
    ffns = decoder_ffns(plain(model))
    for what, given in {"thresholds": thresholds, "needs": needs}.items():
        if given is not None and len(given) != len(ffns):
            raise UserError(f"{len(given)} {what} for {len(ffns)} decoder blocks: give one each")
    check_packable(model)
    config = copy.deepcopy(model.config)
    if thresholds is not None:
        setattr(config, ENTRY, [float(threshold) for threshold in thresholds])
    described = {"name": name} | ({} if needs is None else {NEEDS: [int(need) for need in needs]})
    nbytes = sum(matrix.nbytes for ffn in ffns for matrix in parts(ffn).values())
    write_model(
        *(model, folder, bundle_ops(ffns, [LAYOUT]), len(ffns), neuron_rest(model), described, tokenizer),
        expected_bytes=nbytes,
        unit="layers",
        config=config,
        files=files,
    )


def check_packable(model: nn.Module) -> None:
    """Raise `UserError` for a model with an FFN that bundles cannot hold, or whose activation has no kernel."""
    ffns = decoder_ffns(model)
    check_supported(ffns)
    for ffn in ffns:
        known_activation(ffn)


def check_supported(ffns: Sequence[FFN]) -> None:
    """Raise `UserError` for an FFN whose gate or up projection beside it has a bias: bundles have no place for them."""
    for number, ffn in enumerate(ffns):
        if ffn.gate is not None and not ffn.gate.bias is ffn.up.bias is None:
            raise UserError(f"block {number}: its FFN has a gate and biases; choose a model without such biases")


def check_fits(store: Store, model: nn.Module) -> None:
    """Raise `UserError` unless a store of `pack_neurons` is of this model, which may be on the device "meta"."""
    ffns = decoder_ffns(model)
    check_supported(ffns)
    block = BLOCK_BYTES // next(run.dtype for run in store.index.ops).itemsize
    shapes = [(ffn.neurons, -(-width(ffn) // block) * block) for ffn in ffns]
    store.check_holds(
        model, LAYOUT, {layer: {"ffn.bundle": shape} for layer, shape in enumerate(shapes)}, neuron_rest(model)
    )


def width(ffn: FFN) -> int:
    """Weights of one neuron."""
    return sum(matrix.shape[1] for matrix in parts(ffn).values())


def neuron_rest(model: nn.Module) -> Mapping[str, Tensor]:
    """All tensors of a model but the weights of its FFNs, by name."""
    return tensors_beside(model, (linear.weight for ffn in decoder_ffns(model) for linear in ffn.linears))
