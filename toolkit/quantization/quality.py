"""The perplexity of pruned models in int8, with smoothing and without, as a tidy table."""

import pandas as pd
from torch import nn

from toolkit.evaluation import perplexity
from toolkit.pruning import load_pruned
from toolkit.quantization.smoothed import load_smoothed
from toolkit.quantization.smoothquant import ALPHA, check_alpha, int8_activations, round_to_int8
from toolkit.text import load_tokens

INT8 = "int8"


def int8_quality(
    model_name: str,
    corpus: str,
    calibration_windows: int | None = None,
    evaluation_windows: int | None = None,
    sequence_length: int = 1024,
    alpha: float = ALPHA,
    method: str = "wanda",
    seed: int = 0,
) -> pd.DataFrame:
    """A model pruned to 50 %, then its weights in int8, then its activations too: plain, and smoothed first.

    Columns: model, method, weights and activations (their types), smoothed, perplexity, standard_error, windows,
    sequence_length, over_pruned (the perplexity over that of the pruned model), evidence. All on the same windows.
    Activations in int8 are simulated (`int8_activations`). Raises what `load_smoothed` and `perplexity` raise.
    """
    check_alpha(alpha)
    calibration = {"corpus": corpus, "windows": calibration_windows, "sequence_length": sequence_length, "seed": seed}
    rows = []

    def measure(model: nn.Module, smoothed: bool, weights: str, activations: str) -> None:
        lost = perplexity(model, tokens, sequence_length, evaluation_windows)
        labels = {"weights": weights, "activations": activations, "smoothed": smoothed}
        rows.append(
            labels | {"perplexity": float(lost), "standard_error": lost.standard_error, "windows": lost.windows}
        )

    for smoothed in (False, True):
        load = load_smoothed if smoothed else load_pruned
        model, tokenizer, *_ = load(model_name, method, **({"alpha": alpha} if smoothed else {}), **calibration)
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
