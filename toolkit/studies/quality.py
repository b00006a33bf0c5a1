"""The quality of a model that is altered: perplexity and accuracy on tasks, measured once and kept.

    quality(EvaluationSettings("smollm2-135m", windows=4), Cut(0.25))

An `Alteration` changes a model inside a `with` block and restores it. Another kind is another subclass, with
`change` and nothing else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from toolkit import sources
from toolkit.cache import kept
from toolkit.quality import evaluate_tasks, paired_difference, perplexity
from toolkit.quality.likelihood import Perplexity
from toolkit.sparsity.changed import LOADING
from toolkit.studies.loaded import loaded, tokens_of, weights_key

PERPLEXITY, WINDOW_NLL, LOG_DIFFERENCE = "perplexity", "window nll", "difference of log-perplexity"
TASK_METRICS = {"acc": "", "acc_norm": ", by length"}


@dataclass(frozen=True)
class EvaluationSettings:
    """A model, and the text and tasks that it is evaluated on."""

    model: str
    corpus: str = "wiki-slice"
    sequence_length: int = 1024
    windows: int | None = None
    """Windows of evaluation text; None for all."""
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None
    """Items of each task; None for all."""


@dataclass(frozen=True)
class Alteration:
    """A change of a model. This one changes nothing; a subclass is a frozen dataclass whose fields are plain values."""

    facts_at_once: ClassVar[bool] = False
    """Whether no fact depends on what is evaluated, so that perplexity and tasks can share one change."""

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Inside the block `loaded(settings.model)` is changed.

        The block gets facts about the change, such as its bits per weight. Facts that the evaluation shows are filled
        in when the block ends. `quality` makes columns of them.
        """
        yield {}

    @property
    def code(self) -> dict[str, object] | None:
        """The inputs of the change beside its fields, as plain values: the code of its module.

        None for a class in a notebook's cell: changes of its code cannot be seen, so its results are not kept.
        """
        files = sources.dependencies(type(self).__module__, without=LOADING)
        return {"code": sources.fingerprint(files)} if files else None


AS_IS = Alteration()


