"""Hardware profiles: capacities, bandwidths and peak rates of the papers' machines, each with its source.

    machine = profile("endor-rtx4080")
    machine.links.storage_to_dram_gb_s          # 2.55
    machine.sources["links.storage_to_dram_gb_s"].text

A profile is a record of `data/hardware/<paper>.yaml`, where every number is written with its unit, its basis and its
source; here the numbers are plain floats in the units that their names say, and the sources stand beside them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import jsonschema
import pandas as pd
import yaml

from toolkit import paths
from toolkit.errors import UserError, unknown

BASES = {
    "paper": "stated by the paper",
    "datasheet": "stated by the vendor",
    "derived": "worked out from the paper's or the vendor's figures; the source shows how",
    "assumed": "stated nowhere; the source says what was assumed",
    "measured": "measured on the machine by the probe",
}
EVIDENCE = {  # the kind of evidence that a results table gives for a number of each basis
    "paper": "published",
    "datasheet": "published",
    "derived": "modelled",
    "assumed": "modelled",
    "measured": "measured",
}

# How a number is written in a file: its key, the attribute it becomes, and each unit's factor to the attribute's.
GB, GIB = 1e9, 2.0**30
CAPACITY = ("capacity_bytes", {"GB": GB, "TB": 1e12, "GiB": GIB})
BANDWIDTH_UNITS = {"GB/s": 1.0, "GiB/s": GIB / GB}
BANDWIDTH = ("bandwidth_gb_s", BANDWIDTH_UNITS)
TIME_UNITS = {"us": 1e-6, "ms": 1e-3}
RATE_UNITS = {"TFLOP/s": 1.0, "GFLOP/s": 1e-3}
DTYPES = ("fp32", "fp16", "bf16", "int8")
FIELDS = {
    "storage": {
        "capacity": CAPACITY,
        "bandwidth": BANDWIDTH,
        "latency": ("latency_s", TIME_UNITS),
        "request": ("request_s", TIME_UNITS),
    },
    "dram": {"capacity": CAPACITY, "bandwidth": BANDWIDTH},
    "device": {"capacity": CAPACITY, "bandwidth": BANDWIDTH},
    "links": {
        name: (f"{name}_gb_s", BANDWIDTH_UNITS) for name in ("storage_to_dram", "dram_to_device", "storage_to_device")
    },
    "near_data": {
        "dimms": ("dimms", {"DIMMs": 1}),
        "capacity": CAPACITY,
        "bandwidth": BANDWIDTH,
        "compute": ("tflop_s", RATE_UNITS),
        "link": ("link_gb_s", BANDWIDTH_UNITS),
    },
}
COMPUTE = dict.fromkeys(DTYPES, RATE_UNITS)  # of dram (the CPU) and device
OPTIONAL = {"latency", "request", *FIELDS["links"]}


@dataclass(frozen=True)
class Source:
    """Where a number comes from: its basis (a key of `BASES`) and the words; `low` and `high` where it is uncertain.

    `low` and `high` are in the unit of the number they belong to.
    """

    basis: str
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Storage:
    """A disk. `bandwidth_gb_s` is its limit for long reads; the two times say what short ones cost.

    `latency_s`: from a request to its data on an idle disk, without the transfer; requests of several threads overlap
    here. `request_s`: the part of a request's cost that does not overlap, so 1 / `request_s` bounds the reads a second.
    """

    name: str
    capacity_bytes: float
    bandwidth_gb_s: float
    latency_s: float | None = None
    request_s: float = 0.0

    def read_gb_s(self, chunk_bytes: int, threads: int) -> float:
        """Random-read bandwidth in GB/s when `threads` threads each wait for one chunk at a time.

        Every read waits `latency_s` beside the others, then its turn at the disk behind them: with s(c) =
        `request_s` + c / bandwidth, threads · c / (latency + threads · s(c)). This is the pessimistic bound of
        operational analysis for a closed system of one server and a delay; it rises with chunk and threads towards the
        bandwidth, as FLASH, figure 2b, shows. Raises `UserError` for a disk of unknown latency.
        """
        if self.latency_s is None:
            raise UserError(f"the profile gives no latency for {self.name}: short reads cannot be modelled")
        serial_s = self.request_s + chunk_bytes / (self.bandwidth_gb_s * GB)
        return threads * chunk_bytes / (self.latency_s + threads * serial_s) / GB


@dataclass(frozen=True)
class Memory:
    """A memory and the processor that computes on it: DRAM with the CPU, or device memory with the GPU.

    `tflop_s` maps a dtype to the dense peak rate in 10¹² operations a second (a multiply-add is two); half-precision
    GPU rates accumulate in fp32 unless the source says otherwise.
    """

    name: str
    capacity_bytes: float
    bandwidth_gb_s: float
    tflop_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def attainable_tflop_s(self, intensity: float, dtype: str) -> float:
        """The roofline: rate in TFLOP/s of a kernel that does `intensity` operations per byte it moves.

        Raises `UserError` for a dtype that the profile gives no peak rate of.
        """
        if dtype not in self.tflop_s:
            raise unknown(f"dtype of {self.name}", dtype, self.tflop_s)
        return min(self.tflop_s[dtype], intensity * self.bandwidth_gb_s / 1e3)


@dataclass(frozen=True)
class Links:
    """Copy bandwidth in one direction between two tiers, GB/s; None where there is no such path or no number."""

    storage_to_dram_gb_s: float | None = None
    dram_to_device_gb_s: float | None = None
    storage_to_device_gb_s: float | None = None


@dataclass(frozen=True)
class NearData:
    """DIMMs that compute on their own contents (HERMES, section IV-A and table II). All numbers are per DIMM."""

    name: str
    dimms: int
    capacity_bytes: float
    bandwidth_gb_s: float
    tflop_s: float
    link_gb_s: float


@dataclass(frozen=True)
class Profile:
    """One machine. `sources` has the source of every number by its dotted name, `device.tflop_s.fp16` say.

    A part that a paper does not use is None. With `unified`, DRAM is the device's memory: nothing is copied.
    """

    id: str
    title: str
    paper: str | None
    storage: Storage | None = None
    dram: Memory | None = None
    device: Memory | None = None
    links: Links = Links()
    near_data: NearData | None = None
    unified: bool = False
    sources: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def value(self, name: str) -> float:
        """The number of that dotted name. Raises `UserError` for a name that the profile has no number of."""
        if name not in self.sources:
            raise unknown(f"number of {self.id}", name, self.sources)
        part, quantity, *dtype = name.split(".")
        value = getattr(getattr(self, part), quantity)
        return value[dtype[0]] if dtype else value

    def table(self) -> pd.DataFrame:
        """A row a number: profile, part, name, quantity (with its unit), value, low, high, basis, source, evidence."""
        return pd.DataFrame(
            {
                "profile": self.id,
                "part": name.split(".")[0],
                "name": getattr(getattr(self, name.split(".")[0]), "name", None),
                "quantity": name.split(".", 1)[1],
                "value": self.value(name),
                "low": source.low,
                "high": source.high,
                "basis": source.basis,
                "source": source.text,
                "evidence": EVIDENCE[source.basis],
            }
            for name, source in self.sources.items()
        )


def profiles() -> dict[str, Profile]:
    """Every profile of `data/hardware/`, by id.

    Raises `UserError` naming file and record for a missing or unknown field, a wrong unit, a number without a source,
    or an id used twice.
    """
    found: dict[str, Profile] = {}
    for file in sorted((paths.root() / "data" / "hardware").glob("*.yaml")):
        for record in _records(file):
            if record["id"] in found:
                raise UserError(f"{file.name}: record {record['id']}: the id is used twice; expected one of its own")
            found[record["id"]] = _profile(record)
    return found


def profile(name: str) -> Profile:
    """One profile by its id. Raises `UserError` for an unknown one."""
    known = profiles()
    if name not in known:
        raise unknown("hardware profile", name, known)
    return known[name]


def _records(file: Path) -> list[dict]:
    try:
        records = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    for error in jsonschema.Draft202012Validator(schema()).iter_errors(records):
        where = list(error.absolute_path)
        record = records[where[0]] if where else None
        label = record.get("id", f"number {where[0] + 1}") if isinstance(record, dict) else json.dumps(record)[:80]
        path = ".".join(map(str, where[1:])) or "the record"
        raise UserError(f"{file.name}: record {label}: {path}: {error.message[:200]}")
    return records


def schema() -> dict:
    """The JSON schema of a profile file, made from `FIELDS`."""
    parts = {part: _object({key: _number(units) for key, (_, units) in keys.items()}) for part, keys in FIELDS.items()}
    for part, definition in parts.items():
        if part != "links":
            definition["properties"]["name"] = {"type": "string"}
            definition["required"].append("name")
    for part in ("dram", "device"):
        rates = {dtype: _number(units) for dtype, units in COMPUTE.items()}
        parts[part]["properties"]["compute"] = _object(rates) | {"required": []}
    texts = {"id": {"type": "string", "pattern": "^[a-z0-9-]+$"}, "title": {"type": "string"}}
    other = {"paper": {"type": ["string", "null"]}, "unified": {"type": "boolean"}}
    machine = _object(texts | other | parts) | {"required": ["id", "title", "paper", "device"]}
    return {"type": "array", "items": machine}


def _object(properties: dict) -> dict:
    required = [key for key in properties if key not in OPTIONAL]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _number(units: Iterable[str]) -> dict:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["value", "unit", "basis", "source"],
        "properties": {
            "value": {"type": "number", "exclusiveMinimum": 0},
            "unit": {"enum": list(units)},
            "basis": {"enum": [basis for basis in BASES if basis != "measured"]},
            "source": {"type": "string", "minLength": 10},
            "range": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        },
    }


def _profile(record: dict) -> Profile:
    sources: dict[str, Source] = {}
    parts = {part: _part(part, record[part], sources) for part in FIELDS if part in record}
    unified = record.get("unified", False)
    return Profile(
        record["id"], record["title"], record["paper"], **parts, unified=unified, sources=MappingProxyType(sources)
    )


def _part(part: str, record: dict, sources: dict[str, Source]) -> object:
    kind = {"storage": Storage, "dram": Memory, "device": Memory, "links": Links, "near_data": NearData}[part]
    values = {"name": record["name"]} if "name" in record else {}
    for key, (attribute, units) in FIELDS[part].items():
        if key in record:
            values[attribute], sources[f"{part}.{attribute}"] = _scaled(record[key], units)
    if kind is Memory:
        rates = {}
        for dtype, number in record.get("compute", {}).items():
            rates[dtype], sources[f"{part}.tflop_s.{dtype}"] = _scaled(number, COMPUTE[dtype])
        values["tflop_s"] = MappingProxyType(rates)
    return kind(**values)


def _scaled(number: dict, units: Mapping[str, float]) -> tuple[float, Source]:
    factor = units[number["unit"]]
    low, high = (factor * bound for bound in number["range"]) if "range" in number else (None, None)
    return number["value"] * factor, Source(number["basis"], number["source"], low, high)
