"""The folder of a model made here: its weights, the curve of its training, tables of measurements and a model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd

from toolkit.files import new_folder

CURVE, CARD = "curve.csv", "README.md"
LICENCES = {
    "smollm2-135m": "Apache-2.0, as the base model, SmolLM2-135M-Instruct",
    "wiki-slice": "Wikipedia's authors, CC BY-SA 4.0",
    "python-sources": "the standard library of Python, PSF licence",
}
ENDS = 20  # steps whose mean loss the card gives as the first and as the last one
TRAINING = """\
* **Training**: {of}, {steps} steps of {tokens} tokens in all. The loss of a token went from {first:.3f} to {last:.3f}
  nats (means of {ends} steps; `curve.csv`).
* **Text**: calibration parts of {texts}. Evaluation uses other articles and files.
* **Licence**: {licence}.
* **Recipe**: `python -m toolkit.recovery --form {form}`, {recipe}
"""


def write(
    folder: Path,
    about: str,
    training: str,
    curve: Sequence[Mapping[str, float]],
    file: str,
    save: Callable[[Path], None],
    tables: Mapping[str, pd.DataFrame],
) -> None:
    """Write a new folder.

    Args:
        folder: its name is the model's.
        about: the card, in Markdown, below its title; `training`, which `training_notes` gives, ends it.
        curve: a row for each step.
        file: the name of the file of weights, which `save` writes.
        tables: of measurements, by the names of their files.

    Raises `UserError` if the folder is there already, and for trouble with the disk.
    """
    with new_folder(folder) as target:
        save(target / file)
        for name, table in {CURVE: pd.DataFrame(curve), **tables}.items():
            table.to_csv(target / name, index=False)
        (target / CARD).write_text(f"# {folder.name}\n\n{about}\n{training}", encoding="utf-8")


def training_notes(of: str, form: str, recipe: Mapping, curve: Sequence[Mapping[str, float]]) -> str:
    """The last items of a card: the training (`of` says on which loss), its text, licences and the whole recipe."""
    losses, training = [row["loss"] for row in curve], recipe["training"]
    corpora = recipe.get("corpora") or [recipe["corpus"]]
    return TRAINING.format(
        of=of,
        steps=len(curve),
        tokens=len(curve) * training["batch"] * training["sequence_length"] * len(corpora),
        first=fmean(losses[:ENDS]),
        last=fmean(losses[-ENDS:]),
        ends=ENDS,
        texts=" and ".join(f"`{corpus}` ({LICENCES.get(corpus, 'see its source')})" for corpus in corpora),
        licence=LICENCES.get(recipe["model"], "as the base model"),
        form=form,
        recipe=json.dumps(recipe),
    )


def markdown(table: pd.DataFrame) -> str:
    """A table, in Markdown; numbers to three places, nothing for what is missing."""
    rows = [table.columns, ["---"] * table.shape[1], *map(_shown, table.itertuples(index=False))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(row: Sequence[object]) -> list[str]:
    return ["–" if pd.isna(it) else f"{it:.3f}" if isinstance(it, float) else str(it) for it in row]
