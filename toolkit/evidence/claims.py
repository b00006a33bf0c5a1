"""The papers' own numbers, from `data/claims/<paper>.yaml`, and ours beside them."""

import json
from functools import cache
from pathlib import Path

import jsonschema
import pandas as pd
import yaml

from toolkit import paths
from toolkit.errors import UserError

MET = "within tolerance"
SHAPE = "same shape"
DIFFERS = "differs"
NOT_RUN = "not run"
COLUMNS = [
    *("claim", "quantity", "unit", "conditions", "section"),
    *("published", "ours", "stand_in", "evidence", "ratio", "verdict"),
]

# `number` counts things (layers, tokens) or has no unit (a threshold); `points` is a difference of two percentages
UNITS = [
    *("number", "ratio", "speedup", "percent", "points", "perplexity"),
    *("bits", "bytes", "KB", "KiB", "MB", "GB", "TB", "GB/s", "GiB/s"),
    *("s", "ms", "tokens/s", "ops", "ops/s", "ops/byte", "USD"),
]

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "figure", "quantity", "value", "unit", "conditions", "section"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string", "pattern": "^[a-z0-9_./-]+$"},
            "figure": {"type": "string", "pattern": "^[a-z]+/[a-z0-9_]+$"},
            "quantity": {"type": "string"},
            "value": {"type": "number"},
            "unit": {"enum": UNITS},
            "conditions": {"type": "string"},
            "section": {"type": "string"},
            # how to find the same number in our table: its column, and the row by values of other columns
            "column": {"type": "string"},
            "where": {"type": "object"},
            "tolerance": {"type": "number", "exclusiveMinimum": 0},
            "slack": {"type": "number", "exclusiveMinimum": 0},  # absolute instead: nothing is within 10 % of a 0
            "bound": {"enum": ["at_least", "at_most"]},  # the paper gives a limit, not a value
            # what the number is read against: another claim of the figure, or a plain number such as a speed-up of 1
            "beside": {"type": ["string", "number"]},
            "stand_in": {"type": "object"},  # a row that shows the same thing elsewhere: a smaller model, another disk
        },
    },
}


@cache
def claims(paper: str) -> pd.DataFrame:
    """All records of one paper.

    Raises `UserError` naming file and record for a missing field, an unknown unit or an id used twice.
    """
    file = paths.root() / "data" / "claims" / f"{paper}.yaml"
    records = _read(file)
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(records):
        record = records[error.path[0]] if error.path else records
        raise UserError(f"{file.name}: record {json.dumps(record)[:120]}: {error.message}")
    table = pd.DataFrame(records)
    if twice := table["id"][table["id"].duplicated()].tolist():
        raise UserError(f"{file.name}: id {twice[0]!r} is used twice")
    for record in records:
        beside = record.get("beside")
        figures = set(table["figure"][table["id"] == beside])
        if isinstance(beside, str) and figures != {record["figure"]}:
            raise UserError(f"{file.name}: record {record['id']}: beside is {beside!r}; expected an id of its figure")
        if "stand_in" in record and beside is None:
            raise UserError(
                f"{file.name}: record {record['id']}: a stand_in is compared with what is beside it: name it"
            )
    return table


def compare(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    """The published numbers of a figure beside ours, each with a verdict.

    Columns: `COLUMNS`; a row a claim, none if the paper prints no number of the figure. The verdicts, in order of
    preference:

    - `within tolerance`: ours is within the claim's relative tolerance (10 % unless it says otherwise) or its absolute
      slack, or on the open side of a published limit. Never for a stand-in, which is another quantity.
    - `same shape`: ours is further off, or a stand-in's, but lies on the same side of what the claim is `beside`: a
      speed-up above 1 as published, a perplexity above the dense model's as published.
    - `differs`: neither.
    - `not run`: `table` holds no row that the claim is about.
    """
    records = claims(figure.split("/")[0])
    chosen = {record["id"]: record for record in records[records["figure"] == figure].to_dict("records")}
    return pd.DataFrame([_compare(table, record, chosen) for record in chosen.values()], columns=COLUMNS)


def compare_machines(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    """`compare` for every machine of the table by itself, with a column `profile` more; what was measured goes before
    what was modelled of the same machine.

    All claims are listed for the first machine, the paper's; for each other one those that it can say something about.
    """
    tables = []
    for name, rows in table.groupby("profile", sort=False):
        measured = rows[rows["evidence"] == "measured"]
        compared = compare(measured if len(measured) else rows, figure).assign(profile=name)
        tables.append(compared[compared["verdict"] != NOT_RUN] if tables else compared)
    return pd.concat([tables[0], *(compared for compared in tables[1:] if len(compared))], ignore_index=True)


def _compare(table: pd.DataFrame, record: dict, records: dict[str, dict]) -> dict:
    row, stand_in = _counterpart(table, record)
    ours = float(row[record["column"]]) if row is not None else None
    return {
        "claim": record["id"],
        "quantity": record["quantity"],
        "unit": record["unit"],
        "conditions": record["conditions"],
        "section": record["section"],
        "published": record["value"],
        "ours": ours,
        "stand_in": stand_in,
        "evidence": row["evidence"] if row is not None and "evidence" in row else None,
        "ratio": ours / record["value"] if ours is not None and record["value"] else None,
        "verdict": _verdict(table, record, records, ours, stand_in),
    }


def _verdict(table: pd.DataFrame, record: dict, records: dict[str, dict], ours: float | None, stand_in: bool) -> str:
    if ours is None:
        return NOT_RUN
    if not stand_in and _near(ours, record):
        return MET
    return SHAPE if _same_side(table, record, records, ours) else DIFFERS


def _same_side(table: pd.DataFrame, record: dict, records: dict[str, dict], ours: float) -> bool:
    """Whether ours lies on the same side of what the claim is beside as the published value does of its."""
    theirs = beside = record.get("beside")
    if isinstance(beside, str):
        other = records[beside]
        row, _ = _counterpart(table, other)
        theirs, beside = other["value"], None if row is None else float(row[other["column"]])
    if beside is None or pd.isna(beside):
        return False
    return (ours - beside) * (record["value"] - theirs) > 0


def _counterpart(table: pd.DataFrame, record: dict) -> tuple[pd.Series | None, bool]:
    """The one row of our table that the claim is about, or else its stand-in, and whether it is one."""
    row = _row(table, record, record.get("where"))
    if row is not None:
        return row, False
    row = _row(table, record, record.get("stand_in"))
    return row, row is not None


def _near(ours: float, record: dict) -> bool:
    """Within the relative tolerance of the published value, or beyond it on the side that the claim leaves open."""
    slack = _or(record.get("slack"), _or(record.get("tolerance"), 0.1) * abs(record["value"]))
    excess = ours - record["value"]
    above, below = excess <= slack, excess >= -slack
    return {"at_most": above, "at_least": below}.get(record.get("bound"), above and below)


def _row(table: pd.DataFrame, record: dict, where: object) -> pd.Series | None:
    """The one row with these values, if the table has it and the claim's column."""
    if not isinstance(where, dict) or record.get("column") not in table:
        return None
    if any(name not in table for name in where):
        return None
    chosen = table.loc[(table[list(where)] == pd.Series(where)).all(axis=1)]
    if len(chosen) > 1:
        raise UserError(f"claim {record['id']}: {len(chosen)} rows of the table answer to {where}; expected one")
    return None if chosen.empty else chosen.iloc[0]


def _or(value: float | None, default: float) -> float:
    return default if value is None or pd.isna(value) else value


def _read(file: Path) -> list[dict]:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {' '.join(str(error).split())}") from error
