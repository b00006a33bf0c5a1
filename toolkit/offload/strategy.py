"""The base of strategies, which bring the weights of decoder blocks to the processor that uses them.

A strategy is one module with a class like `Streamed` or `ByNeuron`, and an entry in `STRATEGIES` of
`toolkit.offload.model`, by the layout of the folders that it runs. It opens its files, takes its memory from the
budgets, and puts modules of its own in the places of the model's. It decides itself what it reads ahead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError
from toolkit.formats.dense import Dense
from toolkit.models import decoder_blocks
from toolkit.models.blocks import linears_in
from toolkit.models.skeleton import empty_model
from toolkit.offload.budget import Budget
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.embedding import embedding_beside_head
from toolkit.offload.held import HeldLayers
from toolkit.offload.linear import OffloadedLinear, itself
from toolkit.offload.options import Demand, Options
from toolkit.offload.placement import LayerMap
from toolkit.storage.store import Store
from toolkit.timeline import Recorder


@dataclass(eq=False)
class Opening:
    """A folder that is being opened; `stack` closes what a strategy opens.

    `common` are the tensors beside the ops' weights that another opened model holds already. `held` are packed
    layers that are held in memory. `on_disk` is the name of an input embedding that stays on disk, if any; `skeleton`
    finds it.
    """

    store: Store
    options: Options
    device: Cpu | Cuda
    budgets: Mapping[str, Budget]
    recorder: Recorder
    stack: ExitStack
    common: Mapping[str, Tensor] = field(default_factory=dict)
    held: HeldLayers | None = None
    on_disk: str | None = field(default=None, init=False)

    def skeleton(self, check: Callable[[nn.Module], None]) -> nn.Module:
        """`skeleton` of the store. On the CPU an input embedding that is no head's, too, stays on disk."""
        model = skeleton(self.store, check)
        packed = self.store.head_rows is not None
        self.on_disk = embedding_beside_head(model, packed) if isinstance(self.device, Cpu) else None
        return model

    @property
    def demand(self) -> Demand:
        """The options of a folder of neurons or experts."""
        return self.options.demand or Demand()

    @property
    def not_read(self) -> set[str | None]:
        """The names of the tensors, no op's weights, that are not read into memory."""
        return {*self.common, self.on_disk}

    @property
    def rest_bytes(self) -> int:
        """Bytes in memory of `held`, and of the tensors that are no op's weight and are not held already."""
        held = 0 if self.held is None else self.held.nbytes
        return held + sum(run.nbytes for run in self.store.index.rest if run.name not in self.not_read)


class Strategy(ABC):
    """Made from an `Opening`: checks come first, then memory is taken from the budgets, then files are opened.

    `model` has no weights when a strategy is made. When `take_over` is called, it has all that the folder holds beside
    the weights that the strategy brings. `mode` says how the disk is really read, as `Reader.mode`. `by_token` says
    whether a single token may take the short way past the modules (`toolkit.offload.single_token`). `placement` says
    where each layer lives, if layers are brought whole.
    """

    model: nn.Module
    mode: str
    by_token: bool = True
    placement: LayerMap | None = None

    @abstractmethod
    def take_over(self) -> None:
        """Put `Offloaded` modules in the places of the model's."""

    def settle(self, tokens: int) -> None:  # noqa: B027 (most have nothing to do)
        """Called between passes: the first `tokens` of the last pass count; the next pass may come much later."""


class OnDemand(Strategy):
    """A strategy that reads only what a token needs.

    `ffns` are the modules in the places of the model's FFNs or routed experts. Raises `UserError` for options of whole
    layers, for any of the `refused` that is not None, for a GPU unless `gpu` allows one, and for a model that `check`
    refuses.
    """

    def __init__(
        self, opening: Opening, holds: str, check: Callable[[nn.Module], None], gpu: bool = False, **refused: object
    ):
        store, options, self._opening = opening.store, opening.options, opening
        streamed = {"method": options.method, "placement": options.placement}
        streamed |= {"device": options.device if options.on_gpu and not gpu else None}
        for name, value in (streamed | refused).items():
            if value is not None:
                why = f"{store.folder} holds {holds}, which the CPU reads and uses; leave it out"
                raise UserError(f"{name}={value!r}: {why}")
        if options.verify:
            store.verify_files()
        self.model, self.ffns = opening.skeleton(check), []

    def take_over(self) -> None:
        """Replace the decoder's linears by ones whose time is recorded. Their weights are in the device's memory."""
        recorder, device = self._opening.recorder, self._opening.device
        for layer, block in enumerate(decoder_blocks(self.model)):
            for name, linear in linears_in(block).items():
                weight = Dense(tuple(linear.weight.shape), linear.weight.data)
                settings = (name, layer, itself(weight), torch.empty(0), True, recorder, device)
                block.set_submodule(name, OffloadedLinear(linear, *settings))


def skeleton(store: Store, check: Callable[[nn.Module], None]) -> nn.Module:
    """The model without its parameters; buffers that are computed are there. `check` looks at its outline first."""
    with hub.quiet():  # once for all that transformers does
        model = empty_model(store.config(), check)
        if (generation := store.generation_config()) is not None:
            model.generation_config = generation
    return model
