"""The folder of a model made here: its weights, the curve of its training, tables of measurements and a model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from toolkit.files import new_folder

LICENCES = {
    "smollm2-135m": "Apache-2.0, as the base model, SmolLM2-135M-Instruct",
    "wiki-slice": "Wikipedia's authors, CC BY-SA 4.0",
    "python-sources": "the standard library of Python, PSF licence",
}
SHORT = 40  # rows of a table that the card has
ENDS = 20  # steps whose mean loss the card gives as the first and as the last one
CARD = """\
# {name}

{about}

{tables}

Perplexity and shares are measured on {windows} windows of 1024 tokens of evaluation text.

* **Training**: {loss}, {steps} steps of {tokens} tokens in all. The loss of a token went from {first:.3f} to {last:.3f}
  nats (means of {ends} steps; `curve.csv`).
* **Text**: calibration parts of {texts}. Evaluation uses other articles and files.
* **Licence**: {licence}.
* **Recipe**: `python -m toolkit.recovery --form {form}`, {recipe}
"""


def write(
    folder: Path,
    about: str,
    loss: str,
    form: str,
    recipe: Mapping[str, Any],
    curve: Sequence[Mapping[str, float]],
    file: str,
    save: Callable[..., None],
    tables: Mapping[str, pd.DataFrame],
    windows: int,
) -> None:
    """Write a new folder, and print the tables of its card.

    Args:
        folder: its name is the model's.
        about: the first paragraphs of the card, in Markdown.
        loss: the name of the training's loss.
        form: the `--form` of the command.
        recipe: all of it, as plain values.
        curve: a row for each step.
        file: the name of the file of weights.
        save: writes it, called with its path and `about`, the description that it holds.
        tables: of measurements, by the names of their files; the card has the short ones.
        windows: of the evaluation.

    Raises `UserError` if the folder is there already, and for trouble with the disk.
    """
    losses, training = [row["loss"] for row in curve], recipe["training"]
    corpora = recipe.get("corpora") or [recipe["corpus"]]
    short = [table.round(3).to_string(index=False) for table in tables.values() if len(table) <= SHORT]
    text = CARD.format(
        name=folder.name,
        about=about,
        tables="\n\n".join(f"```\n{table}\n```" for table in short),
        windows=windows,
        loss=loss,
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
    with new_folder(folder) as target:
        save(target / file, about={"model": recipe["model"], "recipe": json.dumps(recipe)})
        for name, table in {"curve.csv": pd.DataFrame(curve), **tables}.items():
            table.to_csv(target / name, index=False)
        (target / "README.md").write_text(text, encoding="utf-8")
    print(f"{folder}:\n" + "\n\n".join(short), flush=True)
