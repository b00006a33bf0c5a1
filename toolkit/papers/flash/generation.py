"""LLM in a flash: text from a model whose neurons come from disk (tables 3, 5 and 7 to 9, figure 8)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit import sources
from toolkit.cache import cached
from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import take_turns
from toolkit.models.ffn import decoder_ffns
from toolkit.offload.by_neuron import ByNeuron
from toolkit.offload.model import OffloadedModel
from toolkit.offload.neuron_folder import neurons_needed
from toolkit.papers.flash.reads import predictor_seconds
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import pack_model
from toolkit.studies.loaded import loaded, weights_key
from toolkit.studies.predictors import PredictorVariant, predictors
from toolkit.studies.thresholded import ThresholdedModel, samples, thresholds, tokens_of
from toolkit.timeline import Timeline

FOLDER = "store"
OVER = {"speedup": {"way": "naive FFN"}, "over_hybrid": {"way": "hybrid FFN"}}
# Whether predictors tell what to read, and whether neurons stay. Attention always stays and no layer is read ahead,
# unlike in the ways "naive" and "hybrid" of `toolkit.costs.neuron_reads`.
WAYS = {
    "naive FFN": (False, False),
    "hybrid FFN": (False, True),
    "predictor": (True, False),
    "all": (True, True),
}


@dataclass(frozen=True)
class Generation:
    """How text is generated: the model and its predictors, the memory, and how much text.

    `memory_share` is the limit of all weights and buffers in memory, over the bytes of the dense model. A neuron stays
    for `window` tokens after its last use, if memory allows.
    """

    setting: ThresholdedModel
    variant: PredictorVariant
    memory_share: float
    window: int = 5
    prompt_tokens: int = 64
    new_tokens: int = 64

    @property
    def dram_bytes(self) -> int:
        """The limit in bytes."""
        return int(self.memory_share * model_bytes(self.setting))

    @property
    def prompt(self) -> Int64[Tensor, "1 tokens"]:
        """The beginning of the evaluation text."""
        return tokens_of(self.setting, "evaluation")[None, : self.prompt_tokens]

    def open(self, way: str) -> OffloadedModel:
        """The model from disk, by one of `WAYS`. Raises `UserError` for a limit below one token's neurons."""
        predicts, keeps = WAYS[way]
        layers = len(decoder_ffns(loaded(self.setting.model)[0]))
        by_layer = predictors(self.setting, self.variant) if predicts else [None] * layers
        folder = bundle_folder(self.setting, self.variant)
        window = self.window if keeps else 0
        return OffloadedModel.open(folder, predictors=by_layer, dram_bytes=self.dram_bytes, window=window, verify=False)


def model_bytes(setting: ThresholdedModel) -> int:
    """Bytes of the dense model."""
    return sum(parameter.nbytes for parameter in loaded(setting.model)[0].parameters())


def bundle_folder(setting: ThresholdedModel, variant: PredictorVariant) -> Path:
    """The model by neuron, with the setting's thresholds; made once and kept."""

    def make(folder: Path) -> None:
        model, tokenizer, _ = loaded(setting.model)
        needs = neurons_needed(samples(setting, "limits"), predictors(setting, variant))
        pack_model(model, folder / FOLDER, Neurons(thresholds(setting).tolist(), needs=needs), setting.model, tokenizer)

    code = sources.dependencies("toolkit.storage.neuron_packing", without=("toolkit.models.loading",))
    return cached("neurons", asdict(setting) | weights_key(setting) | asdict(variant), code, make) / FOLDER


class GeneratedText(Contestant):
    """A greedy text a turn, by one of `WAYS`. The pass of the prompt does not count.

    `passes` and `sizes` are those of the last turn: passes that count; neurons_held (share at the end), dram_mb (all
    weights and buffers) and predictor_mb (a part of it).
    """

    def __init__(self, generation: Generation, way: str):
        self.name, self.labels, self.generation, self.memory = way, {"way": way}, generation, generation.dram_bytes

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model, which has generated a word before. Raises what `Generation.open` raises."""
        with self.generation.open(self.name) as self.model, torch.no_grad():
            self.recorder, self.mode = self.model.recorder, self.model.mode
            self._generate(2)
            yield
        del self.model

    def token(self, number: int) -> None:
        """The text."""
        clock = Clock(self.model)
        self._generate(self.generation.new_tokens, streamer=clock)
        self.instants, self.passes = clock.instants[1:], len(clock.instants) - 2
        assert isinstance(self.model.strategy, ByNeuron)  # the folder holds neurons
        stores = [ffn.store for ffn in self.model.strategy.ffns]
        held = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
        predictor_bytes = sum(each.nbytes for each in self.model.strategy.predictors if each)
        dram_bytes = self.model.budgets["dram"].used_bytes
        self.sizes = {"neurons_held": held, "dram_mb": dram_bytes / 1e6, "predictor_mb": predictor_bytes / 1e6}

    def window(self, begun_s: float, ended_s: float) -> Timeline:
        """From the first token on."""
        return super().window(self.instants[0], self.instants[-1])

    def _generate(self, tokens: int, **settings: object) -> None:
        greedy = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        self.model.generate(self.generation.prompt, **greedy, **settings)


def generated_texts(generation: Generation, repetitions: int) -> pd.DataFrame:
    """The average times of a token by each of `WAYS`, which take turns: the `summary` of the turns.

    Columns: way; io_ms (reads), memory_ms (bookkeeping and copies beside reads), compute_ms (all the rest, predictors
    among it), predictor_ms, total_ms with its range, mb_a_token (read), those of `GeneratedText.sizes`, disturbed; and
    the ratios of `OVER`. Raises what `Generation.open` raises.
    """
    racing = {way: GeneratedText(generation, way) for way in WAYS}
    spans = take_turns(list(racing.values()), repetitions)
    turns = by_turn(spans, ["way"])
    passes = turns["way"].map({way: text.passes for way, text in racing.items()})
    seconds = {"io_ms": turns["read_s"], "memory_ms": turns["manage_s"], "total_ms": turns["seconds"]}
    seconds |= {"predictor_ms": predictor_seconds(spans, turns)}
    table = turns[["way", "repetition", "seconds", "disturbed"]].assign(
        **{name: 1e3 * column / passes for name, column in seconds.items()},
        mb_a_token=turns["read_bytes"] / passes / 1e6,
    )
    table["compute_ms"] = table["total_ms"] - table["io_ms"] - table["memory_ms"]
    table = table.join(pd.DataFrame({way: text.sizes for way, text in racing.items()}).T, on="way")
    return summary(table, ["way"], ["total_ms"], OVER).drop(columns="seconds")


class Clock:
    """A streamer of `generate` that notes the time of each token, and first of the prompt, in `instants`."""

    def __init__(self, model: OffloadedModel):
        self.recorder, self.instants = model.recorder, []

    def put(self, _: object) -> None:
        """A token has come."""
        self.instants.append(self.recorder.now_s())

    def end(self) -> None:
        """The text has ended."""
