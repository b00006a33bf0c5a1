"""Perplexity and task accuracy of one model as one tidy table."""

from collections.abc import Sequence

import pandas as pd
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.evaluation.perplexity import perplexity
from toolkit.evaluation.tasks import evaluate_tasks


def evaluate(
    model: nn.Module,
    tokenizer,
    tokens: Int64[Tensor, " n"],
    tasks: Sequence[str] = (),
    sequence_length: int = 1024,
    windows: int | None = None,
    task_limit: int | None = None,
) -> pd.DataFrame:
    """A row for perplexity and one for each task: metric, value, standard_error, chance, items, sequence_length."""
    lost = perplexity(model, tokens, sequence_length, windows)
    row = {"metric": "perplexity", "value": float(lost), "standard_error": lost.standard_error, "items": lost.windows}
    table = pd.DataFrame([row | {"sequence_length": sequence_length}])
    if not tasks:
        return table
    accuracy = evaluate_tasks(model, tokenizer, list(tasks), limit=task_limit)
    accuracy = accuracy.drop(columns="metric").rename(columns={"task": "metric"})
    return pd.concat([table, accuracy], ignore_index=True)
