"""Pruned and quantised models, made once and kept under `data/cache/`, a block at a time."""

import hashlib
import inspect
import json
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from toolkit import sources
from toolkit.cache import cached
from toolkit.files import file_sha256
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.sparsity.calibration import DEFAULT, Calibration
from toolkit.sparsity.layerwise import Block, LayerStatistics, Matrix, Pruning, WeightChange, change_blocks

DENSE = "dense"
# left out of what a result depends on, since its key has the weights
LOADING = tuple(f"toolkit.models.{name}" for name in ("loading", "named", "dtype"))
MATRICES, STATISTICS = "matrices.safetensors", "statistics.json"


@dataclass(frozen=True, eq=False)
class ChangedModel:
    """A model whose decoder linears were changed, and where their matrices are kept."""

    model: nn.Module
    tokenizer: object
    statistics: list[LayerStatistics]
    """One record per linear, in the model's order."""
    change: WeightChange
    folders: tuple[Path, ...]
    """One for each decoder block."""

    def matrices(self, number: int) -> dict[str, Matrix]:
        """The stored matrices of a decoder block, by the linear's dotted name inside it."""
        return _matrices(self.folders[number], decoder_blocks(self.model)[number], self.change)

    @property
    def bits_per_weight(self) -> float:
        """All stored bits of the decoder linears over their weights; embeddings and head are not counted."""
        return 8 * sum(of.nbytes for of in self.statistics) / sum(of.rows * of.columns for of in self.statistics)


def load_pruned(
    model_name: str,
    method: str = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    calibration: Calibration = DEFAULT,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, object, list[LayerStatistics]]:
    """A pruned model, its tokenizer and one record per pruned linear, kept as `load_changed` does.

    `method`, `sparsity` and `pattern` are as in `prune`, or `method` is "dense": the unpruned model without records.
    """
    if method == DENSE:
        return *load_model(model_name, dtype or fast_dtype()), []
    made = load_changed(model_name, Pruning.by(method, sparsity, pattern), calibration, dtype)
    return made.model, made.tokenizer, made.statistics


def load_changed(
    model_name: str, change: WeightChange, calibration: Calibration = DEFAULT, dtype: torch.dtype | None = None
) -> ChangedModel:
    """A changed model. The first call makes it, later calls read it. After an interruption it continues at its block.

    Args:
        model_name: as `load_model` takes it.
        change: with its settings, such as `SpQR(outliers=0.02)` or `Pruning.by("wanda", 0.6)`.
        calibration: the text that the change sees; one without a `statistic` uses none.
        dtype: of weights and activations; None for the quickest on this machine.

    The key covers the dense weights, the arguments, the settings of the change and its code, but not the code of other
    methods. A method that is defined in a notebook's cell runs at each call, since changes of its code cannot be seen.
    Raises `UserError` as `load_model`, `load_tokens` and `checked_windows` do, before the work starts, and as
    `change_blocks` does.
    """
    model, tokenizer = load_model(model_name, dtype or fast_dtype())
    return change_loaded(model, tokenizer, model_name, change, calibration)


def change_loaded(
    model: nn.Module, tokenizer: object, model_name: str, change: WeightChange, calibration: Calibration = DEFAULT
) -> ChangedModel:
    """Change a model that `load_model` gave, in place, as `load_changed` does."""
    key = {"model": model_name, "dtype": str(model.dtype), "weights_sha256": weights_sha256(model)}
    key |= {"change": type(change).__name__, "settings": settings_of(change)}
    key |= asdict(calibration) if change.statistic else {}
    code = made_by(__name__, change, () if change.statistic else ("toolkit.quality.corpora",))
    blocks, folders, latest = decoder_blocks(model), [], None  # the block that was changed last
    work: Generator[Block, None, None]

    def make(folder: Path) -> None:
        nonlocal work, latest
        number = len(folders)
        if latest is None or latest != number - 1:  # those in between were kept already
            windows = calibration.draw_from_corpus(tokenizer) if change.statistic else None
            blocks_from = change_blocks(model, change, windows, first=number)
            work = opened.enter_context(closing(blocks_from))
        _save(folder, next(work))
        latest = number

    with ExitStack() as opened:
        for number, block in enumerate(blocks):
            folders.append(cached("changed", key | {"block": number}, code, make, fresh=not is_followed(change)))
            if latest != number:  # a block that was changed just now holds its new weights
                _restore(folders[-1], block, change)
    return ChangedModel(model, tokenizer, [of for at in folders for of in _statistics(at)], change, tuple(folders))


def _save(folder: Path, block: Block) -> None:
    from safetensors.torch import save_file

    named = {op: matrix.tensors for op, matrix in block.matrices.items()}
    save_file({f"{op}:{name}": part for op, parts in named.items() for name, part in parts.items()}, folder / MATRICES)
    (folder / STATISTICS).write_text(json.dumps([asdict(of) for of in block.statistics], indent=1), encoding="utf-8")


@torch.no_grad()
def _restore(folder: Path, block: nn.Module, change: WeightChange) -> None:
    linears = decoder_linears(block)
    for op, matrix in _matrices(folder, block, change).items():
        linears[op].weight.copy_(matrix.decode())


def _matrices(folder: Path, block: nn.Module, change: WeightChange) -> dict[str, Matrix]:
    from safetensors.torch import load_file

    parts: dict[str, dict] = {}
    for name, tensor in load_file(folder / MATRICES).items():
        op, _, part = name.rpartition(":")
        parts.setdefault(op, {})[part] = tensor
    linears = decoder_linears(block)
    return {op: change.makes.of_tensors(tuple(linear.weight.shape), parts[op]) for op, linear in linears.items()}


def _statistics(folder: Path) -> list[LayerStatistics]:
    return [LayerStatistics(**of) for of in json.loads((folder / STATISTICS).read_text(encoding="utf-8"))]


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of all parameters, since a model folder or hub id may hold other weights tomorrow."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def made_by(module: str, method: object | None, without: Iterable[str] = ()) -> list[Path]:
    """The project files on which the result of a module depends when a method changes a model: `code` for `cached`.

    The modules of other methods are left out, and those that load the model, whose weights belong to the key.
    """
    own = [part.__module__ for part in _parts(method)]
    return sources.dependencies(module, *own, without=("toolkit.sparsity.methods", *LOADING, *without))


def settings_of(method: object | None) -> dict[str, object]:
    """A method's part of a key beside the files of `made_by`: its settings, and its file if it is not one of ours."""
    settings = sorted(getattr(method, "__dict__", {}).items())
    found: dict[str, object] = {
        name: [type(of).__name__, settings_of(of)] if callable(of) else repr(of) for name, of in settings
    }
    file = None if _is_ours(method) else _file(method)
    return found | ({"source": file_sha256(file)} if file else {})


def is_followed(method: object | None) -> bool:
    """Whether changes of a method's code can be seen. They cannot in a notebook's cell, so its results are not kept."""
    return all(_is_ours(part) or _file(part) is not None for part in _parts(method))


def _parts(method: object | None) -> list:
    """A method, and one that it holds, as `Pruning` does."""
    return [] if method is None else [method, *filter(callable, getattr(method, "__dict__", {}).values())]


def _is_ours(method: object | None) -> bool:
    return method is None or bool(sources.dependencies(method.__module__))


def _file(method: object) -> Path | None:
    """The file that defines a method, if there is one."""
    with suppress(TypeError, OSError):
        file = Path(inspect.getsourcefile(method if inspect.isfunction(method) else type(method)))
        return file if file.is_file() else None
    return None
