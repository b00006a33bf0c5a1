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
DIFFERS = "differs"
NOT_RUN = "not run"

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
            "bound": {"enum": ["at_least", "at_most"]},  # the paper gives a limit, not a value
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
    return table


def compare(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    """The published numbers of a figure beside ours, each with a verdict.

    Columns: claim, quantity, unit, conditions, section, published, ours, evidence, ratio, verdict. A claim that
    `table` holds no row for is `not run`; one within its relative tolerance (10 % unless it says otherwise), or on the
    open side of a published limit, is `within tolerance`.
    """
    records = claims(figure.split("/")[0])
    return pd.DataFrame([_compare(table, record) for record in records[records["figure"] == figure].to_dict("records")])


def _compare(table: pd.DataFrame, record: dict) -> dict:
    row = _row(table, record)
    ours = float(row[record["column"]]) if row is not None else None
    return {
        "claim": record["id"],
        "quantity": record["quantity"],
        "unit": record["unit"],
        "conditions": record["conditions"],
        "section": record["section"],
        "published": record["value"],
        "ours": ours,
        "evidence": row["evidence"] if row is not None and "evidence" in row else None,
        "ratio": ours / record["value"] if ours is not None and record["value"] else None,
        "verdict": NOT_RUN if ours is None else MET if _near(ours, record) else DIFFERS,
    }


def _near(ours: float, record: dict) -> bool:
    """Within the relative tolerance of the published value, or beyond it on the side that the claim leaves open."""
    slack = _or(record.get("tolerance"), 0.1) * abs(record["value"])
    excess = ours - record["value"]
    above, below = excess <= slack, excess >= -slack
    return {"at_most": above, "at_least": below}.get(record.get("bound"), above and below)


def _row(table: pd.DataFrame, record: dict) -> pd.Series | None:
    """The one row of our table that the claim is about."""
    where = record.get("where")
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
