"""The papers' own numbers, as `data/claims/<paper>.yaml` has them: one record a number.

Every record has a kind, which says what a score may make of it:

- `input`: a profile in `data/hardware/` was derived from it, or a model takes it (`input_of`). It is never scored.
- `arithmetic`: it follows from shapes and formats, or by a sum, product or quotient from inputs; or it holds by
  construction.
- `prediction`: a model or a run could miss it.
- `context`: the set-up, or a number of another study. It has no verdict.

Several records can be one quantity, such as a time and the speed-up made from it. `same_as` names the record that
stands for all of them; it is of the same kind.
"""

from functools import cache

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError
from toolkit.records import check, load_yaml

READS = ("data/claims/{paper}.yaml",)  # for `toolkit.sources`: a notebook reruns when its paper's claims change
KINDS = ("prediction", "arithmetic", "input", "context")
EVIDENCE = ("measured", "modelled")

# `number` counts things (layers, tokens) or has no unit (a threshold); `points` is a difference of two percentages
UNITS = [
    *("number", "ratio", "speedup", "percent", "points", "perplexity", "cycles", "GHz"),
    *("bits", "bytes", "KB", "KiB", "MB", "GB", "TB", "GB/s", "GiB/s", "Gb/s", "pJ/bit"),
    *("s", "ms", "tokens/s", "ops", "ops/s", "ops/byte", "USD"),
]

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "figure", "kind", "quantity", "value", "unit", "conditions", "section"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string", "pattern": r"^[a-z0-9_./-]+\Z"},
            "figure": {"type": "string", "pattern": r"^[a-z]+/[a-z0-9_]+\Z"},
            "kind": {"enum": list(KINDS)},
            "same_as": {"type": "string"},
            "quantity": {"type": "string"},
            "value": {"type": "number"},
            "unit": {"enum": UNITS},
            "conditions": {"type": "string"},
            "section": {"type": "string"},
            "contradiction": {"type": "string"},  # another number of the paper that does not agree with this one
            "input_of": {"type": "string"},  # what takes an input that is no number of a machine
            "worded": {"const": True},  # the paper says it in words; the number is this project's reading of them
            # how to find the same number in our table: its column, and the row by values of other columns
            "column": {"type": "string"},
            "where": {"type": "object"},
            "tolerance": {"type": "number", "exclusiveMinimum": 0},
            "slack": {"type": "number", "exclusiveMinimum": 0},  # absolute instead: nothing is within 10 % of a 0
            # the paper gives a limit, not a value; `up_to` is an upper end that was reached
            "bound": {"enum": ["at_least", "at_most", "up_to"]},
            # what the number is read against: another claim of the figure, or a plain number such as a speed-up of 1;
            # nothing is so many times a zero
            "beside": {"anyOf": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0}]},
            "stand_in": {"type": "object"},  # a row that shows the same thing elsewhere: a smaller model, another disk
            # a profile, or `any`: of our number, where the table's row names no machine
            "machine": {"type": "string"},
            # why ours is another number, where it is, for each kind of evidence
            "reason": {"type": "object", "properties": {key: {"type": "string"} for key in EVIDENCE}},
        },
    },
}


@cache
def claims(paper: str) -> pd.DataFrame:
    """All records of one paper; none if it has no file.

    Raises `UserError` naming file and record for a missing field, an unknown unit, an id used twice, or a reference to
    a record that is not there.
    """
    file = paths.root() / "data" / "claims" / f"{paper}.yaml"
    if not file.exists():
        return pd.DataFrame(columns=SCHEMA["items"]["required"])
    records = load_yaml(file)
    check(records, SCHEMA, file)
    table = pd.DataFrame(records)
    if twice := table["id"][table["id"].duplicated()].tolist():
        raise UserError(f"{file.name}: id {twice[0]!r} is used twice")
    by_id = {record["id"]: record for record in records}
    for record in records:
        if wrong := _wrong_reference(record, by_id):
            raise UserError(f"{file.name}: record {record['id']}: {wrong}")
    return table


def _wrong_reference(record: dict, by_id: dict[str, dict]) -> str | None:
    """What is wrong with the record's references to others, in words."""
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
