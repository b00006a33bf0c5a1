"""Decoder blocks that are streamed whole: on a GPU, in DRAM or on disk, the next one while this one is used."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.head import HEAD, head_parts
from toolkit.offload.device import Cpu
from toolkit.offload.head import replace_head
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.methods import usual_method
from toolkit.offload.plan import Plan, placed, scratch_bytes
from toolkit.offload.strategy import Opening, Strategy
from toolkit.offload.streamer import Streamer
from toolkit.offload.uploader import Uploader
from toolkit.offload.variant import favourite
from toolkit.storage.readers import open_reader


class Streamed(Strategy):
    """Every linear of a decoder block is one whose packed weight is elsewhere; see `Strategy`.

    `placement` says where each layer lives. Raises `UserError` for a demand, which only a folder of neurons or experts
    takes, for a store of another model or of integers without scales, for a map of another number of layers or on a
    GPU that does not compute, and for a budget that is too small.
    """

    def __init__(self, opening: Opening):
        store, device, budgets = opening.store, opening.device, opening.budgets
        usual = usual_method(favourite(store.variants), opening.options.on_gpu)
        options = replace(opening.options, method=opening.options.method or usual)
        if options.demand is not None:
            raise UserError(f"{store.folder} holds whole layers, no neurons or experts: leave demand out")
        way, self._opening = options.way, opening
        if options.verify:
            store.verify_files()
        self.model = opening.skeleton(lambda model: store.check_fits(model, way.stored.format))
        layers = store.layers_of(way.stored.format)
        for run in (run for layer in layers for run in layer.ops.values()):
            if not (run.scales_dtype or run.dtype).is_floating_point:
                raise UserError(
                    f"{store.folder}: {run.label} is {run.dtype} without scales, which tells no weight; pack the model "
                    f"with --int8, or its weights by `Scaled.encode`"
                )
        fixed = {"scratch": scratch_bytes(layers, way), "rest": opening.rest_bytes}
        self.placement = options.placement or placed(layers, way, budgets, fixed)
        if len(self.placement.tiers) != len(layers) or (self.placement.device and not options.on_gpu):
            where = "on the device, in DRAM and" if options.on_gpu else "in DRAM and"
            raise UserError(f"{self.placement}: expected {len(layers)} layers {where} in storage together")
        budgets[device.tier].take(**fixed)
        if options.on_gpu:  # each tensor is read into DRAM first
            budgets["dram"].check(rest=max((run.nbytes for run in store.index.rest), default=0))
        if options.verify:  # this takes long, so it is the last check
            store.verify(way.stored.format)
        self._packed, self._scratch_bytes = way.stored.used_packed, fixed["scratch"]
        self.by_token = self._packed and isinstance(device, Cpu)
        self._source, self.mode = _source(opening, Plan(layers, self.placement.tiers, way), options.reader)
        self._layer: tuple[int, Mapping[str, Packed]] | None = None
        opening.stack.callback(setattr, self, "_layer", None)

    def take_over(self) -> None:
        """Replace the linears of the decoder."""
        recorder, device = self._opening.recorder, self._opening.device
        scratch = device.empty(self._scratch_bytes)

        def replacing(linear: nn.Linear, name: str, number: int) -> OffloadedLinear:
            fetch = partial(self.weight, number, name)
            stays = self.placement.tiers[number] != "storage"
            return OffloadedLinear(linear, name, number, fetch, scratch, self._packed, recorder, device, stays)

        blocks = decoder_blocks(self.model)
        for number, block in enumerate(blocks):
            for name, linear in decoder_linears(block).items():
                block.set_submodule(name, replacing(linear, name, number))
        if rows := self._opening.store.head_rows:
            parts = [replacing(part, HEAD, at) for at, part in enumerate(head_parts(self.model, rows), len(blocks))]
            replace_head(self.model, parts)

    def weight(self, number: int, name: str) -> Packed:
        """The packed weight of a linear, good until one of another layer is asked for."""
        if self._layer is None or self._layer[0] != number:
            self._layer = None  # the next line may raise
            self._layer = number, self._source.layer(number)
        return self._layer[1][name]

    def settle(self, tokens: int) -> None:
        """Read ahead for the next pass while something else computes."""
        self._layer = None
        if isinstance(self._source, Streamer):
            self._source.go_on()


def _source(opening: Opening, plan: Plan, reader: str | None) -> tuple[Streamer | Uploader, str]:
    """The streamer of the layers, and the mode of its reads."""
    stack, store, form, direct = opening.stack, opening.store, plan.way.stored.format, None
    if plan.way.path == "direct":
        direct, reader = stack.enter_context(open_reader(reader, store, form)), None
    files = stack.enter_context(open_reader(reader, store, form))
    if plan.way.device == "cpu":
        streamer = Streamer(plan, files, opening.budgets["dram"], opening.recorder)
        return stack.enter_context(streamer), files.mode
    uploader = Uploader(plan, opening.device, files, direct, opening.budgets, opening.recorder)
    return stack.enter_context(uploader), (direct or files).mode
