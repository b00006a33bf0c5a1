"""Pruned models, smoothed for int8. The factors are made once and kept under `data/cache/`."""

from dataclasses import asdict
from pathlib import Path

from torch import nn

from toolkit import sources
from toolkit.cache import cached
from toolkit.pruning import load_pruned
from toolkit.pruning.calibration import DEFAULT, Calibration
from toolkit.pruning.changed import weights_sha256
from toolkit.quantization.smoothquant import ALPHA, check_alpha, fold, smoothing_factors
from toolkit.text import load_tokens

FACTORS = "factors.safetensors"
# what decides the factors, beside the weights
CODE = ("toolkit.quantization.smoothquant", "toolkit.pruning.calibration", "toolkit.text.corpora")


def load_smoothed(
    model_name: str,
    method: str = "wanda",
    alpha: float = ALPHA,
    calibration: Calibration = DEFAULT,
    **pruning: object,
) -> tuple[nn.Module, object]:
    """The model that `load_pruned` gives, smoothed, and its tokenizer.

    Its weights are not in int8 yet: `round_to_int8` rounds them in place, `Scaled.encode` packs them. Smoothing and
    pruning see the same windows. `alpha` is as in `smooth`, the rest as in `load_pruned`; errors are those of both.
    """
    check_alpha(alpha)
    model, tokenizer, _ = load_pruned(model_name, method, calibration=calibration, **pruning)

    def make(folder: Path) -> None:
        from safetensors.torch import save_file

        windows = calibration.draw(load_tokens(calibration.corpus, tokenizer, "calibration"))
        save_file(smoothing_factors(model, windows, alpha), folder / FACTORS)

    key = {"model": model_name, "alpha": alpha, "weights_sha256": weights_sha256(model)} | asdict(calibration)
    code = sources.dependencies(*CODE)
    fold(model, _factors(cached("smoothed", key, code, make)))
    return model, tokenizer


def _factors(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / FACTORS)
