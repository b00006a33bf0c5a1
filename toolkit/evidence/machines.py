"""Kept results of several machines side by side: which numbers depend on the machine, and which ratios hold on all.

Of each notebook the machines with the same parameters are compared. The spread of a number over machines is the
difference of the largest and the smallest, over the smallest.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from toolkit.evidence.catalogue import Notebook, notebooks
from toolkit.evidence.columns import SECONDS, column
from toolkit.evidence.comparison import THIS_MACHINE
from toolkit.evidence.meta import Meta, read_meta
from toolkit.evidence.page import render
from toolkit.measure.disturbance import STAR

PAGE = "machines.html"
CLOCK = {*SECONDS, "GB/s", "tokens/s", "ops/s"}  # units of what a clock says
SIZES = {"bytes", "KiB", "MB", "GB", "bits"}
TIMED = re.compile(r"^(s|ms|GB/s|tokens/s)\b.*\bmeasured")  # captions of cards whose numbers a clock gave
EQUAL, NEAR = 1e-6, 0.01  # spreads up to which numbers count as equal, and as near
PAPERS, ITSELF = "modelled for a machine of a paper", "modelled for the machine itself"
BYTES, RATIOS, TIMES = "measured, bytes and bits", "measured, ratios", "measured, times and rates"
QUALITY = "measured, perplexities, accuracies, counts and shares"
GROUPS = (PAPERS, BYTES, QUALITY, RATIOS, TIMES, ITSELF)
COLUMNS = ["group", "numbers", "equal", "near", "median", "largest", "where"]
WIDTH, EDGE = 160, 6  # of a strip of marks
Metas = Mapping[str, Mapping[str, Meta]]  # of kept results, by machine and notebook


@dataclass(frozen=True)
class SharedCard:
    """A notebook's card of times or rates: `values` by label and machine, in the unit that `caption` names.

    `ratios` are the same over the first label's on the same machine.
    """

    about: Notebook
    caption: str
    values: Mapping[str, Mapping[str, float]]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """By label and machine, without the first label."""
        (_, first), *others = self.values.items()
        return {label: {name: of[name] / first[name] for name in of} for label, of in others}


@dataclass(frozen=True)
class Machines:
    """What is kept of several machines.

    `groups` has a row a kind of number: how many are on two machines or more, the shares that are `equal` and `near`,
    the `median` spread, the `largest` and `where` that is.
    """

    metas: Metas
    groups: pd.DataFrame
    cards: list[SharedCard]

    @property
    def clock(self) -> float:
        """The median spread of the cards' numbers."""
        return _median(spread_of(of.values()) for card in self.cards for of in card.values.values())

    @property
    def ratio(self) -> float:
        """The median spread of the cards' ratios."""
        return _median(spread_of(of.values()) for card in self.cards for of in card.ratios.values())


def compare_machines(reference: Path) -> Machines:
    """Read and compare the machines that are kept in a folder, `<machine>/<id>/table.csv` and `meta.json`."""
    about = notebooks()
    metas = {
        place.name: {id: read_meta(place / id) for id in about if (place / id / "meta.json").is_file()}
        for place in sorted(reference.iterdir())
        if place.is_dir()
    }
    alike = {id: _alike({name: of[id] for name, of in metas.items() if id in of}) for id in about}
    spreads = [_spreads({name: reference / name / id for name in of}, id) for id, of in alike.items() if len(of) > 1]
    every = pd.concat([part for part in spreads if len(part)] or [pd.DataFrame(columns=["group", "spread", "where"])])
    every = every.reset_index(drop=True)
    rows = [_summary(name, every[every["group"] == name]) for name in GROUPS if name in set(every["group"])]
    cards = [_shared_card(about[id], of) for id, of in alike.items() if len(of) > 1]
    return Machines(metas, pd.DataFrame(rows, columns=COLUMNS), [card for card in cards if card])


def _summary(name: str, of: pd.DataFrame) -> dict[str, object]:
    worst = of.loc[of["spread"].idxmax()]
    shares = {"equal": (of["spread"] <= EQUAL).mean(), "near": (of["spread"] <= NEAR).mean()}
    ends = {"median": of["spread"].median(), "largest": worst["spread"], "where": worst["where"]}
    return {"group": name, "numbers": len(of), **shares, **ends}


def write_machines(reference: Path) -> Path:
    """Write `machines.html` beside the kept machines, and return it."""
    found = compare_machines(reference)
    render(
        PAGE,
        reference / PAGE,
        found=found,
        groups=found.groups.to_dict("records"),
        facts={name: _facts(metas) for name, metas in found.metas.items()},
        places={card.about.id: _places(card) for card in found.cards},
        width=WIDTH,
        spread=spread_of,
    )
    return reference / PAGE


