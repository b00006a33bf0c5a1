"""Quantised models, made once and kept under `data/cache/`, a block at a time."""

import json
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.cache import cached
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.progress import progress
from toolkit.pruning.calibration import DEFAULT, Calibration, checked_windows
from toolkit.pruning.pruned import is_followed, made_by, settings_of, weights_sha256
from toolkit.quantization.layerwise import Block, Matrix, QuantisedLayer, Quantiser, quantise_blocks
from toolkit.text import load_tokens

STATISTICS = "statistics.json"


@dataclass(frozen=True, eq=False)
class QuantisedModel:
    """A model whose decoder linears hold decoded weights, and where the quantised matrices are kept."""

    model: nn.Module
    tokenizer: object
    statistics: list[QuantisedLayer]
    """One record per linear, in the model's order."""
    quantiser: Quantiser
    folders: tuple[Path, ...]
    """One for each decoder block."""

    def matrices(self, number: int) -> dict[str, Matrix]:
        """The quantised matrices of a decoder block, by the linear's dotted name inside it."""
        linears = decoder_linears(decoder_blocks(self.model)[number])
        return {op: _matrix(self.folders[number], op, linear, self.quantiser) for op, linear in linears.items()}

    @property
    def bits_per_weight(self) -> float:
        """All stored bits of the decoder linears over their weights; embeddings and head are not counted."""
        return 8 * sum(of.nbytes for of in self.statistics) / sum(of.rows * of.columns for of in self.statistics)


def load_quantised(
    model_name: str,
    quantiser: Quantiser,
    calibration: Calibration = DEFAULT,
    dtype: torch.dtype | None = None,
) -> QuantisedModel:
    """A quantised model. The first call makes it, later ones read it. One that was interrupted goes on at its block.

    Args:
        model_name: as `load_model` takes it.
        quantiser: with its settings, such as `SpQR(outliers=0.02)`.
        calibration: the windows.
        dtype: of weights and activations; None for the quickest on this machine.

    The key covers the dense weights, the arguments, the quantiser's settings and its code. A quantiser that is defined
    in a notebook's cell works anew at each call, since no change of it would be seen. Raises `UserError` as
    `load_model`, `load_tokens` and `checked_windows` do, before the work starts, and as `quantise_blocks` does.
    """
    model, tokenizer = load_model(model_name, dtype or fast_dtype())
    return quantise_loaded(model, tokenizer, model_name, quantiser, calibration)


def quantise_loaded(
    model: nn.Module,
    tokenizer: object,
    model_name: str,
    quantiser: Quantiser,
    calibration: Calibration = DEFAULT,
) -> QuantisedModel:
    """Quantise a model that `load_model` gave, in place, as `load_quantised` does."""
    draw = lambda: calibration.draw(load_tokens(calibration.corpus, tokenizer, "calibration"))  # noqa: E731
    work = _Work(model, quantiser, draw)
    key = {"model": model_name, "quantiser": type(quantiser).__name__, "settings": settings_of(quantiser)}
    key |= asdict(calibration) | {"dtype": str(model.dtype), "weights_sha256": weights_sha256(model)}
    code, fresh = made_by(__name__, quantiser, ("toolkit.pruning.layerwise",)), not is_followed(quantiser)
    blocks, folders = decoder_blocks(model), []
    with closing(work), progress(f"quantising by {type(quantiser).__name__}", len(blocks), "blocks") as bar:
        for number, block in enumerate(blocks):
            make = lambda folder, number=number: _save(folder, work.block(number))  # noqa: E731
            folders.append(cached("quantised", key | {"block": number}, code, make, fresh))
            if work.latest != number:  # a block that was quantised just now holds its decoded weights
                _restore(folders[-1], block, quantiser)
            bar.update()
    return QuantisedModel(model, tokenizer, [of for at in folders for of in _statistics(at)], quantiser, tuple(folders))


class _Work:
    """Quantises the blocks that are asked for, whose predecessors are quantised, and mostly one after the other."""

    def __init__(self, model: nn.Module, quantiser: Quantiser, draw: Callable[[], Tensor]):
        self._model, self._quantiser, self._draw = model, quantiser, draw
        self._blocks: Generator[Block, None, None] | None = None
        self.latest: int | None = None  # the block that was quantised last

    def block(self, number: int) -> Block:
        if self._blocks is None or self.latest != number - 1:
            self.close()
            windows = checked_windows(self._model, self._draw())
            self._blocks = quantise_blocks(self._model, self._quantiser, windows, first=number)
        made = next(self._blocks)
        self.latest = number
        return made

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()


def _save(folder: Path, block: Block) -> None:
    from safetensors.torch import save_file

    for op, matrix in block.matrices.items():
        save_file(matrix.tensors, _file(folder, op))
    (folder / STATISTICS).write_text(json.dumps([asdict(of) for of in block.statistics], indent=1), encoding="utf-8")


@torch.no_grad()
def _restore(folder: Path, block: nn.Module, quantiser: Quantiser) -> None:
    for op, linear in decoder_linears(block).items():
        linear.weight.copy_(_matrix(folder, op, linear, quantiser).decode())


def _matrix(folder: Path, op: str, linear: nn.Linear, quantiser: Quantiser) -> Matrix:
    from safetensors.torch import load_file

    return quantiser.makes.of_tensors(tuple(linear.weight.shape), load_file(_file(folder, op)))


def _statistics(folder: Path) -> list[QuantisedLayer]:
    return [QuantisedLayer(**of) for of in json.loads((folder / STATISTICS).read_text(encoding="utf-8"))]


def _file(folder: Path, op: str) -> Path:
    return folder / f"{op}.safetensors"
