"""Run a model over text and record which neurons are active."""

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from toolkit.activations.thresholds import run_decoder, thresholded, watched
from toolkit.activations.trace import Trace, pack
from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.pruning.calibration import checked_windows, cut_windows


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

    Without thresholds they are 0: what a ReLU lets through is active. `name` and `corpus` say in the trace what the
    model and the tokens are. Raises `UserError` for tokens or thresholds that do not fit the model, or an unknown FFN.
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
