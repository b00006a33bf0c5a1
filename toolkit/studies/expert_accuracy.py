"""What foretold experts and skipped neurons cost a mixture of experts in accuracy on tasks (CORM, table 2)."""

import math

import pandas as pd

from toolkit.cache import kept
from toolkit.errors import unknown
from toolkit.evaluation import evaluate_tasks
from toolkit.studies.expert_quality import HALF, VARIANTS, as_predicted
from toolkit.studies.routing import RoutedModel, limits
from toolkit.studies.thresholded import LOADING, loaded, weights_key

OWN = "16 bits"
CORM = "foretold experts, skipped neurons"
IN_16_BITS = tuple(name for name, (bits, attention, *_) in VARIANTS.items() if bits == attention == HALF)


def accuracy_table(
    setting: RoutedModel, variants: tuple[str, ...], tasks: tuple[str, ...], limit: int | None = None
) -> pd.DataFrame:
    """A row for each variant in 16 bits and task, beside the same model as it is.

    Columns: model, variant, task, metric, value, standard_error, chance, items, accuracy_difference (to `OWN`) and
    accuracy_error (its standard error, as of independent items, which is more than that of the same ones); evidence,
    profile. Raises `UserError` for an unknown variant, and what `evaluate_tasks` raises.
    """
    if unknown_ones := [name for name in variants if name not in IN_16_BITS]:
        raise unknown("variant", unknown_ones[0], IN_16_BITS)
    names = tuple(dict.fromkeys((OWN, *variants)))
    found = pd.concat([_accuracy(setting, name, tasks, limit) for name in names], ignore_index=True)
    own = found[found["variant"] == OWN].set_index(["task", "metric"])
    keys = pd.MultiIndex.from_frame(found[["task", "metric"]])
    base, error = (own[name].reindex(keys).to_numpy() for name in ("value", "standard_error"))
    together = [math.hypot(one, other) for one, other in zip(found["standard_error"], error, strict=True)]
    found = found.assign(accuracy_difference=found["value"] - base, accuracy_error=together, model=setting.model)
    return found.assign(evidence="measured", profile="this-machine")


@kept("expert_accuracy", without=LOADING, key=weights_key)
def _accuracy(setting: RoutedModel, variant: str, tasks: tuple[str, ...], limit: int | None) -> pd.DataFrame:
    model, tokenizer, _ = loaded(setting.model)
    _, _, foretold, skipped = VARIANTS[variant]
    with as_predicted(model, foretold, limits(setting) if skipped else None):
        found = evaluate_tasks(model, tokenizer, list(tasks), limit)
    return found.assign(variant=variant)
