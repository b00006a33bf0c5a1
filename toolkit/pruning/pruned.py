"""Pruned models, made once and kept under `data/cache/`."""

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from toolkit import sources
from toolkit.cache import cached
from toolkit.errors import unknown
from toolkit.files import file_sha256
from toolkit.models import fast_dtype, load_model
from toolkit.pruning.calibration import DEFAULT, Calibration
from toolkit.pruning.layerwise import LayerStatistics, prune
from toolkit.pruning.methods import METHODS, PruningMethod
from toolkit.sparsity import resolve
from toolkit.text import load_tokens

DENSE = "dense"
WEIGHTS, STATISTICS = "pruned.safetensors", "statistics.json"


def load_pruned(
    model_name: str,
    method: str = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    calibration: Calibration = DEFAULT,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, object, list[LayerStatistics]]:
    """A pruned model, its tokenizer and one record per pruned linear. The first call makes them, later ones read them.

    Args:
        model_name: as `load_model` takes it.
        method: a name in `METHODS`, or "dense" for the unpruned model without records.
        sparsity: the share of zeros, as in `prune`.
        pattern: "N:M", as in `prune`.
        calibration: the text that the method sees; magnitude pruning uses none.
        dtype: of weights and activations; None for the quickest on this machine.

    Only the pruned linears are kept. Their key covers the dense weights, the arguments, the method's settings and its
    code, but not the code of other methods. A method that is defined in a notebook's cell prunes anew at each
    call, since no change of it would be seen.
    Raises `UserError` as `load_model`, `load_tokens` and `prune` do, before the work starts.
    """
    dtype = dtype or fast_dtype()
    if method == DENSE:
        return *load_model(model_name, dtype), []
    _checked(method, sparsity, pattern)
    model, tokenizer = load_model(model_name, dtype)
    return model, tokenizer, prune_loaded(model, tokenizer, model_name, method, sparsity, pattern, calibration)


def prune_loaded(
    model: nn.Module,
    tokenizer: object,
    model_name: str,
    method: str,
    sparsity: float = 0.5,
    pattern: str | None = None,
    calibration: Calibration = DEFAULT,
) -> list[LayerStatistics]:
    """Prune a dense model that `load_model` gave, in place, as `load_pruned` does; one record per pruned linear."""
    sparsity_meant = _checked(method, sparsity, pattern)

    def make(folder: Path) -> None:
        windows = None
        if METHODS[method].statistic:
            windows = calibration.draw(load_tokens(calibration.corpus, tokenizer, "calibration"))
        records = prune(model, method, sparsity, pattern, windows)
        save(folder, model, records)

    key = {"model": model_name, "method": method, "sparsity": sparsity_meant, "pattern": pattern}
    key |= {"dtype": str(model.dtype)}
    if METHODS[method].statistic:
        key |= asdict(calibration)
    key |= {"weights_sha256": weights_sha256(model), "settings": settings_of(METHODS[method])}
    unused = () if METHODS[method].statistic else ("toolkit.text.corpora",)
    code = made_by("toolkit.pruning.pruned", METHODS[method], unused)
    folder = cached("pruned", key, code, make, fresh=not is_followed(METHODS[method]))
    return restore(folder, model)


def _checked(method: str, sparsity: float, pattern: str | None) -> float:
    """The share of zeros that is meant. Raises `UserError` for an unknown method, and as `resolve` does."""
    if method not in METHODS:
        raise unknown("pruning method", method, [*METHODS, DENSE])
    return resolve(sparsity, pattern)[0]


def save(folder: Path, model: nn.Module, records: list[LayerStatistics]) -> None:
    """Write the pruned linears of a model, and their records, into a folder."""
    from safetensors.torch import save_file

    weights = {record.name: model.get_submodule(record.name).weight.detach().contiguous() for record in records}
    save_file(weights, folder / WEIGHTS)
    (folder / STATISTICS).write_text(json.dumps([asdict(record) for record in records], indent=1), encoding="utf-8")


@torch.no_grad()
def restore(folder: Path, model: nn.Module) -> list[LayerStatistics]:
    """Put saved linears into a model, in place; return their records."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a dictionary
            model.get_submodule(name).weight.copy_(weights.get_tensor(name))
    return [LayerStatistics(**record) for record in json.loads((folder / STATISTICS).read_text(encoding="utf-8"))]


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of all parameters, since a model folder or hub id may hold other weights tomorrow."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def made_by(module: str, method: PruningMethod | None, without: Iterable[str] = ()) -> list[Path]:
    """The project files that decide what a module makes of a model that a method prunes: `code` for `cached`.

    The modules of other methods are left out, and those that load the model, whose weights belong to the key.
    """
    own = [method.__module__] if method else []
    return sources.dependencies(module, *own, without=("toolkit.pruning.methods", "toolkit.models.loading", *without))


def settings_of(method: PruningMethod | None) -> dict[str, str]:
    """A method's part of a key beside the files of `made_by`: its settings, and its file if that is not of ours."""
    found = {name: repr(value) for name, value in sorted(getattr(method, "__dict__", {}).items())}
    file = None if _is_ours(method) else _file(method)
    return found | ({"source": file_sha256(file)} if file else {})


def is_followed(method: PruningMethod | None) -> bool:
    """Whether a change of a method's code is seen. It is not in a notebook's cell: nothing is kept of such a method."""
    return _is_ours(method) or _file(method) is not None


def _is_ours(method: PruningMethod | None) -> bool:
    return method is None or bool(sources.dependencies(method.__module__))


def _file(method: PruningMethod) -> Path | None:
    """The file that defines a method, if there is one."""
    with contextlib.suppress(TypeError, OSError):
        file = Path(inspect.getsourcefile(method if inspect.isfunction(method) else type(method)))
        return file if file.is_file() else None
    return None
