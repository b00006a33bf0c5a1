"""Accuracy on multiple-choice tasks through lm-eval: the hub's usual ones by name, and three that need no hub."""

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit import hub
from toolkit.errors import UserError, unknown
from toolkit.extras import extra
from toolkit.progress import progress
from toolkit.quality.local_tasks import LOCAL_TASKS, LocalTask

if TYPE_CHECKING:
    import pandas
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm

Run = Callable[[Sequence[Callable]], list]  # gives the results of calls
# task on the hub -> accuracy of guessing
HUB_TASKS = {
    "arc_easy": 1 / 4,
    "arc_challenge": 1 / 4,
    "hellaswag": 1 / 4,
    "piqa": 1 / 2,
    "winogrande": 1 / 2,
    "mmlu": 1 / 4,
}
METRICS = ("acc", "acc_norm")


def evaluate_tasks(
    model: nn.Module,
    tokenizer,
    tasks: Sequence[str],
    limit: int | None = None,
    batch_size: int = 16,
    run: Run | None = None,
) -> "pandas.DataFrame":
    """Zero-shot accuracy of a causal language model on tasks, each choice scored by its log-likelihood.

    Args:
        model: a Hugging Face causal language model, in memory or on demand, on any device.
        tokenizer: as `load_model` returns it.
        tasks: keys of `LOCAL_TASKS` (offline) and of `HUB_TASKS`.
        limit: only the first so many items of each task; all if None.
        batch_size: sequences a forward pass.
        run: gives the results of calls, each of which runs the model on a batch; `run_in_step` of
            `toolkit.models.streams` runs a block of a model that is larger than memory for all of them. None runs
            one call after the other.

    Returns one row for each task and metric with columns `task`, `metric` ("acc": by summed log-likelihood; "acc_norm",
    of the hub's tasks that have it: by log-likelihood a byte), `value` and `standard_error` (shares of 1), `chance` and
    `items`. The global random generators are left as they were. Raises `UserError` if a task is unknown, listed twice
    or needs a hub that cannot be reached, or the limit is below 1.
    """
    check_tasks(tasks, limit)
    with extra("lab"):
        from lm_eval import evaluate

    # our bar has stderr before it is taken away: lm-eval draws bars of its own there, whatever it is told
    bars = progress("evaluating tasks", 0, "sequences")
    with bars as bar, _generators_kept(), hub.quiet(), contextlib.redirect_stderr(io.StringIO()):
        _seed()
        watched = _watched(model, tokenizer, batch_size, bar, run)
        # `simple_evaluate` would also ask pip and the system for their versions: 0.6 s at each call
        found = evaluate(watched, _loaded(tasks), limit=limit, log_samples=False, bootstrap_iters=1000)
    return _table(found, tasks)


def _seed() -> None:
    """The generators as lm-eval's `simple_evaluate` seeds them."""
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002
    torch.manual_seed(1234)


def _loaded(tasks: Sequence[str]) -> dict:
    """The tasks as lm-eval's `evaluate` takes them: zero-shot, unless a task of the hub says otherwise."""
    with extra("lab"):
        from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=any(task in HUB_TASKS for task in tasks))  # the defaults take seconds
    loaded = manager.load([_config(task, LOCAL_TASKS[task]) if task in LOCAL_TASKS else task for task in tasks])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return loaded


def _watched(model: nn.Module, tokenizer, batch_size: int, bar: "tqdm", run: Run | None) -> "HFLM":
    """The model as lm-eval takes it; the bar counts the sequences that go through it.

    With `run`, a call has as many requests as a batch, so that it runs the model once.
    """
    with extra("lab"):
        from lm_eval.models.huggingface import HFLM

    class Watched(HFLM):
        def _loglikelihood_tokens(self, requests, *args, **settings):
            # requests whose sequences differ in the last token alone share one
            bar.reset(total=len({(*context, *continued[:-1]) for _, context, continued in requests}))
            judge = partial(super()._loglikelihood_tokens, *args, **settings)
            if run is None:
                return judge(requests)
            order = sorted(range(len(requests)), key=lambda at: len(requests[at][1]) + len(requests[at][2]))
            batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
            found = run([partial(judge, [requests[at] for at in batch], disable_tqdm=True) for batch in batches])
            scores = dict(zip(order, chain.from_iterable(found), strict=True))
            return [scores[at] for at in range(len(requests))]

        def _model_call(self, inps, *args, **settings):
            logits = super()._model_call(inps, *args, **settings)
            bar.update(len(inps))
            return logits

    # the token before a text that is judged whole; lm-eval takes the tokenizer's own, which few lack
    own = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    first = {} if own is not None else {"prefix_token_id": next(iter(tokenizer("\n")["input_ids"]), 0)}
    return Watched(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **first)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """lm-eval seeds the global generators; here they come out as they went in."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (it is the global one that lm-eval touches)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def check_tasks(tasks: Sequence[str], limit: int | None = None) -> None:
    """Raise the `UserError` that `evaluate_tasks` would raise for these tasks, without a model."""
    if isinstance(tasks, str):
        raise UserError(f"tasks {tasks!r} is one string: give a list, [{tasks!r}]")
    for task in tasks:
        if task not in LOCAL_TASKS and task not in HUB_TASKS:
            raise unknown("task", task, [*LOCAL_TASKS, *HUB_TASKS])
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"tasks {list(tasks)} is empty or names one twice: give each task once")
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} is below 1: give a number of items, or None for all")
    wanted = [task for task in tasks if task in HUB_TASKS]
    if wanted:
        hub.require(f"task {wanted[0]!r}", offline=f"tasks that need none: {', '.join(sorted(LOCAL_TASKS))}")


def _config(name: str, task: LocalTask) -> dict:
    """A local task in lm-eval's terms."""
    with extra("lab"):
        import datasets

    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(task.rows())},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }


def _table(found: dict, tasks: Sequence[str]) -> "pandas.DataFrame":
    import pandas

    rows = []
    for task in tasks:
        scores = found["results"][task]
        for metric in METRICS:
            if f"{metric},none" in scores:
                rows.append(
                    {
                        "task": task,
                        "metric": metric,
                        "value": float(scores[f"{metric},none"]),
                        "standard_error": float(scores[f"{metric}_stderr,none"]),
                        "chance": LOCAL_TASKS[task].chance if task in LOCAL_TASKS else HUB_TASKS[task],
                        "items": _items(found, task),
                    }
                )
    return pandas.DataFrame(rows, columns=["task", "metric", "value", "standard_error", "chance", "items"])


def _items(found: dict, task: str) -> int:
    """Items of a task, or of a group of tasks or of groups (mmlu's are its subjects)."""
    parts = found.get("group_subtasks", {}).get(task)
    return sum(_items(found, part) for part in parts) if parts else found["n-samples"][task]["effective"]
