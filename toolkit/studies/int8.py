"""The perplexity of pruned models in int8, with smoothing and without, as a tidy table."""

import pandas as pd
from torch import nn

from toolkit.evaluation import perplexity
from toolkit.pruning import Calibration, load_pruned
from toolkit.quantization.smoothed import load_smoothed
from toolkit.quantization.smoothquant import ALPHA, check_alpha, int8_activations, round_to_int8
from toolkit.text import load_tokens

INT8 = "int8"


def int8_quality(
    model_name: str,
    calibration: Calibration,
    evaluation_windows: int | None = None,
    alpha: float = ALPHA,
    method: str = "wanda",
) -> pd.DataFrame:
    """A model pruned to 50 %, then its weights in int8, then its activations too: plain, and smoothed first.

    Columns: model, method, weights and activations (their types), smoothed, perplexity, standard_error, windows,
    sequence_length, over_pruned (the perplexity over that of the pruned model), evidence. All on the same windows,
    of the corpus and the length of the calibration.
    Activations in int8 are simulated (`int8_activations`). Raises what `load_smoothed` and `perplexity` raise.
    """
    check_alpha(alpha)
    corpus, sequence_length = calibration.corpus, calibration.sequence_length
    rows = []

    def measure(model: nn.Module, smoothed: bool, weights: str, activations: str) -> None:
        lost = perplexity(model, tokens, sequence_length, evaluation_windows)
        labels = {"weights": weights, "activations": activations, "smoothed": smoothed}
        rows.append(
            labels | {"perplexity": float(lost), "standard_error": lost.standard_error, "windows": lost.windows}
        )

    for smoothed in (False, True):
        load = load_smoothed if smoothed else load_pruned
        model, tokenizer, *_ = load(
            model_name, method, **({"alpha": alpha} if smoothed else {}), calibration=calibration
        )
        tokens = load_tokens(corpus, tokenizer, "evaluation")
        dtype = str(model.dtype).removeprefix("torch.")
        if not smoothed:
            measure(model, smoothed, dtype, dtype)
        round_to_int8(model)
        measure(model, smoothed, INT8, dtype)
        with int8_activations(model):
            measure(model, smoothed, INT8, INT8)
    table = pd.DataFrame(rows).assign(over_pruned=lambda found: found["perplexity"] / found["perplexity"].iloc[0])
    return table.assign(model=model_name, method=method, sequence_length=sequence_length, evidence="measured")
