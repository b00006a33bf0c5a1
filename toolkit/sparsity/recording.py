"""Run a model over text and record which neurons are active, or which experts its routers choose.

trace = record_routing(model, "smollm2-135m-moe-upcycled", tokens, "wiki-slice", windows=2, sequence_length=256)
overlap(trace, distances=[1, 8])   # of `toolkit.sparsity.statistics`: for experts as for neurons
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor, nn

from toolkit.models.cutting import attached
from toolkit.models.experts import Experts, block_experts, mixtures_by_layer, seen_routing
from toolkit.models.ffn import decoder_ffns
from toolkit.models.streams import open_stream
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows, cut_windows
from toolkit.sparsity.layerwise import Matrix
from toolkit.sparsity.thresholds import run_decoder, thresholded, watched
from toolkit.sparsity.trace import Trace, pack
from toolkit.sparsity.treatment import Treatment


@torch.no_grad()
def record(
    model: nn.Module,
    name: str,
    tokens: object,
    corpus: str,
    thresholds: Float32[Tensor, " layers"] | None = None,
    windows: int | None = None,
    sequence_length: int = 1024,
) -> Trace:
    """The trace of a model's neurons over the first windows of a row of token ids, with the thresholds in place.

    Without thresholds, all are 0: the non-zero outputs of a ReLU are active. `name` and `corpus` say in the trace what
    the model and the tokens are. Raises `UserError` for tokens or thresholds that do not fit the model, or an unknown
    FFN.
    """
    ffns = decoder_ffns(model)
    thresholds = torch.zeros(len(ffns)) if thresholds is None else thresholds
    cut = checked_windows(model, cut_windows(tokens, windows, sequence_length))
    neurons = tuple(ffn.neurons for ffn in ffns)
    bits = tuple(torch.zeros(*cut.shape, -(-count // 8), dtype=torch.uint8) for count in neurons)
    with thresholded(model, thresholds), progress("recording activations", len(cut), "windows") as bar:
        for number, window in enumerate(cut):

            def see(layer: int, outputs: Tensor, number: int = number) -> None:
                bits[layer][number] = pack(outputs.reshape(-1, neurons[layer]) != 0)

            with watched(model, see):
                run_decoder(model, window)
            bar.update()
    return Trace(name, corpus, cut.int(), neurons, bits, thresholds=thresholds.float().cpu())


def mixtures(model: nn.Module) -> list[Experts]:
    """The mixtures of a model in the order of its blocks. Raises `UserError` as `mixtures_by_layer` does."""
    return list(mixtures_by_layer(model).values())


def spread(
    ids: Int64[Tensor, "tokens k"], weights: Float[Tensor, "tokens k"], experts: int
) -> tuple[Bool[Tensor, "tokens experts"], Float32[Tensor, "tokens experts"]]:
    """A router's choice as a row of all experts for each token: which are chosen, and their weights, 0 for others."""
    ids, values = ids.cpu(), weights.cpu().float()
    active = torch.zeros(len(ids), experts, dtype=torch.bool).scatter_(1, ids, True)
    return active, torch.zeros(active.shape).scatter_(1, ids, values)


@torch.no_grad()
def record_routing(
    model: nn.Module,
    name: str,
    tokens: object,
    corpus: str,
    windows: int | None = None,
    sequence_length: int = 1024,
) -> Trace:
    """The routing of a model over the first windows of a row of token ids: a layer of the trace is a mixture.

    `name` and `corpus` say in the trace what the model and the tokens are. An expert is active if the router chooses
    it, also with a weight of 0. Raises `UserError` for a model without experts, or tokens that do not fit it.
    """
    found = mixtures(model)
    cut = checked_windows(model, cut_windows(tokens, windows, sequence_length))
    weights = tuple(torch.zeros(*cut.shape, each.count) for each in found)
    active = tuple(torch.zeros(*cut.shape, each.count, dtype=torch.bool) for each in found)
    with progress("recording routing", len(cut), "windows") as bar:
        for number, window in enumerate(cut):

            def see(layer: int, _: Tensor, ids: Tensor, values: Tensor, number: int = number) -> None:
                active[layer][number], weights[layer][number] = spread(ids, values, found[layer].count)

            with seen_routing(model, see):
                run_decoder(model, window)
            bar.update()
    experts = tuple(each.count for each in found)
    return Trace(name, corpus, cut.int(), experts, tuple(map(pack, active)), "expert", None, weights)


class ExpertUsage(Treatment):
    """Counts which experts of each block the first windows of a row of token ids use; weights stay.

    `shares` are, by block, the shares of tokens that each expert was chosen for.
    """

    def __init__(self, tokens: object, windows: int | None = None, sequence_length: int = 1024):
        self._windows = cut_windows(tokens, windows, sequence_length)
        self.shares: dict[int, Float64[Tensor, " experts"]] = {}

    def begin(self, model: nn.Module) -> None:
        """Prepare for a model. Raises `UserError` for one without experts, or tokens that do not fit it."""
        mixtures(model)
        self._stream = open_stream(model, checked_windows(model, self._windows))

    @torch.no_grad()
    def treat(self, number: int, block: nn.Module) -> Mapping[str, Matrix]:
        """Count a block's experts."""
        experts, chosen = block_experts(block, number), []

        def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            chosen.append(spread(args[1], args[2], experts.count)[0])

        with attached([experts.routed.register_forward_pre_hook(see)] if experts else []):
            self._stream.advance()
        if experts:
            self.shares[number] = torch.cat(chosen).double().mean(0)
        return {}

    @property
    def state(self) -> dict[str, Tensor]:
        """The hidden states; bits are chosen as blocks are written, so shares of written ones are not needed."""
        return self._stream.state

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Put the hidden states before a block."""
        self._stream.restore(state, number)

    def close(self) -> None:
        """End the stream."""
        self._stream.close()