def spread(low, high):
    """The difference of numbers or arrays, of the smallest and the largest, over the one nearer to 0; 0 where equal."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    smaller = np.minimum(abs(low), abs(high))
    return np.divide(high - low, smaller, out=np.where(high > low, np.inf, 0.0), where=smaller > 0)


def spread_of(values: Iterable[float]) -> float:
    """The spread of some numbers."""
    known = list(values)
    return float(spread(min(known), max(known)))


def _alike(metas: Mapping[str, Meta]) -> dict[str, Meta]:
    """Of a notebook's results by machine those with the same parameters: the most such."""
    groups: dict[str, dict[str, Meta]] = {}
    for name, meta in metas.items():
        groups.setdefault(json.dumps(meta.parameters, sort_keys=True), {})[name] = meta
    return max(groups.values(), key=len, default={})


def _shared_card(about: Notebook, metas: Mapping[str, Meta]) -> SharedCard | None:
    """A notebook's cards side by side, if all are of times or rates and say the same; labels that all machines have."""
    cards = {name: meta.card for name, meta in metas.items() if meta.card}
    captions = {card.caption for card in cards.values()}
    if cards.keys() != metas.keys() or len(captions) != 1 or not TIMED.search(min(captions)):
        return None
    bars = {
        name: {label.removesuffix(STAR): value for label, value in card.bars.items()} for name, card in cards.items()
    }
    labels = [label for label in next(iter(bars.values())) if all(of.get(label) for of in bars.values())]
    values = {label: {name: of[label] for name, of in bars.items()} for label in labels}
    return SharedCard(about, min(captions), values) if len(labels) > 1 else None


def _spreads(places: Mapping[str, Path], id: str) -> pd.DataFrame:
    """A row a number that two machines or more have: `group`, `spread`, and `where` it stands.

    `places` are the folders of a notebook's results by machine. Rows of tables answer to each other by their keys.
    """
    tables = {name: pd.read_csv(place / "table.csv", low_memory=False) for name, place in places.items()}
    names = [name for name in next(iter(tables.values())) if all(name in table for table in tables.values())]
    known = {name: found for name in names if (found := column(name, id))}
    keys = [name for name, found in known.items() if found.names_rows]
    numeric = [table.select_dtypes("number").columns for table in tables.values()]
    numbers = [name for name in known if name not in keys and all(name in columns for columns in numeric)]
    if not keys or not numbers:
        return pd.DataFrame()
    sides = {}
    for name, table in tables.items():
        named = table[keys].astype(object).fillna("").astype(str)
        index = pd.MultiIndex.from_frame(named.assign(again=named.groupby(keys).cumcount()))
        sides[name] = table[numbers].set_axis(index).stack()
    wide = pd.concat(sides, axis=1)
    wide = wide[wide.notna().sum(axis=1) > 1]
    rows = wide.index.to_frame(index=False).set_axis([*keys, "again", "column"], axis=1)
    named = rows[[name for name in ("evidence", "profile", "machine", "column") if name in rows]]
    group = [_group(row, known[row["column"]].unit) for row in named.to_dict("records")]
    low, high = wide.min(axis=1).to_numpy(), wide.max(axis=1).to_numpy()
    found = pd.DataFrame({"group": group, "spread": spread(low, high), "where": f"{id}, " + rows["column"]})
    return found[found["group"].isin(GROUPS)]


def _group(row: Mapping[str, str], unit: str) -> str:
    """The group of a number, by its row's evidence and its unit; nothing for a published one."""
    if row.get("evidence") == "modelled":
        return ITSELF if THIS_MACHINE in (row.get("profile"), row.get("machine")) else PAPERS
    if row.get("evidence") != "measured":
        return ""
    return TIMES if unit in CLOCK else BYTES if unit in SIZES else RATIOS if unit == "ratio" else QUALITY


def _facts(metas: Mapping[str, Meta]) -> dict[str, str]:
    """What a machine is, and when and by which code its results were made."""
    several = {
        "machine": {meta.machine for meta in metas.values()},
        "date": {meta.finished[:10] for meta in metas.values() if meta.finished},
        "commit": {meta.commit for meta in metas.values()},
    }
    speeds = metas["endor/fig01"].card.bars if "endor/fig01" in metas and metas["endor/fig01"].card else {}
    rates = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
    shown = {name: ", ".join(sorted(filter(None, of))) for name, of in several.items()}
    return {"notebooks": str(len(metas)), **shown, "GB/s": rates or "not measured"}


def _places(card: SharedCard) -> dict[str, dict[str, float]]:
    """Where the ratios stand in a strip whose middle is 1; the scale is logarithmic and the same for the whole card."""
    most = max(abs(math.log(ratio)) for of in card.ratios.values() for ratio in of.values()) or 1.0
    scale = (WIDTH / 2 - EDGE) / most
    return {
        label: {name: round(WIDTH / 2 + scale * math.log(ratio), 1) for name, ratio in of.items()}
        for label, of in card.ratios.items()
    }


def _median(values: Iterable[float]) -> float:
    return float(pd.Series(list(values), dtype=float).median())
