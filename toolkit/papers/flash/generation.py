"""LLM in a flash: text from a model whose neurons come from disk (tables 3, 5 and 7 to 9, figure 8)."""

import time
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from toolkit.cache import kept_folder
from toolkit.offload.model import OffloadedModel
from toolkit.offload.neuron_folder import neurons_needed
from toolkit.offload.options import Demand
from toolkit.sparsity.changed import LOADING
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import pack_model
from toolkit.studies.loaded import loaded, tokens_of, weights_key
from toolkit.studies.predictors import PredictorVariant, predictors
from toolkit.studies.thresholded import ThresholdedModel, samples, thresholds

# Whether predictors tell what to read, and whether neurons stay. Attention always stays and no layer is read ahead,
# unlike in the ways "naive" and "hybrid" of `toolkit.papers.flash.cost_model`.
PREDICTS_AND_KEEPS = {
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
        return tokens_of(self.setting.model, self.setting.corpus, "evaluation")[None, : self.prompt_tokens]

    def open(self, way: str) -> OffloadedModel:
        """The model from disk, by a key of `PREDICTS_AND_KEEPS`.

        Raises `UserError` for a limit below one token's neurons."""
        predicts, keeps = PREDICTS_AND_KEEPS[way]
        by_layer = predictors(self.setting, self.variant) if predicts else None
        folder = _by_neuron(self.setting, self.variant) / "store"
        demand = Demand(by_layer, window=self.window if keeps else 0)
        return OffloadedModel.open(folder, demand=demand, dram_bytes=self.dram_bytes, verify=False)


def model_bytes(setting: ThresholdedModel) -> int:
    """Bytes of the dense model."""
    return sum(parameter.nbytes for parameter in loaded(setting.model)[0].parameters())


@kept_folder("neurons", without=LOADING, key=weights_key)
def _by_neuron(folder: Path, setting: ThresholdedModel, variant: PredictorVariant) -> None:
    """The model by neuron, with the setting's thresholds."""
    model, tokenizer, _ = loaded(setting.model)
    needs = neurons_needed(samples(setting, "limits"), predictors(setting, variant))
    pack_model(model, folder / "store", Neurons(thresholds(setting).tolist(), needs=needs), setting.model, tokenizer)


class Clock:
    """A streamer of `generate` that notes the time of each token, and first of the prompt, in `instants`.

    `cpu_s` are the processor seconds that the process had taken by then, of all its threads.
    """

    def __init__(self, model: OffloadedModel):
        self.recorder, self.instants, self.cpu_s = model.recorder, [], []

    def put(self, _: object) -> None:
        """A token has come."""
        self.instants.append(self.recorder.now_s())
        self.cpu_s.append(time.process_time())

    def end(self) -> None:
        """The text has ended."""
