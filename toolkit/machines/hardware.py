"""Hardware profiles: capacities, bandwidths and peak rates of the papers' machines, each with its source.

    machine = profile("endor-rtx4080")
    machine.links.storage_to_dram_gb_s          # 2.55
    machine.sources["links.storage_to_dram_gb_s"].text

A profile is a record of `data/hardware/<paper>.yaml`, where every number is written with its unit, its basis and its
source; here the numbers are plain floats in the units that their names say, and the sources stand beside them. A key
and its unit give the name: `bandwidth` in GiB/s is `bandwidth_gb_s`. Numbers by dtype or format lie one level deeper.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.machines.machine import BASES, GB, Links, Memory, NearData, Profile, Software, Source, Storage
from toolkit.records import checked, load_yaml, mapping

READS = ("data/hardware/*.yaml",)  # for `toolkit.sources`: what is made with a profile is stale when one changes

PARTS = {
    "storage": Storage,
    "dram": Memory,
    "device": Memory,
    "links": Links,
    "near_data": NearData,
    "software": Software,
}
GIB = 2**30
UNITS = {  # the end of an attribute's name, and the factor to its unit
    **{"GB": ("_bytes", GB), "TB": ("_bytes", 1e12), "GiB": ("_bytes", float(GIB))},
    **{"GB/s": ("_gb_s", 1.0), "GiB/s": ("_gb_s", GIB / GB), "us": ("_s", 1e-6), "ms": ("_s", 1e-3)},
    **{"TFLOP/s": ("_tflop_s", 1.0), "GFLOP/s": ("_tflop_s", 1e-3), "GHz": ("_ghz", 1.0), "cycles": ("_cycles", 1.0)},
    **{"DIMMs": ("", 1), "ratio": ("_share", 1.0), "ms/GB": ("_s_gb", 1e-3)},
}
RENAMED = {"compute_tflop_s": "tflop_s", "clock_ghz": "sm_ghz", "reach_share": "bandwidth_share"}
NUMBERS: Any = dict[
    str,
    mapping(
        "number",
        {
            "value": Annotated[FiniteFloat, Field(gt=0)],
            "unit": Literal[*UNITS],
            "basis": Literal[*(basis for basis in BASES if basis != "measured")],
            "source": Annotated[str, Field(min_length=10)],
        },
        {
            "range": Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)],
            "claims": Annotated[list[str], Field(min_length=1)],
        },
    ),
]
RECORDS: Any = list[
    mapping(
        "machine",
        {"id": Annotated[str, Field(pattern=r"^[a-z0-9-]+\Z")], "title": str, "paper": str | None},
        {"unified": bool} | dict.fromkeys(PARTS, dict[str, Any]),
    )
]


def profiles() -> dict[str, Profile]:
    """Every profile of `data/hardware/`, by id.

    Raises `UserError` naming file and record for a missing or unknown field, a wrong unit, a number without a source,
    or an id used twice.
    """
    found: dict[str, Profile] = {}
    for file in sorted((paths.root() / "data" / "hardware").glob("*.yaml")):
        for machine in _profiles_of(file, file.stat().st_mtime_ns):
            if machine.id in found:
                raise UserError(f"{file.name}: record {machine.id}: the id is used twice; expected one of its own")
            found[machine.id] = machine
    return found


def profile(name: str) -> Profile:
    """One profile by its id. Raises `UserError` for an unknown one."""
    known = profiles()
    if name not in known:
        raise unknown("hardware profile", name, known)
    return known[name]


@lru_cache
def _profiles_of(file: Path, changed_ns: int) -> tuple[Profile, ...]:
    """The profiles of a file that was last changed at this time: reading all files takes 0.2 s."""
    records = load_yaml(file)
    checked(records, RECORDS, file)
    named = {f"record {record['id']}: {name}": number for record in records for name, number in _numbers(record)}
    checked(named, NUMBERS, file)
    return tuple(_profile(record, file) for record in records)  # of what was read: counts stay whole numbers


def _numbers(record: dict) -> Iterator[tuple[str, Any]]:
    """Each number of a record by its dotted name, `device.compute.fp16` say."""
    for part in PARTS:
        for key, value in record.get(part, {}).items():
            if isinstance(value, dict) and "value" not in value:
                yield from ((f"{part}.{key}.{form}", number) for form, number in value.items())
            elif key != "name":
                yield f"{part}.{key}", value


def _profile(record: dict, file: Path) -> Profile:
    sources: dict[str, Source] = {}
    values: dict[str, dict[str, Any]] = {part: {} for part in PARTS if part in record}
    for dotted, number in _numbers(record):
        part, key, *form = dotted.split(".")
        end, factor = UNITS[number["unit"]]
        attribute = RENAMED.get(key + end, key + end)
        value = number["value"] * factor
        values[part][attribute] = values[part].get(attribute, {}) | {form[0]: value} if form else value
        low, high = (factor * bound for bound in number["range"]) if "range" in number else (None, None)
        claims = tuple(number.get("claims", ()))
        sources[".".join([part, attribute, *form])] = Source(number["basis"], number["source"], low, high, claims)
    for part, numbers in values.items():
        numbers |= {"name": record[part]["name"]} if "name" in record[part] else {}
        _expect_fields(PARTS[part], numbers, f"{file}: record {record['id']}: {part}")
    parts = {part: PARTS[part](**numbers) for part, numbers in values.items()}
    unified = record.get("unified", False)
    return Profile(record["id"], record["title"], record["paper"], **parts, unified=unified, sources=sources)


def _expect_fields(kind: type, numbers: dict, place: str) -> None:
    """Raise `UserError` for a number that a part does not have, in this unit or by form, or one that it lacks."""
    known = {field.name: field for field in fields(kind)}
    for name, value in numbers.items():
        if name not in known or isinstance(value, dict) != (known[name].default_factory is not MISSING):
            raise UserError(f"{place}: unknown number {name!r}; choose from: {', '.join(known)}")
    for name, field in known.items():
        if name not in numbers and field.default is field.default_factory is MISSING:
            raise UserError(f"{place}: {name} is missing")
