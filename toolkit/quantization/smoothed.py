"""Pruned models, smoothed for int8. The factors are made once and kept under `data/cache/`."""

from pathlib import Path

from torch import nn

from toolkit import sources
from toolkit.cache import cached
from toolkit.pruning import load_pruned
from toolkit.pruning.calibration import draw
from toolkit.pruning.pruned import weights_sha256
from toolkit.quantization.smoothquant import ALPHA, check_alpha, fold, smoothing_factors
from toolkit.text import load_tokens

FACTORS = "factors.safetensors"
# what decides the factors, beside the weights
CODE = ("toolkit.quantization.smoothquant", "toolkit.pruning.calibration", "toolkit.text.corpora")


def load_smoothed(
    model_name: str,
    method: str = "wanda",
    alpha: float = ALPHA,
    corpus: str = "wiki-slice",
    windows: int | None = None,
    sequence_length: int = 1024,
    seed: int = 0,
    **pruning: object,
) -> tuple[nn.Module, object]:
    """The model that `load_pruned` gives, smoothed, and its tokenizer.

    Its weights are not in int8 yet: `round_to_int8` rounds them in place, `Scaled.encode` packs them. The calibration
    windows are those of pruning. `alpha` is as in `smooth`, the rest as in `load_pruned`; errors are those of both.
    """
    check_alpha(alpha)
    calibration = {"corpus": corpus, "windows": windows, "sequence_length": sequence_length, "seed": seed}
    model, tokenizer, _ = load_pruned(model_name, method, **calibration, **pruning)

    def make(folder: Path) -> None:
        from safetensors.torch import save_file

        tokens = draw(load_tokens(corpus, tokenizer, "calibration"), windows, sequence_length, seed)
        save_file(smoothing_factors(model, tokens, alpha, sequence_length=sequence_length), folder / FACTORS)

    key = {"model": model_name, "alpha": alpha, "weights_sha256": weights_sha256(model)} | calibration
    code = sources.dependencies(*CODE)
    fold(model, _factors(cached("smoothed", key, code, make)))
    return model, tokenizer


def _factors(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / FACTORS)
