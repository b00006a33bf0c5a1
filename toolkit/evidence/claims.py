"""The papers' own numbers, as `data/claims/<paper>.yaml` has them: one record a number.

Every record has a kind, one of `KINDS`, which says what a score may make of it. An `input` may be that of a model
instead (`input_of`). `arithmetic` is also a sum, product or quotient of inputs, and a fact that holds by construction.

Several records can be one quantity, such as a time and the speed-up made from it. `same_as` names the record that
stands for all of them; it is of the same kind.
"""

from functools import cache
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from toolkit import paths
from toolkit.errors import UserError
from toolkit.records import checked, load_yaml

READS = ("data/claims/{paper}.yaml",)  # for `toolkit.sources`: a notebook reruns when its paper's claims change
KINDS = {
    "prediction": "a model or a run could miss it; only predictions are scored",
    "arithmetic": "it follows from shapes, formats and inputs, whatever the machine",
    "input": "the machine's profile was derived from it, so it is listed, without a verdict, and never scored",
    "context": "the set-up, or a number of another study; it has no verdict of its own",
}

# `number` counts things (layers, tokens) or has no unit (a threshold); `points` is a difference of two percentages
UNITS = [
    *("number", "ratio", "speedup", "percent", "points", "perplexity", "cycles", "GHz"),
    *("bits", "bytes", "KB", "KiB", "MB", "GB", "TB", "GB/s", "GiB/s", "Gb/s", "pJ/bit"),
    *("s", "ms", "tokens/s", "ops", "ops/s", "ops/byte", "USD"),
]

TOLERANCE = 0.1  # relative, where a claim gives none
POSITIVE = Annotated[FiniteFloat, Field(gt=0)]


class Claim(BaseModel):
    """One published number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", regex_engine="python-re")

    id: Annotated[str, Field(pattern=r"^[a-z0-9_./-]+\Z")]
    figure: Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9_]+\Z")]
    kind: Literal[*KINDS]  # type: ignore[valid-type]  # known at run time
    quantity: str
    value: FiniteFloat
    unit: Literal[*UNITS]  # type: ignore[valid-type]
    conditions: str
    section: str
    same_as: str | None = None
    contradiction: str | None = None  # another number of the paper that does not agree with this one
    input_of: str | None = None  # what takes an input that is no number of a machine
    worded: bool = False  # the paper says it in words; the number is this project's reading of them
    # how to find the same number in our table: its column, and the row by values of other columns
    column: str | None = None
    where: dict[str, Any] | None = None
    tolerance: POSITIVE = TOLERANCE
    slack: POSITIVE | None = None  # absolute instead: nothing is within 10 % of a 0
    # the paper gives a limit, not a value; `up_to` is an upper end that was reached
    bound: Literal["at_least", "at_most", "up_to"] | None = None
    # what the number is read against: another claim of the figure, or a plain number such as a speed-up of 1;
    # nothing is so many times a zero
    beside: str | POSITIVE | None = None
    stand_in: dict[str, Any] | None = None  # a row that shows the same thing elsewhere: a smaller model, another disk
    machine: str | None = None  # a profile, or `any`: of our number, where the table's row names no machine
    reason: dict[str, str] = {}  # why ours is another number, by kind of evidence; `not run`: why there is none


def claims(paper: str) -> pd.DataFrame:
    """`read_claims` as a table: a row a claim, a column a field."""
    return pd.DataFrame([dict(claim) for claim in read_claims(paper)], columns=[*Claim.model_fields])


@cache
def read_claims(paper: str) -> tuple[Claim, ...]:
    """All claims of one paper; none if it has no file.

    Raises `UserError` naming file and record for a missing field, an unknown unit, an id used twice, or a reference to
    a record that is not there.
    """
    file = paths.root() / "data" / "claims" / f"{paper}.yaml"
    if not file.exists():
        return ()
    records = checked(load_yaml(file), list[Claim], file)
    by_id = {claim.id: claim for claim in records}
    for claim in records:
        if by_id[claim.id] is not claim:
            raise UserError(f"{file.name}: id {claim.id!r} is used twice")
        if wrong := _wrong_reference(claim, by_id):
            raise UserError(f"{file.name}: record {claim.id}: {wrong}")
    return tuple(records)


def _wrong_reference(claim: Claim, by_id: dict[str, Claim]) -> str | None:
    """The faults of the claim's references to others, in words."""
    if isinstance(claim.beside, str) and (claim.beside not in by_id or by_id[claim.beside].figure != claim.figure):
        return f"beside is {claim.beside!r}; expected an id of its figure"
    if claim.beside is None and claim.stand_in is not None:
        return "a stand_in is compared with what is beside it: name it"
    if claim.beside is None and claim.bound == "up_to":
        return "a number `up_to` which something goes is compared with what is beside it: name it"
    if claim.same_as is not None:
        other = by_id.get(claim.same_as)
        if other is None or other.same_as is not None or other.kind != claim.kind:
            return f"same_as is {claim.same_as!r}; expected an id of the same kind that has no same_as of its own"
    return None
