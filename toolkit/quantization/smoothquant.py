"""SmoothQuant: Xiao et al., "Accurate and Efficient Post-Training Quantization for Large Language Models", ICML 2023.

Factors move large values from the channels of the activations to the weights: a norm is divided by them, and the
linears that read it are multiplied. Linears that read no norm (o_proj and down_proj, or out_proj and fc2) stay as they
are, as in the method's own release.

Wanda's scores |W_ij|·‖X_j‖ keep their values when channel j goes from X to W, so smoothing and pruning may come in
either order (but for rounding). Here pruning comes first: factors then belong to the weights that are left.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.absmax import absmax_int8, dequantise, row_scales
from toolkit.cache import kept_folder
from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.cutting import attached
from toolkit.models.streams import open_stream, run_decoder
from toolkit.progress import progress
from toolkit.sparsity.calibration import DEFAULT, Calibration, checked_windows
from toolkit.sparsity.changed import LOADING, load_pruned, weights_sha256
from toolkit.sparsity.layerwise import Changing, WeightChange
from toolkit.sparsity.treatment import joined, part_of

ALPHA = 0.5  # for most models, section 4.1
PROBE_TOKENS = 8
FACTORS = "factors.safetensors"


def check_alpha(alpha: float) -> None:
    """Raise `UserError` for an alpha outside [0, 1]."""
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 <= alpha <= 1:
        raise UserError(f"alpha {alpha!r} is out of range; expected a number from 0 to 1, such as {ALPHA}")


@torch.no_grad()
def smooth(model: nn.Module, calibration: Tensor, alpha: float = ALPHA) -> dict[str, Float[Tensor, " channels"]]:
    """Move the activations' outliers into the weights, in place; return the factors by the norm's name.

    `calibration` is as in `prune`; `alpha`, 0 to 1, is the share of the difficulty that goes to the weights.
    The model computes the same function as before, up to rounding. Raises what `smoothing_factors` and `fold` raise.
    """
    factors = smoothing_factors(model, calibration, alpha)
    fold(model, factors)
    return factors


def load_smoothed(
    model_name: str,
    method: str = "wanda",
    alpha: float = ALPHA,
    calibration: Calibration = DEFAULT,
    **pruning: object,
) -> tuple[nn.Module, object]:
    """The model that `load_pruned` gives, smoothed, and its tokenizer. The factors are made once and kept.

    Its weights are not in int8 yet: `round_to_int8` rounds them in place, `Scaled.encode` packs them. Smoothing and
    pruning see the same windows. `alpha` is as in `smooth`, the rest as in `load_pruned`; errors are those of both.
    """
    from safetensors.torch import load_file

    check_alpha(alpha)
    model, tokenizer, _ = load_pruned(model_name, method, calibration=calibration, **pruning)
    fold(model, load_file(_keep_factors(model, tokenizer, alpha, calibration) / FACTORS))
    return model, tokenizer


@kept_folder(
    "smoothed",
    without=("toolkit.sparsity.methods", *LOADING),
    key=lambda model, tokenizer: {"model": weights_sha256(model), "tokenizer": type(tokenizer).__name__},
)
def _keep_factors(folder: Path, model: nn.Module, tokenizer: object, alpha: float, calibration: Calibration) -> None:
    from safetensors.torch import save_file

    windows = calibration.draw_from_corpus(tokenizer)
    save_file(smoothing_factors(model, windows, alpha), folder / FACTORS)


@torch.no_grad()
def smoothing_factors(
    model: nn.Module, calibration: Tensor, alpha: float = ALPHA
) -> dict[str, Float[Tensor, " channels"]]:
    """s_j = max|X_j|^alpha / max|W_j|^(1 − alpha) (equation 4), float32, by the norm's name; the model stays as it is.

    max|W_j| is over all linears that read the norm. A channel that is always zero on either side keeps factor 1.
    Raises `UserError` for an alpha outside [0, 1], tokens that don't fit the model, activations that are not finite, or
    a model none of whose decoder linears reads a norm.
    """
    check_alpha(alpha)
    windows = checked_windows(model, calibration)
    found = groups(model)
    largest: dict[str, Tensor] = {}  # magnitude of each channel of a norm's outputs

    norms = {model.get_submodule(name): name for name in found}

    def see(norm: nn.Module, args: tuple, output: Tensor) -> None:
        _note_largest(largest, norms[norm], args, output)

    with (
        attached([norm.register_forward_hook(see) for norm in norms]),
        progress("calibrating SmoothQuant", len(windows), "windows") as bar,
    ):
        for window in windows:
            run_decoder(model, window)
            bar.update()
    if wrong := next((name for name, seen in largest.items() if not seen.isfinite().all()), None):
        raise _not_finite(wrong, model.dtype)
    of_linears = {name: [one.weight.float().abs().amax(dim=0) for one in linears] for name, linears in found.items()}
    return {name: factors(largest[name], torch.stack(of).amax(dim=0), alpha) for name, of in of_linears.items()}


def factors(
    activations: Float[Tensor, " channels"], weights: Float[Tensor, " channels"], alpha: float
) -> Float[Tensor, " channels"]:
    """Equation 4, of the largest magnitudes of each channel; 1 where one of them is zero."""
    ratio = activations.pow(alpha) / weights.pow(1 - alpha)
    return ratio.where((activations > 0) & (weights > 0), 1)


@torch.no_grad()
def fold(model: nn.Module, factors: Mapping[str, Float[Tensor, " channels"]]) -> None:
    """Divide norms by their factors and multiply the columns of the linears that read them (equation 3), in place.

    Zeros stay zeros. Raises `UserError` if a block does not add what it added before, which happens where something
    other than linears reads a norm, or a norm does more than multiply; the model must be loaded anew then.
    """
    found, calls = groups(model), []
    keep = lambda *call: calls.append(call)  # noqa: E731
    with attached([block.register_forward_hook(keep, with_kwargs=True) for block in decoder_blocks(model)]):
        run_decoder(model, _probe(model))
    for name, factor in factors.items():
        _fold(model.get_submodule(name), found[name], factor)
    _check_folded(model, [_change(*call) for call in calls])


def _note_largest(largest: dict, norm: object, _: tuple, output: Tensor) -> None:
    """Note the largest magnitude of each channel of a norm's outputs."""
    seen = output.float().abs().flatten(0, -2).amax(dim=0)
    largest[norm] = torch.maximum(largest.get(norm, seen), seen)


