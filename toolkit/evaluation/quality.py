"""Perplexity and task accuracy of one model as one tidy table."""

from collections.abc import Sequence

import pandas as pd
from torch import Tensor, nn

from toolkit.evaluation.harness import evaluate_tasks
from toolkit.evaluation.likelihood import Perplexity, perplexity


def evaluate(
    model: nn.Module,
    tokenizer,
    tokens: Tensor,
    tasks: Sequence[str] = (),
    sequence_length: int = 1024,
    windows: int | None = None,
    task_limit: int | None = None,
) -> tuple[pd.DataFrame, Perplexity]:
    """A row for perplexity and one for each task, as a table; and the perplexity with the likelihood of each window.

    Columns: metric, value, standard_error, chance (accuracy of guessing; NaN for perplexity), items, sequence_length.

    A task's accuracy goes by its name, with ", by length" where log-likelihoods are divided by the choices' bytes.
    `items` are windows for perplexity. Raises what `perplexity` and `evaluate_tasks` raise.
    """
    lost = perplexity(model, tokens, sequence_length, windows)
    row = {"metric": "perplexity", "value": float(lost), "standard_error": lost.standard_error, "items": lost.windows}
    table = pd.DataFrame([row | {"chance": float("nan"), "sequence_length": sequence_length}])
    if not tasks:
        return table, lost
    accuracy = evaluate_tasks(model, tokenizer, list(tasks), limit=task_limit)
    names = accuracy["task"] + accuracy["metric"].map({"acc": "", "acc_norm": ", by length"})
    return pd.concat([table, accuracy.assign(metric=names).drop(columns="task")], ignore_index=True), lost
