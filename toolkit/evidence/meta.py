"""What `meta.json` says of a notebook's results, read with care: a field of another shape counts as absent.

The report is also made of results that an older toolkit left, that a disk damaged or that someone edited.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.evidence.cards import MOST_BARS, Card
from toolkit.evidence.comparison import VERDICTS
from toolkit.files import read_json

SHOWN_KINDS = ("prediction", "arithmetic", "input", "context")  # predictions first
HEADLINES = ("gain", "cost", "negative")
UNSORTED = "claim"  # older results do not say of which kind a claim is


@dataclass(frozen=True)
class Meta:
    """The fields of `meta.json` that a reader sees.

    `verdicts` counts verdicts by kind of claim. `score` holds errors of the predictions, as shares. `headline` says
    what the notebook shows for a whole system: `gain`, `cost` and `negative`, a sentence each, of the paper `system`.
    `seen` is the notebook's answer. `disturbed` is `count_disturbed` of the table.
    """

    id: str | None = None
    schema: object = None
    figures: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    verdicts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    score: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)
    card: Card | None = None
    headline: Mapping[str, str] = field(default_factory=dict)
    seen: str | None = None
    disturbed: tuple[int, int] = (0, 0)
    wall_s: float | None = None
    finished: str | None = None
    commit: str | None = None
    machine: str | None = None
    threads: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def read_meta(folder: Path) -> Meta:
    """The `meta.json` of a results folder. Never raises for what the file holds; an absent file gives `Meta()`."""
    raw = read_json(folder / "meta.json")
    return Meta(
        id=_text(raw.get("id")),
        schema=raw.get("schema"),
        figures=tuple(Path(name).name for name in _texts(raw.get("figures"))),
        evidence=_texts(raw.get("evidence")),
        verdicts=_verdicts(raw.get("verdicts")),
        score=_numbers(raw.get("score")),
        parameters=_mapping(raw.get("parameters")),
        card=_card(_mapping(raw.get("card"))),
        headline={key: text for key, text in _mapping(raw.get("headline")).items() if _text(text)},
        seen=_text(raw.get("seen")),
        disturbed=_disturbed(_mapping(raw.get("disturbed"))),
        wall_s=_number(raw.get("wall_s")),
        finished=_text(raw.get("finished")),
        commit=_commit(raw),
        machine=_machine(raw),
        threads=_threads(raw.get("threads")),
        versions={name: version for name, version in _mapping(raw.get("versions")).items() if _text(version)},
    )


def _verdicts(value: object) -> dict[str, dict[str, int]]:
    """By kind and verdict, each in its own order; older results have one flat count."""
    found = _mapping(value)
    by_kind = {kind: _counts(counts) for kind, counts in found.items() if isinstance(counts, dict)}
    by_kind[UNSORTED] = by_kind.get(UNSORTED, {}) | _counts(found)
    return {kind: by_kind[kind] for kind in _ordered(by_kind, SHOWN_KINDS) if by_kind[kind]}


def _counts(value: dict) -> dict[str, int]:
    counts = {verdict: count for verdict, count in value.items() if isinstance(count, int) and count > 0}
    return {verdict: counts[verdict] for verdict in _ordered(counts, VERDICTS)}


def _ordered(names: Mapping[str, object], order: tuple[str, ...]) -> list[str]:
    return [name for name in order if name in names] + [name for name in names if name not in order]


def _card(value: Mapping[str, object]) -> Card | None:
    bars = {label: number for label, number in _numbers(value.get("bars")).items() if number >= 0}
    return Card(_text(value.get("caption")) or "", dict(list(bars.items())[:MOST_BARS])) if bars else None


def _disturbed(value: Mapping[str, object]) -> tuple[int, int]:
    count, known = (value.get(name) for name in ("rows", "of"))
    sound = isinstance(count, int) and isinstance(known, int) and 0 <= count <= known
    return (int(count), int(known)) if sound else (0, 0)


def _commit(raw: Mapping[str, object]) -> str | None:
    commit = _text(raw.get("git"))
    return commit and commit[:10] + (" with uncommitted changes" if raw.get("git_dirty") is True else "")


def _machine(raw: Mapping[str, object]) -> str | None:
    cpu, memory_gb = _text(raw.get("cpu")), _number(raw.get("memory_gb"))
    if cpu is None:
        return None
    memory = [] if memory_gb is None else [f"{memory_gb:.0f} GB of memory"]
    return ", ".join([cpu, *memory, _text(raw.get("gpu")) or "no GPU"])


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _numbers(value: object) -> dict[str, float]:
    return {name: number for name, number in _mapping(value).items() if _number(number) is not None}


def _number(value: Any) -> float | None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    return value if sound else None


def _threads(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if _text(item)) if isinstance(value, list) else ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