def _not_finite(norm: str, dtype: torch.dtype) -> UserError:
    return UserError(f"outputs of {norm} are not finite in {dtype}; load the model in bfloat16 or float32")


def _fold(norm: nn.Module, readers: Iterable[nn.Linear], factor: Tensor) -> None:
    for parameter in norm.parameters():  # weight, and bias if there is one
        parameter.div_(factor)
    for linear in readers:
        linear.weight.mul_(factor)


def _check_folded(model: nn.Module, changes: Iterable[float]) -> None:
    """Raise `UserError` for a relative change of what blocks add that rounding does not explain."""
    change = max(changes)
    if not change < torch.finfo(model.dtype).eps ** 0.5:
        raise UserError(
            f"smoothing changes what blocks of {type(model).__name__} add, by {change:.0%}: not only linears read "
            "their norms, or these do not just multiply; load it anew and quantise it without smoothing"
        )


def _change(block: nn.Module, args: tuple, kwargs: Mapping[str, object], output: Tensor | tuple) -> float:
    """The relative change of a block's contribution. Its input is left out: it is so large that it hides a wrong
    fold."""
    before, after = map(_hidden, (output, block(*args, **kwargs)))
    return float((after - before).norm() / (before - _hidden(args)).norm())


def groups(model: nn.Module) -> dict[str, list[nn.Linear]]:
    """The linears that read each norm of the decoder blocks, by its name. One reads it if its input is its output.

    Raises `UserError` if there is none.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = decoder_blocks(model)
    linears = [linear for block in blocks for linear in decoder_linears(block).values()]
    readers = _readers(_norms(blocks), linears, partial(run_decoder, model, _probe(model)))
    if not readers:
        raise _nothing_to_smooth(model)
    return {names[norm]: found for norm, found in readers.items()}


def _readers(
    norms: Iterable[nn.Module], linears: Iterable[nn.Linear], run: Callable[[], object]
) -> dict[nn.Module, list[nn.Linear]]:
    """The linears that read each norm in a run; norms without readers are left out."""
    readers: dict[nn.Module, list[nn.Linear]] = {}
    made: list[tuple[nn.Module, Tensor]] = []  # outputs are kept alive, so that no two have the same identity

    def read(linear: nn.Module, args: tuple) -> None:
        norm = next((norm for norm, output in made if output is args[0]), None)
        if norm is not None:
            readers.setdefault(norm, []).append(linear)

    handles = [norm.register_forward_hook(lambda *call: made.append((call[0], call[2]))) for norm in norms]
    handles += [linear.register_forward_pre_hook(read) for linear in linears]
    with attached(handles):
        run()
    return readers


def _nothing_to_smooth(model: nn.Module) -> UserError:
    return UserError(f"no decoder linear of {type(model).__name__} reads a norm: there is nothing to smooth")


class Smoothing(Changing):
    """The change of each block's linears, and then the smoothing of the changed block.

    A block's factors come from the windows' activations in it, as `smoothing_factors` has them. Its outputs stay as
    they were, up to rounding, so the next block sees the same inputs. Raises `UserError` as `fold` does.
    """

    def __init__(self, change: WeightChange | None, windows: Tensor, alpha: float = ALPHA):
        check_alpha(alpha)
        super().__init__(change, windows, streamed=True)
        self._alpha, self._smoothed = alpha, 0

    def begin(self, model: nn.Module) -> None:
        """Prepare for a model."""
        super().begin(model)
        self._model = model
        self._probe = open_stream(model, _probe(model)[None])

    def _advance(self, number: int, block: nn.Module) -> None:
        (call,) = self._probe.calls
        norms, linears = _norms(nn.ModuleList([block])), decoder_linears(block).values()
        found = _readers(norms, linears, call)
        largest: dict[nn.Module, Tensor] = {}
        with attached([norm.register_forward_hook(partial(_note_largest, largest)) for norm in found]):
            self._stream.advance()
        hidden, before = call.args[0].clone(), _hidden(call())
        self._probe.advance()
        for norm, readers in found.items():
            if not largest[norm].isfinite().all():
                raise _not_finite(self._names[norm], self._dtype)
            weights = torch.stack([linear.weight.float().abs().amax(dim=0) for linear in readers]).amax(dim=0)
            _fold(norm, readers, factors(largest[norm], weights, self._alpha))
        after = _hidden(partial(call.func, hidden, *call.args[1:], **call.keywords)())
        _check_folded(self._model, [float((after - before).norm() / (before - hidden.float()).norm())])
        self._smoothed += len(found)
        if number == self._last and not self._smoothed:
            raise _nothing_to_smooth(self._model)

    @property
    def state(self) -> dict[str, Tensor]:
        """Both streams."""
        streams = {"windows": self._stream.state, "probe": self._probe.state}
        return joined(streams) | {"smoothed": torch.tensor(self._smoothed)}

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Put both streams before a block."""
        for which, stream in {"windows": self._stream, "probe": self._probe}.items():
            stream.restore(part_of(state, which), number)
        self._smoothed = int(state["smoothed"])

    def close(self) -> None:
        """End both streams."""
        super().close()
        self._probe.close()


