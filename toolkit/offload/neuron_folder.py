"""From the name of a model to a folder that `NeuronModel` runs."""

from pathlib import Path

import torch
from torch import nn

from toolkit.activations.recording import record
from toolkit.activations.thresholds import Magnitudes
from toolkit.activations.trace import Trace
from toolkit.errors import UserError
from toolkit.models import fast_dtype, load_model
from toolkit.pruning.calibration import Calibration
from toolkit.storage.neuron_packing import THRESHOLDS, pack_neurons
from toolkit.text import load_tokens


def make_folder(
    name: str, folder: Path, zeros: float, calibration: Calibration, dtype: torch.dtype | None = None
) -> tuple[nn.Module, object]:
    """Write a model by neuron, with thresholds that set a share of each layer's outputs to zero on calibration text.

    A model that has thresholds of its own keeps them; with `zeros` of 0 all are 0. Returns the model and its tokenizer.
    Raises what `load_model`, `Magnitudes` and `pack_neurons` raise, and `UserError` for a share outside [0, 1).
    """
    if not 0 <= zeros < 1:
        raise UserError(f"share of zeros {zeros}: expected at least 0 and less than 1")
    model, tokenizer = load_model(name, dtype or fast_dtype())
    tokens = load_tokens(calibration.corpus, tokenizer, "calibration")
    cut = {"windows": calibration.windows, "sequence_length": calibration.sequence_length}
    if (own := getattr(model.config, THRESHOLDS, None)) is not None:
        thresholds = torch.tensor(own)
    else:
        thresholds = Magnitudes.measure(model, tokens, **cut).thresholds(zeros)
    trace = record(model, name, tokens, calibration.corpus, thresholds, **cut)
    pack_neurons(model, folder, name, tokenizer, thresholds.tolist(), neurons_a_token(trace))
    return model, tokenizer


def neurons_a_token(trace: Trace) -> list[int]:
    """How many neurons of each layer a token needs on average, rounded up."""
    tokens = trace.tokens.numel()
    return [-(-int(trace.active(layer).sum()) // tokens) for layer in range(trace.layers)]
