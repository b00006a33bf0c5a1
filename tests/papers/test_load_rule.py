"""The loading rule: what is timed, on a tiny expert, and where the crossing lies, by hand."""

import time

import numpy as np
import pandas as pd
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.papers.corm.load_rule import (
    DISK,
    GATHERED,
    WHOLE,
    Link,
    load_times,
)

fig09 = functions_of("corm/fig09")


def test_the_crossing_by_hand():
    for ms, whole_ms, expected in (
        ([1.0, 2.0, 3.0], 2.5, 62.5),  # half way from 0.5 to 0.75
        ([1.0, 2.0, 3.0], 1.0, 0.0),
        ([1.0, 2.0, 3.0], 3.5, 100.0),
        ([1.0, 3.0, 1.0], 2.0, 37.5),  # the first crossing counts
    ):
        assert fig09.limit_of(np.array([25.0, 50.0, 75.0]), np.array(ms), whole_ms) == expected


def test_crossings_with_and_without_decompression():
    whole = {"way": WHOLE, "share": 1.0, "compress_s": 0.0}
    rows = [whole | {"seconds": seconds, "load_s": seconds} for seconds in (5.0, 4.0)]  # by two readers
    rows += [
        {"way": GATHERED, "share": s, "seconds": 8 * s, "compress_s": s, "load_s": 4 * s}
        for s in (0.25, 0.5, 0.75, 1.0)
    ]
    times = pd.DataFrame(rows).assign(model="m", tier=DISK, bits=4, evidence="measured", gap_bytes=0)
    times = times.assign(seconds_low=0.0, seconds_high=0.0, decompress_s=0.0)
    found = fig09.crossings(fig09.in_ms(times)).set_index("use")["limit_percent"]
    assert found.to_dict() == {"decompressed": 50, "as they come": pytest.approx(80)}


def test_a_paced_copy_takes_what_its_link_would():
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    link = Link("slow", gb_s=1.0, fixed_s=0.02)
    begun_s = time.perf_counter()
    link.copy(source, target)
    assert time.perf_counter() - begun_s >= 0.02 + 8e-6
    assert torch.equal(source, target)


def test_every_tier_way_and_share_has_a_row(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(ARCHITECTURES, "tiny", ModelShape(1, 64, 40, 1, 10, 1, 64, experts=2, experts_per_token=1))
    times = load_times("tiny", (16, 4, 2), (0.1, 1.0), (Link("paced", 10.0, 1e-4),), repetitions=2)
    readers = len(set(times.loc[times["tier"] == DISK, "mode"]))
    wholes = readers + 2  # two of them, unless the system refuses one
    assert len(times) == 3 * (wholes + 2 * (2 + 1 + 1))  # bits · (whole by tier, shares · (two gaps, memory, link))
    assert times[times["way"] == WHOLE].groupby("tier").size().to_dict() == {DISK: 3 * readers, "dram": 3, "paced": 3}
    assert (times["seconds"] > 0).all()
    assert times.groupby("tier")["evidence"].first().to_dict() == {
        "disk": "measured",
        "dram": "measured",
        "paced": "modelled",
    }
    paced = times[times["tier"] == "paced"]
    assert (paced["load_s"] >= 1e-4).all()
    sums = times[["compress_s", "load_s", "decompress_s"]].sum(axis=1)
    assert (sums > 0).all()
    limits = fig09.crossings(fig09.in_ms(times))
    assert len(limits) == 3 * 2 * (2 + 1)
    assert limits["limit_percent"].between(0, 100).all()
    assert times["stored_bytes"].unique().tolist() == [40 * 384, 40 * 192, 40 * 128]
