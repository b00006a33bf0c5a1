"""The measurements of a sparse version of a model, and the folder that holds it: adapters, curve and model card."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas as pd
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.activations.thresholds import thresholded, watched
from toolkit.evaluation import evaluate_tasks, perplexity
from toolkit.files import new_folder
from toolkit.models.adapters import FILE, Adapters, said_about, save
from toolkit.recovery.distillation import adapted
from toolkit.recovery.recipe import Recipe, SparseVersion

CURVE, QUALITY, CARD = "curve.csv", "quality.csv", "README.md"
LICENCES = {
    "smollm2-135m": "Apache-2.0, as the base model, SmolLM2-135M-Instruct",
    "wiki-slice": "Wikipedia's authors, CC BY-SA 4.0",
}
AFTER = ", after the\n  steps for lower shares of zeros"
OTHER = " `{}` takes the place\nof the model's own activation."
EARLIER = "* **Before**: the training starts from adapters of these recipes, the first one first: {}\n"
EARLIER_RECIPES = "earlier_recipes"  # an entry of what the file says about the adapters
ENDS = 20  # steps whose mean loss the card gives as the first and as the last one
TEXT = """\
# {name}

A threshold for each decoder block of `{model}` on |act(gate) · up|: what does not exceed it is zero. And adapters: a
difference of low rank for each decoder linear. `load_model("{name}")` loads `{model}`, adds them and cuts.{other}

{table}

Perplexity and the share of zeros are measured on {windows} windows of {sequence_length} tokens of evaluation text.

* **Training**: distillation from the dense model's probabilities, {steps} steps of {tokens} tokens in all{after}.
  The divergence of a token went from {first:.3f} to {last:.3f} nats (means of {ends} steps; `curve.csv`).
* **Text**: calibration articles of `{corpus}` ({text_licence}). Evaluation uses other articles.
* **Licence**: {licence}.
* **Recipe**: `python -m toolkit.recovery`, {recipe}
{earlier}"""


@dataclass(frozen=True)
class Evaluation:
    """The data of the evaluation: tokens, and tasks of `toolkit.evaluation` if any."""

    tokens: Int64[Tensor, " n"]
    tokenizer: object
    windows: int = 6
    sequence_length: int = 1024
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None

    def of(self, model: nn.Module, adapters: Adapters | None = None) -> dict[str, float]:
        """Perplexity, share of zeros and accuracy by task; of the dense model without adapters."""
        zeros: list[float] = []
        with ExitStack() as stack:
            if adapters is not None:
                stack.enter_context(adapted(model, adapters))
                stack.enter_context(thresholded(model, adapters.thresholds))
            with watched(model, lambda _, outputs: zeros.append((outputs == 0).double().mean().item())):
                row = {"perplexity": float(perplexity(model, self.tokens, self.sequence_length, self.windows))}
            row["zeros"] = sum(zeros) / len(zeros)
            if self.tasks:
                found = evaluate_tasks(model, self.tokenizer, self.tasks, self.task_limit)
                for name, value, error in found[["task", "value", "standard_error"]].itertuples(index=False):
                    row |= {name: value, f"{name} (standard error)": error}
        return row


def table(model: nn.Module, dense: dict[str, float], sparse: SparseVersion, on: Evaluation) -> pd.DataFrame:
    """A row for the dense model (as evaluated), for thresholds alone, and for the adapters."""
    rows = {
        "dense": dense,
        "thresholds alone": on.of(model, sparse.alone),
        "recovered": on.of(model, sparse.adapters),
    }
    found = pd.DataFrame([{"version": name, **row} for name, row in rows.items()])
    return found.assign(relative=found["perplexity"] / dense["perplexity"])


def write(
    folder: Path, model: nn.Module, recipe: Recipe, sparse: SparseVersion, quality: pd.DataFrame, on: Evaluation
) -> None:
    """Write a new folder. Raises `UserError` if it is there already, and for trouble with the disk."""
    about = {"model": recipe.model, "zeros": str(sparse.zeros), "recipe": json.dumps(recipe.record())}
    before = earlier(recipe)
    about[EARLIER_RECIPES] = json.dumps(before)
    with new_folder(folder) as target:
        save(target / FILE, model, sparse.adapters, about)
        pd.DataFrame(sparse.curve).to_csv(target / CURVE, index=False)
        quality.to_csv(target / QUALITY, index=False)
        (target / CARD).write_text(card(recipe, before, sparse, quality, on), encoding="utf-8")


def earlier(recipe: Recipe) -> list[dict]:
    """The recipes of the adapters that this one starts from, in the order of the trainings."""
    if recipe.start is None:
        return []
    about = said_about(Path(recipe.start) / FILE)
    return [*json.loads(about.get(EARLIER_RECIPES, "[]")), json.loads(about["recipe"])]


def card(recipe: Recipe, before: list[dict], sparse: SparseVersion, quality: pd.DataFrame, on: Evaluation) -> str:
    """The model card; `before` are the recipes that `earlier` gives."""
    training = recipe.training
    losses = [row["loss"] for row in sparse.curve]
    lines = [f"| {' | '.join(quality)} |", "|" + " --- |" * quality.shape[1]]
    lines += [f"| {' | '.join(map(_shown, row))} |" for row in quality.itertuples(index=False)]
    return TEXT.format(
        name=recipe.name(sparse.zeros),
        model=recipe.model,
        table="\n".join(lines),
        windows=on.windows,
        sequence_length=on.sequence_length,
        steps=len(sparse.curve),
        tokens=len(sparse.curve) * training.batch * training.sequence_length,
        after="" if sparse.zeros == recipe.zeros[0] else AFTER,
        first=fmean(losses[:ENDS]),
        last=fmean(losses[-ENDS:]),
        ends=ENDS,
        other="" if recipe.activation is None else OTHER.format(recipe.activation),
        earlier=EARLIER.format(json.dumps(before)) if before else "",
        corpus=recipe.corpus,
        text_licence=LICENCES.get(recipe.corpus, "see its source"),
        licence=LICENCES.get(recipe.model, "as the base model"),
        recipe=json.dumps(recipe.record()),
    )


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