@torch.no_grad()
def round_to_int8(model: nn.Module) -> None:
    """Round every decoder linear's weight to int8 and back, in its own type: the values of a decoded packed weight."""
    blocks = decoder_blocks(model)
    with progress("rounding to int8", len(blocks), "blocks") as bar:
        for block in blocks:
            for linear in decoder_linears(block).values():
                scales = row_scales(linear.weight)
                dequantise(absmax_int8(linear.weight, scales), scales, out=linear.weight)
            bar.update()


@contextmanager
def int8_activations(model: nn.Module) -> Iterator[None]:
    """Inside the block, round the inputs of decoder linears to int8, each token by its own largest magnitude.

    This simulates the paper's setting "per-token, dynamic" (section 3): products are taken in the model's own type.
    """

    def rounded(_: nn.Module, args: tuple) -> Tensor:
        tokens = args[0].reshape(-1, args[0].shape[-1])
        scales = row_scales(tokens)
        return dequantise(absmax_int8(tokens, scales), scales).view_as(args[0])

    linears = [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]
    with attached([linear.register_forward_pre_hook(rounded) for linear in linears]):
        yield


def _norms(blocks: nn.ModuleList) -> list[nn.Module]:
    """Modules that hold vectors alone, a weight among them."""
    held = {module: dict(module.named_parameters(recurse=False)) for module in blocks.modules()}
    return [m for m, own in held.items() if "weight" in own and all(p.ndim == 1 for p in own.values())]


def _hidden(output: Tensor | tuple) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).float()


def _probe(model: nn.Module) -> Tensor:
    """A few tokens that any vocabulary has."""
    return torch.arange(PROBE_TOKENS) % model.get_input_embeddings().num_embeddings
