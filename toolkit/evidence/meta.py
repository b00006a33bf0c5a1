"""The record `meta.json` of a notebook's results."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.files import read_json

HEADLINES = ("gain", "cost", "negative")
MOST_BARS = 6  # of a card, which has room for so many


@dataclass(frozen=True)
class Meta:
    """The fields of `meta.json` that a reader sees.

    `verdicts` counts verdicts by kind of claim. `score` holds errors of the predictions, as shares. `headline` says
    what the notebook shows for a whole system: `gain`, `cost` and `negative`, a sentence each, of the paper `system`.
    `seen` is the notebook's answer. `disturbed` is `count_disturbed` of the table, as `rows` and `of`. `card` has the
    few numbers that stand for the notebook on the report's index: a `caption` that says what they are, with unit and
    evidence, and `bars`, values from 0 by label, in the order in which they are drawn.
    """

    id: str | None = None
    schema: int | None = None
    figures: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    verdicts: dict[str, dict[str, int]] = field(default_factory=dict)
    score: dict[str, float | str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] | None = None
    headline: dict[str, str] = field(default_factory=dict)
    seen: str | None = None
    disturbed: dict[str, int] = field(default_factory=lambda: {"rows": 0, "of": 0})
    wall_s: float | None = None
    finished: str | None = None
    git: str | None = None
    git_dirty: bool | None = None
    cpu: str | None = None
    memory_gb: float | None = None
    gpu: str | None = None
    threads: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def commit(self) -> str | None:
        """The commit in short, and whether files were changed."""
        return self.git and self.git[:10] + (" with uncommitted changes" if self.git_dirty else "")

    @property
    def machine(self) -> str | None:
        """The machine in words."""
        memory = [] if self.memory_gb is None else [f"{self.memory_gb:.0f} GB of memory"]
        return self.cpu and ", ".join([self.cpu, *memory, self.gpu or "no GPU"])


def read_meta(folder: Path) -> Meta:
    """The `meta.json` of a results folder; `Meta()` for a file that is absent or damaged."""
    found = read_json(folder / "meta.json")
    return Meta(**{one.name: found[one.name] for one in fields(Meta) if one.name in found})
