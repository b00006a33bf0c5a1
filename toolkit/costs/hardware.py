"""Hardware profiles: capacities, bandwidths and peak rates of the papers' machines, each with its source.

    machine = profile("endor-rtx4080")
    machine.links.storage_to_dram_gb_s          # 2.55
    machine.sources["links.storage_to_dram_gb_s"].text

A profile is a record of `data/hardware/<paper>.yaml`, where every number is written with its unit, its basis and its
source; here the numbers are plain floats in the units that their names say, and the sources stand beside them.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from toolkit import paths
from toolkit.costs.machine import BASES, GB, Links, Memory, NearData, Profile, Software, Source, Storage
from toolkit.errors import UserError, unknown
from toolkit.records import checked, load_yaml, mapping

READS = ("data/hardware/*.yaml",)  # for `toolkit.sources`: what is made with a profile is stale when one changes

# How a number is written in a file: its key, the attribute it becomes, and each unit's factor to the attribute's.
GIB = 2.0**30
CAPACITY = ("capacity_bytes", {"GB": GB, "TB": 1e12, "GiB": GIB})
BANDWIDTH_UNITS = {"GB/s": 1.0, "GiB/s": GIB / GB}
BANDWIDTH = ("bandwidth_gb_s", BANDWIDTH_UNITS)
TIME_UNITS = {"us": 1e-6, "ms": 1e-3}
RATE_UNITS = {"TFLOP/s": 1.0, "GFLOP/s": 1e-3}
DTYPES = ("fp32", "fp16", "bf16", "int8")
DECODED = ("endor", "zstd")  # formats that a file may give decoding rates of
LINKS = ("storage_to_dram", "dram_to_device", "storage_to_device")
FIELDS: dict[str, dict[str, tuple[str, Mapping[str, float]]]] = {
    "storage": {
        "capacity": CAPACITY,
        "bandwidth": BANDWIDTH,
        "latency": ("latency_s", TIME_UNITS),
        "request": ("request_s", TIME_UNITS),
        "thread": ("thread_gb_s", BANDWIDTH_UNITS),
    },
    "dram": {"capacity": CAPACITY, "bandwidth": BANDWIDTH},
    "device": {"capacity": CAPACITY, "bandwidth": BANDWIDTH, "clock": ("sm_ghz", {"GHz": 1.0})},
    "links": {name: (f"{name}_gb_s", BANDWIDTH_UNITS) for name in LINKS}
    | {f"{name}_fixed": (f"{name}_fixed_s", TIME_UNITS) for name in LINKS},
    "near_data": {
        "dimms": ("dimms", {"DIMMs": 1}),
        "capacity": CAPACITY,
        "bandwidth": BANDWIDTH,
        "compute": ("tflop_s", RATE_UNITS),
        "link": ("link_gb_s", BANDWIDTH_UNITS),
    },
    "software": {
        "layer": ("layer_s", TIME_UNITS),
        "launch": ("launch_s", TIME_UNITS),
        "reach": ("bandwidth_share", {"ratio": 1.0}),
        "word": ("word_cycles", {"cycles": 1.0}),
        "manage": ("manage_gb_s", BANDWIDTH_UNITS),
    },
}
RATES = {  # of dram (the CPU) and device: key, attribute, unit factors of each of its numbers
    "compute": ("tflop_s", dict.fromkeys(DTYPES, RATE_UNITS)),
    "decode": ("decode_gb_s", dict.fromkeys(DECODED, BANDWIDTH_UNITS)),
    "matvec": ("matvec_gb_s", dict.fromkeys(("dense", "neurons"), BANDWIDTH_UNITS)),
    "decode_fixed": ("decode_fixed_s", dict.fromkeys(DECODED, TIME_UNITS)),
}
KINDS = {
    "storage": Storage,
    "dram": Memory,
    "device": Memory,
    "links": Links,
    "near_data": NearData,
    "software": Software,
}
OPTIONAL = {"latency", "request", "thread", "clock", *FIELDS["links"], *FIELDS["software"]}


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
    checked(records, list[_machine()], file)
    return tuple(_profile(record) for record in records)  # of what was read: counts stay whole numbers


@cache
def _machine() -> type:
    """The type of a record of a profile file, made from `FIELDS`."""
    parts = {part: {key: _number(units) for key, (_, units) in keys.items()} for part, keys in FIELDS.items()}
    for part, fields in parts.items():
        if part != "links":
            fields["name"] = str
        if part in ("dram", "device"):
            for key, (_, numbers) in RATES.items():
                fields[key] = _object(key, {name: _number(units) for name, units in numbers.items()}, numbers)
    id = Annotated[str, Field(pattern=r"^[a-z0-9-]+\Z")]
    texts = {"id": id, "title": str, "paper": str | None, "unified": bool}
    optional = {*OPTIONAL, *RATES}
    made = {part: _object(part, fields, optional) for part, fields in parts.items()}
    return _object("machine", texts | made, {"unified", *made} - {"device"})


def _object(name: str, fields: dict, optional: Collection[str]) -> type:
    given = {key: kind for key, kind in fields.items() if key not in optional}
    return mapping(name, given, {key: fields[key] for key in fields if key in optional})


def _number(units: Iterable[str]) -> type:
    fields = {
        "value": Annotated[FiniteFloat, Field(gt=0)],
        "unit": Literal[*units],
        "basis": Literal[*(basis for basis in BASES if basis != "measured")],
        "source": Annotated[str, Field(min_length=10)],
        "range": Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)],
        "claims": Annotated[list[str], Field(min_length=1)],
    }
    return _object("number", fields, ("range", "claims"))


def _profile(record: dict) -> Profile:
    sources: dict[str, Source] = {}
    parts = {part: _part(part, record[part], sources) for part in FIELDS if part in record}
    unified = record.get("unified", False)
    return Profile(
        record["id"], record["title"], record["paper"], **parts, unified=unified, sources=MappingProxyType(sources)
    )


def _part(part: str, record: dict, sources: dict[str, Source]) -> object:
    kind = KINDS[part]
    values = {"name": record["name"]} if "name" in record else {}
    for key, (attribute, units) in FIELDS[part].items():
        if key in record:
            values[attribute], sources[f"{part}.{attribute}"] = _scaled(record[key], units)
    if kind is Memory:
        for key, (attribute, units) in RATES.items():
            rates = {}
            for name, number in record.get(key, {}).items():
                rates[name], sources[f"{part}.{attribute}.{name}"] = _scaled(number, units[name])
            values[attribute] = MappingProxyType(rates)
    return kind(**values)


def _scaled(number: dict, units: Mapping[str, float]) -> tuple[float, Source]:
    factor = units[number["unit"]]
    low, high = (factor * bound for bound in number["range"]) if "range" in number else (None, None)
    claims = tuple(number.get("claims", ()))
    return number["value"] * factor, Source(number["basis"], number["source"], low, high, claims)
