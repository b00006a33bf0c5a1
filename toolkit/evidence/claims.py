"""The papers' own numbers, as `data/claims/<paper>.yaml` has them: one record a number.

Every record has a kind, one of `KINDS`, which says what a score may make of it. An `input` may be that of a model
instead (`input_of`). `arithmetic` is also a sum, product or quotient of inputs, and a fact that holds by construction.

Several records can be one quantity, such as a time and the speed-up made from it. `same_as` names the record that
stands for all of them; it is of the same kind.
"""

from functools import cache
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field, FiniteFloat

from toolkit import paths
from toolkit.errors import UserError
from toolkit.records import checked, load_yaml, mapping

READS = ("data/claims/{paper}.yaml",)  # for `toolkit.sources`: a notebook reruns when its paper's claims change
KINDS = {
    "prediction": "a model or a run could miss it; only predictions are scored",
    "arithmetic": "it follows from shapes, formats and inputs, whatever the machine",
    "input": "the machine's profile was derived from it, so it is listed and never scored",
    "context": "the set-up, or a number of another study; it has no verdict of its own",
}
EVIDENCE = ("measured", "modelled")

# `number` counts things (layers, tokens) or has no unit (a threshold); `points` is a difference of two percentages
UNITS = [
    *("number", "ratio", "speedup", "percent", "points", "perplexity", "cycles", "GHz"),
    *("bits", "bytes", "KB", "KiB", "MB", "GB", "TB", "GB/s", "GiB/s", "Gb/s", "pJ/bit"),
    *("s", "ms", "tokens/s", "ops", "ops/s", "ops/byte", "USD"),
]

POSITIVE = Annotated[FiniteFloat, Field(gt=0)]
REQUIRED = {
    "id": Annotated[str, Field(pattern=r"^[a-z0-9_./-]+\Z")],
    "figure": Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9_]+\Z")],
    "kind": Literal[*KINDS],
    "quantity": str,
    "value": FiniteFloat,
    "unit": Literal[*UNITS],
    "conditions": str,
    "section": str,
}
OPTIONAL = {
    "same_as": str,
    "contradiction": str,  # another number of the paper that does not agree with this one
    "input_of": str,  # what takes an input that is no number of a machine
    "worded": Literal[True],  # the paper says it in words; the number is this project's reading of them
    # how to find the same number in our table: its column, and the row by values of other columns
    "column": str,
    "where": dict[str, Any],
    "tolerance": POSITIVE,
    "slack": POSITIVE,  # absolute instead: nothing is within 10 % of a 0
    # the paper gives a limit, not a value; `up_to` is an upper end that was reached
    "bound": Literal["at_least", "at_most", "up_to"],
    # what the number is read against: another claim of the figure, or a plain number such as a speed-up of 1;
    # nothing is so many times a zero
    "beside": str | POSITIVE,
    "stand_in": dict[str, Any],  # a row that shows the same thing elsewhere: a smaller model, another disk
    "machine": str,  # a profile, or `any`: of our number, where the table's row names no machine
    "reason": dict[str, str],  # why ours is another number, where it is, for each kind of evidence
}
CLAIM = mapping("claim", REQUIRED, OPTIONAL)


@cache
def claims(paper: str) -> pd.DataFrame:
    """All records of one paper; none if it has no file.

    Raises `UserError` naming file and record for a missing field, an unknown unit, an id used twice, or a reference to
    a record that is not there.
    """
    file = paths.root() / "data" / "claims" / f"{paper}.yaml"
    if not file.exists():
        return pd.DataFrame(columns=[*REQUIRED])
    records = load_yaml(file)
    checked(records, list[CLAIM], file)  # type: ignore[valid-type]  # made at run time
    table = pd.DataFrame(records)
    if twice := table["id"][table["id"].duplicated()].tolist():
        raise UserError(f"{file.name}: id {twice[0]!r} is used twice")
    by_id = {record["id"]: record for record in records}
    for record in records:
        if wrong := _wrong_reference(record, by_id):
            raise UserError(f"{file.name}: record {record['id']}: {wrong}")
    return table


def _wrong_reference(record: dict, by_id: dict[str, dict]) -> str | None:
    """The faults of the record's references to others, in words."""
    beside = record.get("beside")
    if isinstance(beside, str) and by_id.get(beside, {}).get("figure") != record["figure"]:
        return f"beside is {beside!r}; expected an id of its figure"
    for key, words in (("stand_in", "a stand_in"), ("bound", "a number `up_to` which something goes")):
        if key in record and beside is None and (key == "stand_in" or record[key] == "up_to"):
            return f"{words} is compared with what is beside it: name it"
    if "same_as" in record:
        other = by_id.get(record["same_as"], {})
        if "same_as" in other or other.get("kind") != record["kind"]:
            return f"same_as is {record['same_as']!r}; expected an id of the same kind that has no same_as of its own"
    return None
