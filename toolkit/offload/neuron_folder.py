"""Thresholds, predictors and usage of a folder that `toolkit.offload.by_neuron` runs, from calibration text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from toolkit.errors import unknown
from toolkit.models import decoder_blocks
from toolkit.models.activation import activation_name
from toolkit.models.cutting import attached, hook_threshold, thresholds_of
from toolkit.models.ffn import FFN, ffn_of
from toolkit.models.on_demand import present
from toolkit.models.streams import Stream, inference, open_stream
from toolkit.offload.by_neuron import PREDICTORS, USAGE
from toolkit.predictors import STORED, Predictor, Samples, save_predictors, with_limits
from toolkit.predictors.files import parts_of, predictor_of
from toolkit.predictors.low_rank import RANK, LowRank
from toolkit.sparsity import Magnitudes
from toolkit.sparsity.calibration import Calibration, checked_windows, cut_windows
from toolkit.sparsity.layerwise import Matrix
from toolkit.sparsity.statistics import save_usage
from toolkit.sparsity.thresholds import bins_of
from toolkit.sparsity.treatment import Treatment, joined, part_of
from toolkit.storage.neuron_packing import Neurons, check_packable

KINDS = (*STORED, "none")
KEPT = 0.99  # of the magnitudes that limits keep
SAMPLED = 2  # windows at most, on which limits are chosen and neurons are counted


class NeuronFit(Treatment):
    """Fits thresholds and predictors to calibration text, and counts which neurons it uses; weights stay.

    Args:
        name: of the model, which keeps thresholds of its own, if it has any.
        tokens: a row of token ids; the first windows of `calibration` are taken.
        zeros: the share of each layer's outputs that its threshold sets to zero. With 0 all thresholds are 0.
        kind: of predictors, one of `KINDS`.
        calibration: how many windows, and how long they are.

    `thresholds`, `needs` and `files` are complete once all blocks are treated. Raises `UserError` for an unknown kind;
    `begin` raises what `check_packable` raises, `treat` what `Magnitudes` and the predictors raise.
    """

    def __init__(self, name: str, tokens: object, zeros: float, kind: str, calibration: Calibration):
        if kind not in KINDS:
            raise unknown("predictors", kind, KINDS)
        self._name, self._zeros, self._kind = name, zeros, kind
        self._windows = cut_windows(tokens, calibration.windows, calibration.sequence_length)
        self._found: list[_Found] = []
        self._generator = torch.Generator().manual_seed(0)

    @property
    def thresholds(self) -> list[float]:
        """Limits of the outputs of each treated block's neurons."""
        return [found.threshold for found in self._found]

    @property
    def needs(self) -> list[int]:
        """How many neurons of each treated block a token needs on average."""
        return [found.need for found in self._found]

    def begin(self, model: nn.Module) -> None:
        """Prepare for a model."""
        check_packable(model)
        self._act, self._own = activation_name(model), thresholds_of(model)
        self._last = len(decoder_blocks(model)) - 1
        windows = checked_windows(model, self._windows)
        trained = self._kind != "none" and STORED[self._kind].trained
        self._measured = open_stream(model, windows) if self._own is None else None
        self._sampled = open_stream(model, windows if trained else windows[:SAMPLED])

    @torch.no_grad()
    def treat(self, number: int, block: nn.Module) -> Mapping[str, Matrix]:
        """Fit a block's threshold and predictor."""
        ffn = ffn_of(block, number)
        limit = self._measure(ffn) if self._own is None else float(self._own[number])
        samples = self._sample(ffn, limit)
        predictor = self._fit(ffn, limit, samples)
        (need,) = neurons_needed(samples, [predictor])
        self._found.append(_Found(limit, need, samples.active(0).float().mean(0), predictor))
        return {}

    def files(self, place: Path) -> None:
        """Write usage and predictors into a folder."""
        save_usage(place / USAGE, self._name, [found.usage for found in self._found])
        if self._kind != "none":
            save_predictors(place / PREDICTORS, self._name, [found.predictor for found in self._found])

    @property
    def state(self) -> dict[str, Tensor]:
        """The streams, and the state of the generator."""
        streams = {name: stream.state for name, stream in self._streams.items()}
        return joined(streams) | {"generator": self._generator.get_state()}

    @property
    def finding(self) -> dict[str, Tensor]:
        """The last block's."""
        return self._found[-1].tensors

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Put the streams before a block."""
        for name, stream in self._streams.items():
            stream.restore(part_of(state, name), number)
        self._generator.set_state(state["generator"])

    def recall(self, number: int, finding: Mapping[str, Tensor]) -> None:
        """Take a block's from the disk: predictors of all blocks may take more memory than a block."""
        self._found[number:] = [_Found.of(finding)]

    @property
    def _streams(self) -> dict[str, Stream]:
        streams = {"measured": self._measured, "sampled": self._sampled}
        return {name: stream for name, stream in streams.items() if stream is not None}

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams.values():
            stream.close()

    def _measure(self, ffn: FFN) -> float:
        counts = bins_of(torch.empty(0))

        def count(_: nn.Module, args: tuple[Tensor]) -> None:
            counts.add_(bins_of(args[0]))

        with attached([ffn.down.register_forward_pre_hook(count)]):
            self._measured.advance()
        return float(Magnitudes(counts[None]).thresholds(self._zeros)[0])

    def _sample(self, ffn: FFN, limit: float) -> Samples:
        """The FFN's inputs and outputs, with the threshold in place."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def keep(parts: list[Tensor], _: nn.Module, args: tuple[Tensor, ...]) -> None:
            parts.append(args[0].reshape(-1, args[0].shape[-1]).clone())

        cut = hook_threshold(ffn, limit)
        watch = ffn.down.register_forward_pre_hook(partial(keep, outputs))
        with attached([cut, watch, ffn.linears[0].register_forward_pre_hook(partial(keep, inputs))]):
            self._sampled.advance()
        norms = ffn.down.weight.detach().float().norm(dim=0).cpu()
        return Samples((torch.cat(inputs),), (torch.cat(outputs),), (norms,), self._windows.shape[1])

    def _fit(self, ffn: FFN, limit: float, samples: Samples) -> Predictor | None:
        if self._kind == "none":
            return None
        kind = STORED[self._kind]
        if kind.trained:
            (predictor,) = LowRank.train(samples, min(RANK, samples.inputs[0].shape[1]), seed=self._generator)
        else:
            predictor = kind.of(ffn, self._act, limit)
        return predictor if kind.in_magnitudes else with_limits([predictor], samples, KEPT)[0]


@dataclass(frozen=True, eq=False)
class _Found:
    """The results of a fit of one block."""

    threshold: float
    need: int
    usage: Tensor
    predictor: Predictor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it; settings of the predictor are JSON in bytes."""
        settings, tensors = parts_of(self.predictor)
        numbers = {"threshold": torch.tensor(self.threshold, dtype=torch.float64), "need": torch.tensor(self.need)}
        text = {"settings": torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)}
        return numbers | text | {"usage": self.usage} | joined({"predictor": tensors})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The same again."""
        settings = json.loads(bytes(tensors["settings"].tolist()))
        predictor = predictor_of(settings, part_of(tensors, "predictor"))
        return cls(float(tensors["threshold"]), int(tensors["need"]), tensors["usage"], predictor)


@dataclass(frozen=True)
class FittedNeurons(Neurons):
    """FFNs as bundles, with what a fit finds while they are written."""

    fit: NeuronFit | None = None

    def about(self, model: nn.Module) -> Mapping[str, object]:
        """The needs."""
        return Neurons(needs=self.fit.needs).about(model)

    def config(self, model: nn.Module):
        """The model's own, with the thresholds."""
        return Neurons(self.fit.thresholds).config(model)


def fit_neurons(
    model: nn.Module, name: str, tokens: object, zeros: float, kind: str, calibration: Calibration
) -> tuple[Neurons, Callable[[Path], None]]:
    """The `layout` and the `files` that `pack_model` takes for a model in memory; arguments as for `NeuronFit`."""
    fit = NeuronFit(name, tokens, zeros, kind, calibration)
    with inference(model):
        fit.begin(model)
        for number, block in enumerate(decoder_blocks(model)):
            with present(block):
                fit.treat(number, block)
        fit.close()
    return Neurons(fit.thresholds, needs=fit.needs), fit.files


def neurons_needed(samples: Samples, predictors: Sequence[Predictor | None]) -> list[int]:
    """How many neurons of each layer a token needs on average, rounded up: those predicted, or else those active."""
    needs = []
    for layer, predictor in enumerate(predictors):
        inputs = samples.inputs[layer]
        bits = samples.active(layer) if predictor is None else predictor.mask(inputs)
        needs.append(-(-int(bits.sum()) // len(inputs)))
    return needs
