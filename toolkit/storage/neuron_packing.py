"""FFNs by neuron in a folder of their own: all that `toolkit.offload.by_neuron` needs to run a model."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.formats import Packed, decode
from toolkit.models.cutting import ENTRY
from toolkit.models.ffn import FFN, decoder_ffns, ffn_of, known_activation
from toolkit.sparsity.layerwise import Matrix
from toolkit.storage.bundles import bundle_ops, parts
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import Layout
from toolkit.storage.runs import OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op

LAYOUT = "bundled"
NEEDS = "neurons_a_token"  # the entry of what an index says of its model: how many a token needs, by layer


@dataclass(frozen=True)
class Neurons(Layout):
    """FFNs as bundles, for a model with one FFN a block; see `toolkit.storage.packing.pack_model`.

    `thresholds` are of the outputs of each layer's neurons; None keeps those that the configuration has, if any.
    `needs`: how many neurons of each layer a token needs on average; memory is shared out in proportion.
    """

    thresholds: Sequence[float] | None = None
    needs: Sequence[int] | None = None
    variants = (LAYOUT,)

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` for thresholds or needs of another number of layers, and as `check_packable` does."""
        layers = len(decoder_ffns(model))
        for name, given in {"thresholds": self.thresholds, "needs": self.needs}.items():
            if given is not None and len(given) != layers:
                raise UserError(f"{len(given)} {name} for {layers} decoder blocks: give one each")
        check_packable(model)

    def weights(self, model: nn.Module) -> list[Tensor]:
        """The weights of the FFNs."""
        return ffn_weights(model)

    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """The block's bundles."""
        return bundle_ops([ffn_of(block, number)], [variant], number)

    def pairs(self, block: nn.Module, run: OpRun, packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """The matrices of the block's FFN."""
        bundles, start = decode(packed), 0
        for matrix in parts(ffn_of(block, run.layer)).values():
            yield matrix, bundles[:, start : start + matrix.shape[1]]
            start += matrix.shape[1]

    def about(self, model: nn.Module) -> Mapping[str, object]:
        """The needs."""
        return {} if self.needs is None else {NEEDS: [int(need) for need in self.needs]}

    def config(self, model: nn.Module):
        """The model's own, with the thresholds."""
        config = copy.deepcopy(model.config)
        if self.thresholds is not None:
            setattr(config, ENTRY, [float(threshold) for threshold in self.thresholds])
        return config


def check_packable(model: nn.Module) -> list[FFN]:
    """The FFNs. Raise `UserError` for one that bundles cannot hold, or whose activation has no kernel.

    Bundles cannot hold the bias of a gate, nor of an up projection beside a gate.
    """
    ffns = decoder_ffns(model)
    for number, ffn in enumerate(ffns):
        if ffn.gate is not None and not ffn.gate.bias is ffn.up.bias is None:
            raise UserError(
                f"block {number}: its FFN has a gate and biases; choose a method of all linears, such as spqr"
            )
        known_activation(ffn)
    return ffns


def check_fits(store: Store, model: nn.Module) -> None:
    """Raise `UserError` unless a store of `Neurons` is of this model, which may be on the device "meta"."""
    ffns = check_packable(model)
    block = BLOCK_BYTES // next(run.dtype for run in store.index.ops).itemsize
    shapes = [(ffn.neurons, -(-width(ffn) // block) * block) for ffn in ffns]
    ops = {layer: {"ffn.bundle": shape} for layer, shape in enumerate(shapes)}
    store.check_holds(model, LAYOUT, ops, ffn_weights(model))


def width(ffn: FFN) -> int:
    """Weights of one neuron."""
    return sum(matrix.shape[1] for matrix in parts(ffn).values())


def ffn_weights(model: nn.Module) -> list[Tensor]:
    """The weights of all FFNs."""
    return [linear.weight for ffn in decoder_ffns(model) for linear in ffn.linears]
