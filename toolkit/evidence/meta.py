"""The record `meta.json` of a notebook's results."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.files import read_json

HEADLINES = ("gain", "cost", "negative")
MOST_BARS = 9  # of a card


class Card(BaseModel):
    """The few numbers that stand for a notebook on the report's index, where a whole figure is too small to read.

    `caption` says what they are, with unit and evidence: "ms a layer, measured here". `bars` are values from 0 by
    label, in the order in which they are drawn; the index has room for `MOST_BARS`.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    caption: str
    bars: dict[str, float]


class Meta(BaseModel):
    """The fields of `meta.json` that a reader sees.

    `verdicts` counts verdicts by kind of claim. `score` holds errors of the predictions, as shares. `headline` says
    what the notebook shows for a whole system: `gain`, `cost` and `negative`, a sentence each, of the paper `system`.
    `seen` is the notebook's answer. `disturbed` is `count_disturbed` of the table, as `rows` and `of`.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    id: str | None = None
    version: int | None = Field(default=None, validation_alias="schema")
    figures: list[str] = []
    evidence: list[str] = []
    verdicts: dict[str, dict[str, int]] = {}
    score: dict[str, float | str] = {}
    parameters: dict[str, Any] = {}
    card: Card | None = None
    headline: dict[str, str] = {}
    seen: str | None = None
    disturbed: dict[str, int] = {"rows": 0, "of": 0}
    wall_s: float | None = None
    finished: str | None = None
    git: str | None = None
    git_dirty: bool | None = None
    cpu: str | None = None
    memory_gb: float | None = None
    gpu: str | None = None
    threads: int | None = None
    versions: dict[str, str | None] = {}

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
    """The `meta.json` of a results folder; `Meta()` for a file that is absent, damaged or of an older toolkit."""
    try:
        return Meta.model_validate(read_json(folder / "meta.json"))
    except ValidationError:
        return Meta()