@contextmanager
def restored(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Copies of weights, which are written back when the block ends."""
    copies = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            yield copies
    finally:
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)


def quality(settings: EvaluationSettings, alteration: Alteration = AS_IS) -> pd.DataFrame:
    """A row for perplexity, one for each task and one for each window of text. Kept; perplexity and tasks apart.

    Columns: metric ("perplexity", a task's name, with ", by length" where log-likelihoods are divided by the choices'
    bytes, or "window nll"), value (of a window the mean negative log-likelihood a token, nats), standard_error, chance
    (accuracy of guessing), items (windows, or items of a task; of a window its number), sequence_length, and the facts
    of the alteration. Raises what the alteration, `perplexity` and `evaluate_tasks` raise.
    """
    text = replace(settings, tasks=(), task_limit=None)
    with closing(_Change(alteration)) as change:
        windows = _windows(text, alteration, change, fresh=alteration.code is None)
        on_tasks = _on_tasks(settings, alteration, change) if settings.tasks else None
    lost = Perplexity.of(torch.tensor(windows["value"], dtype=torch.float64), settings.sequence_length)
    whole = {"metric": PERPLEXITY, "value": float(lost), "standard_error": lost.standard_error, "chance": math.nan}
    facts = windows.drop(columns=["value"]).iloc[0].to_dict()
    rows = [pd.DataFrame([whole | {"items": lost.windows, "sequence_length": settings.sequence_length}])]
    if on_tasks is not None:
        names = on_tasks["task"] + on_tasks["metric"].map(TASK_METRICS)
        rows.append(on_tasks.assign(metric=names).drop(columns="task"))
    by_window = {"metric": WINDOW_NLL, "value": windows["value"], "items": range(lost.windows)}
    return pd.concat([*rows, pd.DataFrame(by_window)], ignore_index=True).assign(**facts)


def accuracy(settings: EvaluationSettings, alteration: Alteration = AS_IS) -> pd.DataFrame:
    """A row for each task and metric of the altered model, as `evaluate_tasks` gives them; kept."""
    with closing(_Change(alteration)) as change:
        return _on_tasks(settings, alteration, change)


def compared(settings: EvaluationSettings, alterations: Mapping[str, Alteration]) -> pd.DataFrame:
    """`quality` of some alterations by name, without the rows of windows, each beside the first.

    Further columns: variant (the name), relative (value over the first's), difference and difference_error (its
    standard error): of log-perplexities, window by window, or of accuracies. For these the items count as independent;
    the error of paired items would be smaller.
    """
    tables = {name: quality(settings, alteration) for name, alteration in alterations.items()}
    first = next(iter(tables.values()))
    rows = []
    for name, table in tables.items():
        for row, base in zip(_summary(table), _summary(first), strict=True):
            if row["metric"] == PERPLEXITY:
                pair = paired(table, first)
                difference, error = pair["value"], pair["standard_error"]
            else:
                difference = row["value"] - base["value"]
                error = math.hypot(row["standard_error"], base["standard_error"])
            beside = {"difference": difference, "difference_error": error, "relative": row["value"] / base["value"]}
            rows.append({"variant": name} | row | beside)
    return pd.DataFrame(rows)


def paired(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, object]:
    """The difference of log-perplexity of two tables of `quality`, window by window.

    Keys: metric; value (mean of first − second, nats a token; negative where the first is better); standard_error;
    items (windows); better_windows (how many of them the first wins). Raises what `paired_difference` raises.
    """
    one, other = window_nll(first), window_nll(second)
    mean, error = paired_difference(one, other)
    wins = sum(mine < theirs for mine, theirs in zip(one, other, strict=True))
    about = {"metric": LOG_DIFFERENCE, "value": mean, "standard_error": error}
    return about | {"items": len(one), "better_windows": wins}


def window_nll(table: pd.DataFrame) -> list[float]:
    """The mean negative log-likelihood of each window, nats a token, out of what `quality` gives for one alteration."""
    return table.loc[table["metric"] == WINDOW_NLL, "value"].tolist()


def _summary(table: pd.DataFrame) -> list[dict]:
    return table[table["metric"] != WINDOW_NLL].to_dict("records")


class _Change:
    """An alteration's change of the model. It may take longer than an evaluation, so evaluations share it if they can.

    `close` undoes it.
    """

    def __init__(self, alteration: Alteration):
        self._alteration, self._stack = alteration, ExitStack()
        self._facts: dict[str, float | str] | None = None

    @contextmanager
    def made(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Inside the block the model is changed."""
        if not self._alteration.facts_at_once:
            with self._alteration.change(settings) as facts:
                yield facts
            return
        if self._facts is None:
            self._facts = self._stack.enter_context(self._alteration.change(settings))
        yield self._facts

    def close(self) -> None:
        self._stack.close()


def _on_tasks(settings: EvaluationSettings, alteration: Alteration, change: _Change) -> pd.DataFrame:
    return _accuracy(replace(settings, windows=None), alteration, change, fresh=alteration.code is None)


def _key(settings: EvaluationSettings, alteration: Alteration) -> dict[str, object]:
    return weights_key(settings) | (alteration.code or {}) | {"change": None}  # the alteration stands for it


@kept("perplexity", without=LOADING, key=_key)
def _windows(settings: EvaluationSettings, alteration: Alteration, change: _Change) -> pd.DataFrame:
    """The loss of each window of evaluation text, in nats a token, and the alteration's facts."""
    model, tokens = loaded(settings.model)[0], tokens_of(settings.model, settings.corpus, "evaluation")
    with change.made(settings) as facts:
        lost = perplexity(model, tokens, settings.sequence_length, settings.windows)
    return pd.DataFrame({"value": lost.window_nll}).assign(**facts)


@kept("accuracy", without=LOADING, key=_key)
def _accuracy(settings: EvaluationSettings, alteration: Alteration, change: _Change) -> pd.DataFrame:
    model, tokenizer, _ = loaded(settings.model)
    with change.made(settings):
        return evaluate_tasks(model, tokenizer, list(settings.tasks), settings.task_limit)
