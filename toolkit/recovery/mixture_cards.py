"""The folders of split and upcycled models: parts, curve of the training, tables of what was measured, model card."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pandas as pd
from torch import nn

from toolkit.files import new_folder
from toolkit.models import split_files, upcycled
from toolkit.models.split_files import SplitParts
from toolkit.models.upcycled import LowRankExperts
from toolkit.recovery.card import CARD, CURVE, ENDS, LICENCES, QUALITY
from toolkit.recovery.routed import Splitting
from toolkit.recovery.upcycling import Upcycling

ROUTING = "routing.csv"
Curve = list[dict[str, float]]

SPLIT = """\
# {name}

`{model}` with each FFN split into experts, in DeepSeekMoE's form: {shared} neurons that every token uses, and
{experts} routed experts of {neurons} neurons, {per_token} of which a token uses. `load_model("{name}")` loads
`{model}`, adds low-rank differences to its decoder linears and puts its neurons in the order of `{file}`. The class
stays `LlamaForCausalLM`; the config's entry `split_mixture` says how it is split. An expert's output has a weight of 1,
so without the differences all experts together are the dense FFN.

{table}

Perplexity is measured on {windows} windows of 1024 tokens of evaluation text. "fitted": split and router by what the
neurons give on calibration text, no training. "random clusters": the same shared neurons and a router fitted in the
same way, the other neurons in random groups. "random router": the fitted groups, routed at random. "distilled": this
model.

* **Split**: `toolkit.models.splitting`. The neurons that most tokens use are shared, the others clustered by the tokens
  that use them (balanced assignment), and a linear router is fitted to the experts' energy by ridge regression.
* **Training**: distillation of routers and differences from the dense model's probabilities, {steps} steps of {tokens}
  tokens in all. The divergence of a token went from {first:.3f} to {last:.3f} nats (means of {ends} steps;
  `curve.csv`).
* **Text**: calibration articles of `{corpus}` ({text_licence}). Evaluation uses other articles.
* **Licence**: {licence}.
* **Recipe**: `{command}`, {recipe}
"""

UPCYCLED = """\
# {name}

A Mixtral with {experts} experts, {per_token} of which a token uses, upcycled from `{model}`: each expert is its FFN and
a difference of rank {rank}. `load_model("{name}")` gives a `MixtralForCausalLM` with whole experts (1.3 GB in bf16), so
that it costs what any Mixtral costs. `{file}` holds the routers and the differences. Since all experts share one FFN,
that FFN in memory and the differences on demand would make this model far cheaper to offload than its form suggests: it
stands for the form, not for the cost of independent experts.

{table}

Perplexity is measured on {windows} windows of 1024 tokens of evaluation text. How the routers share the tokens out, as
means over the layers (`routing.csv` has every layer and expert; entropies in bits, {even:.0f} if all experts are used
evenly; `shared_load` is the overlap of the loads with those on the first text):

{routing}

* **Training**: next tokens of both texts and a load-balance loss, {steps} steps of {tokens} tokens in all. The loss of
  a token went from {first:.3f} to {last:.3f} nats (means of {ends} steps; `curve.csv`).
* **Text**: calibration parts of `wiki-slice` ({text_licence}) and of `python-sources`, the standard library of Python
  (PSF licence). Evaluation uses other articles and other files.
* **Licence**: {licence}.
* **Recipe**: `{command}`, {recipe}
"""


def write_split(
    folder: Path,
    base: nn.Module,
    recipe: Splitting,
    parts: SplitParts,
    curve: Curve,
    quality: pd.DataFrame,
    windows: int,
) -> None:
    """Write a new folder of a split model. Raises `UserError` if it is there already, and for trouble with the disk."""
    sizes, training = recipe.sizes, recipe.training
    text = SPLIT.format(
        name=folder.name,
        file=split_files.FILE,
        neurons=(parts.permutation.shape[1] - sizes.shared) // sizes.experts,
        text_licence=LICENCES.get(recipe.corpus, "see its source"),
        corpus=recipe.corpus,
        command=f"{_command(recipe, 'split')} --rank {recipe.rank} --down-rank {recipe.down_rank}",
        tokens=len(curve) * training.batch * training.sequence_length,
        **asdict(sizes),
        **_common(recipe, curve, quality, windows),
    )
    with new_folder(folder) as target:
        split_files.save(target / split_files.FILE, base, parts, _about(recipe))
        _write(target, curve, quality, text)


def write_upcycled(
    folder: Path,
    base: nn.Module,
    recipe: Upcycling,
    parts: LowRankExperts,
    curve: Curve,
    tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame],
    windows: int,
) -> None:
    """Write a new folder of an upcycled model; `tables` are quality, routing and its summary.

    Raises as `write_split`.
    """
    quality, routing, summary = tables
    training = recipe.training
    text = UPCYCLED.format(
        name=folder.name,
        file=upcycled.FILE,
        experts=recipe.experts,
        per_token=recipe.per_token,
        rank=recipe.rank,
        even=(recipe.experts - 1).bit_length(),
        routing=_markdown(summary),
        text_licence=LICENCES["wiki-slice"],
        command=f"{_command(recipe, 'upcycled')} --rank {recipe.rank}",
        tokens=len(curve) * training.batch * training.sequence_length * len(recipe.corpora),
        **_common(recipe, curve, quality, windows),
    )
    with new_folder(folder) as target:
        upcycled.save(target / upcycled.FILE, base, parts, _about(recipe))
        routing.round(6).to_csv(target / ROUTING, index=False)
        _write(target, curve, quality, text)


def _common(recipe: Splitting | Upcycling, curve: Curve, quality: pd.DataFrame, windows: int) -> dict:
    losses = [row["loss"] for row in curve]
    return {
        "model": recipe.model,
        "table": _markdown(quality),
        "windows": windows,
        "steps": len(curve),
        "first": fmean(losses[:ENDS]),
        "last": fmean(losses[-ENDS:]),
        "ends": ENDS,
        "licence": LICENCES.get(recipe.model, "as the base model"),
        "recipe": json.dumps(asdict(recipe)),
    }


def _command(recipe: Splitting | Upcycling, form: str) -> str:
    training = recipe.training
    return (
        f"python -m toolkit.recovery {recipe.model} --form {form} --steps {training.steps} --batch {training.batch} "
        f"--sequence-length {training.sequence_length} --learning-rate {training.learning_rate} --seed {training.seed}"
    )


def _about(recipe: Splitting | Upcycling) -> dict[str, str]:
    return {"model": recipe.model, "recipe": json.dumps(asdict(recipe))}


def _write(folder: Path, curve: Curve, quality: pd.DataFrame, text: str) -> None:
    pd.DataFrame(curve).to_csv(folder / CURVE, index=False)
    quality.to_csv(folder / QUALITY, index=False)
    (folder / CARD).write_text(text, encoding="utf-8")


def _markdown(table: pd.DataFrame) -> str:
    lines = [f"| {' | '.join(table)} |", "|" + " --- |" * table.shape[1]]
    rows = table.itertuples(index=False)
    return "\n".join([*lines, *(f"| {' | '.join(map(_shown, row))} |" for row in rows)])


def _shown(value: object) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
