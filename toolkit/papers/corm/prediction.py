"""The time to predict the next layer's experts and neurons on this machine, beside computing this layer's (CORM).

    prediction_times("mixtral-8x7b", repetitions=5)

The predictor is the next layer's gate, then W1 and the activation of each expert that it names, over a limit. Computing
is the layer's own gate and the FFN of the experts that a token uses. Both run in bf16 on the CPU, with random weights.
"""

import pandas as pd
import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.kernels.dense import matvec
from toolkit.kernels.neurons import ffn
from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.timeline.spans import Recorder

ACTIVATION, LIMIT = "silu", 0.25  # the paper's threshold; random weights activate other shares
PARTS = ("predictor", "experts")
DRAWN_ROWS = 256  # repeated: the time does not depend on values


class _Part(Contestant):
    """The predictor, or the experts, of one layer, for one token after another."""

    exact = False

    def __init__(self, name: str, shape: ModelShape, inputs: Float32[Tensor, "tokens hidden"]):
        self.name, self.labels, self.inputs = name, {"part": name}, inputs
        self.router = _drawn(shape.experts, shape.hidden)
        width = shape.hidden if name == "predictor" else 3 * shape.hidden
        self.used = [_drawn(shape.ffn, width) for _ in range(shape.experts_per_token)]
        self.nbytes = self.router.nbytes + sum(weights.nbytes for weights in self.used)
        self.recorder = Recorder()

    def token(self, number: int) -> list[Tensor]:
        """The neurons of each named expert, or the sum of the experts' outputs."""
        x = self.inputs[number % len(self.inputs)]
        with self.recorder.span("compute", self.name, "dram", self.nbytes):
            weights = matvec(self.router, x).topk(len(self.used)).values.softmax(0)
            if self.name == "predictor":
                return [functional.silu(matvec(gate, x)).abs() > LIMIT for gate in self.used]
            return [sum(share * ffn(rows, x, ACTIVATION) for share, rows in zip(weights, self.used, strict=True))]


@measured
def prediction_times(model: str, repetitions: int = 5, tokens: int = 8) -> pd.DataFrame:
    """A row for each of `PARTS`: one token of one layer of a model's shape.

    Columns: part, model, seconds, seconds_low, seconds_high, nbytes, disturbed, measured_at; evidence, profile. Raises
    `UserError` for a model without experts.
    """
    shape = ARCHITECTURES[model]
    if not shape.experts:
        raise UserError(f"{model} has no experts: expected a model such as mixtral-8x7b")
    inputs = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(0))
    contestants = [_Part(name, shape, inputs) for name in PARTS]
    spans = take_turns(contestants, repetitions, tokens=tokens, skipped=1, warm_up=1, stay_open=True)
    table = summary(by_turn(spans, ["part"]), ["part"]).rename(columns={"stored_bytes": "nbytes"})
    columns = ["part", "seconds", "seconds_low", "seconds_high", "nbytes", "disturbed", "measured_at"]
    return table[columns].assign(model=model, evidence="measured", profile="this-machine")


def _drawn(rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    """A matrix in bf16 of a few random rows, again and again, each copy in its own memory."""
    some = torch.randn(min(rows, DRAWN_ROWS), columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
    return some.bfloat16().repeat(-(-rows // len(some)), 1)[:rows].contiguous()
