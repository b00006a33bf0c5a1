"""A mixture of experts on disk, so that `toolkit.offload.by_expert` can read the experts that a token needs.

    pack(model, folder, WholeExperts(bits=4), "mixtral", tokenizer)
    run = Store.open(folder).layer(0, LAYOUT).ops[op_name(3)]   # expert 3 of layer 0: one run of whole blocks

The neurons of an expert follow each other at a fixed stride: the gate row, the up row and the down column of one, as
`toolkit.storage.bundles` has them, or a record of few bits (`toolkit.quantization.neuron_records`). An expert of
another form than `down(act(gate(x)) · up(x))` is one row: the weights of its up projection, then those of its down
projection.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats import Packed, decode
from toolkit.formats.dense import Dense
from toolkit.formats.twins import random_records
from toolkit.models.experts import Experts, block_experts, mixtures_by_layer
from toolkit.quantization import neuron_records
from toolkit.sparsity.layerwise import Matrix
from toolkit.storage.packing import Layout
from toolkit.storage.runs import OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op

LAYOUT = "experts"
BITS = (None, 4, 2)  # None: as the model has them

Bits = int | None


def op_name(expert: int) -> str:
    """The name of an expert among a layer's ops."""
    return f"experts.{expert}"


@dataclass(frozen=True)
class WholeExperts(Layout):
    """Each routed expert of a mixture by itself; see `toolkit.storage.packing.pack_model`.

    `bits` of each weight of an expert, one of `BITS`; or a list of bits by layer and expert; or a function that gives
    the bits of a block's experts when they are written.
    """

    bits: Bits | Sequence[Sequence[Bits]] | Callable[[int], Sequence[Bits]] = None
    variants = (LAYOUT,)

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` for a model without experts, unknown bits, or few bits of experts without neurons.

        Also for a router that needs more than the mixture's input, since experts are chosen before they are read.
        """
        self._bits(model)
        for layer, experts in mixtures_by_layer(model).items():
            try:
                _ = experts.per_token
            except UserError as error:
                raise UserError(f"block {layer}: {error}; choose a method of all linears, such as spqr") from error

    def weights(self, model: nn.Module) -> list[Tensor]:
        """The weights of the routed experts."""
        return expert_weights(model)

    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """An expert each. Raises `UserError` for weights that cannot be quantised."""
        if (experts := block_experts(block, number)) is None:
            return
        bits_of = (
            self.bits(number)
            if callable(self.bits)
            else self._bits(model)[list(mixtures_by_layer(model)).index(number)]
        )
        for expert, of_expert in enumerate(bits_of):
            yield Op(number, op_name(expert), variant, Dense.encode(self._rows(number, experts, expert, of_expert)))

    def pairs(self, block: nn.Module, run: OpRun, packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """The matrices of an expert."""
        experts, rows, expert = block_experts(block, run.layer), decode(packed), int(run.op.rpartition(".")[2])
        if bits := bits_of(run, experts.hidden):
            values = neuron_records.decode(rows.view(torch.uint8), experts.hidden, bits)
        elif experts.activation:
            values = rows.chunk(3, dim=1)
        else:
            up, down = _weights(experts, expert)
            rows_of_two = rows[0].split([up.numel(), down.numel()])
            yield from ((weight, flat.view(weight.shape)) for weight, flat in zip((up, down), rows_of_two, strict=True))
            return
        yield from zip(experts.matrices(expert), values, strict=True)

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of the stored rows."""
        total, pairs = 0, zip(mixtures_by_layer(model).values(), self._bits(model), strict=True)
        for experts, of_layer in pairs:
            itemsize = experts.linears[0].down.weight.itemsize
            total += sum(prod(stored_shape(experts, bits)) * (1 if bits else itemsize) for bits in of_layer)
        return total

    def about(self, model: nn.Module) -> Mapping[str, object]:
        """The method."""
        return {"method": "experts"}

    def _bits(self, model: nn.Module) -> list[list[Bits]]:
        """The bits of each expert of each layer; a function's as if all had most.

        Raises `UserError` for numbers that do not fit.
        """
        bits, layers = max(BITS[1:]) if callable(self.bits) else self.bits, mixtures_by_layer(model)
        counts = [experts.count for experts in layers.values()]
        chosen = [[bits] * count for count in counts] if bits is None or isinstance(bits, int) else [*map(list, bits)]
        if [len(of_layer) for of_layer in chosen] != counts:
            raise UserError(f"bits of {[*map(len, chosen)]} experts by layer: the model has {counts}")
        for of_expert in {each for of_layer in chosen for each in of_layer}:
            if isinstance(of_expert, bool) or of_expert not in BITS:
                raise unknown("number of bits", of_expert, BITS)
        for (layer, experts), of_layer in zip(layers.items(), chosen, strict=True):
            if any(of_layer) and not experts.activation:
                raise UserError(
                    f"block {layer} ({type(experts.module).__name__}): its experts are more than down(act(gate) · up), "
                    "so they have no records of few bits: store them in 16"
                )
        return chosen

    def _rows(self, layer: int, experts: Experts, expert: int, bits: Bits) -> Shaped[Tensor, "rows width"]:
        """An expert as it is stored: in the model's type, or records of few bits as int8."""
        if bits is not None:
            return neuron_records.encode(*experts.matrices(expert), bits).view(torch.int8)
        if experts.activation:
            return torch.cat(experts.matrices(expert), dim=1)
        return torch.cat([weight.detach().flatten() for weight in _weights(experts, expert)])[None]


@dataclass(frozen=True)
class RandomExperts(WholeExperts):
    """The same with random records, for a mixture whose experts are on the device "meta" (`twin_mixture`)."""

    bits: int = 4

    def _rows(self, layer: int, experts: Experts, expert: int, bits: Bits) -> Tensor:
        seed = layer * experts.count + expert
        return random_records(experts.neurons, experts.hidden, bits, seed).view(torch.int8)


def stored_shape(experts: Experts, bits: Bits) -> tuple[int, int]:
    """Rows and their elements of a stored expert."""
    if bits is not None:
        return experts.neurons, neuron_records.record_bytes(experts.hidden, bits)
    if experts.activation:
        return experts.neurons, 3 * experts.hidden
    return 1, sum(weight.numel() for weight in _weights(experts, 0))


def _weights(experts: Experts, expert: int) -> tuple[Tensor, Tensor]:
    return experts.linears[expert].up.weight, experts.linears[expert].down.weight


def bits_of(run: OpRun, hidden: int) -> Bits:
    """The bits of a stored expert's weights, by its shape. Raises `UserError` for a shape that no expert has."""
    if run.dtype.is_floating_point:
        return None
    for bits in BITS[1:]:
        if run.dtype == torch.int8 and run.shape[1] == neuron_records.record_bytes(hidden, bits):
            return bits
    raise UserError(f"{run.label}: rows of {run.shape[1]} elements of {run.dtype} hold no neuron of {hidden} inputs")


def expert_weights(model: nn.Module) -> list[Tensor]:
    """The weights of all routed experts."""
    layers = mixtures_by_layer(model).values()
    return [it for experts in layers for number in range(experts.count) for it in _weights(experts, number)]


def check_fits(store: Store, model: nn.Module) -> None:
    """Raise `UserError` unless a store of `WholeExperts` is of this model, which may be on the device "meta"."""
    ops = {}
    for layer, experts in mixtures_by_layer(model).items():
        stored = store.layer(layer, LAYOUT).ops
        names = [op_name(expert) for expert in range(experts.count)]
        known = [bits_of(stored[name], experts.hidden) if name in stored else None for name in names]
        ops[layer] = {name: stored_shape(experts, bits) for name, bits in zip(names, known, strict=True)}
    store.check_holds(model, LAYOUT, ops, expert_weights(model))
