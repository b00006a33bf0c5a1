"""The notebook on prompts and batches: its phases and speed-ups, worked out by hand and on a toy."""

import pandas as pd
import pytest

from tests.models.test_twins import TOYS
from tests.notebook_code import functions_of
from toolkit.measure.race import Race, run_race
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.offload.ways import Way

BOOK = functions_of("beyond/tokens")


def test_phases_of_a_toy(monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
    way = Way("dense", policy="pipelined", device="cpu")
    race = Race(Workload("toy-opt"), 3, [(way, "storage")], 1, 3, prompt_tokens=5, batches=(1, 2))
    spans = run_race(race, tmp_path)
    layer_bytes = sum(outputs * inputs * 2 for outputs, inputs in TOYS["toy-opt"].values())
    step = BOOK.by_phase(spans, "generation", 1).set_index("batch").loc[2]
    assert step["read_bytes"] == pytest.approx(3 * layer_bytes, rel=0.35)  # a layer on either side of the window
    assert step["bytes_a_token"] == step["read_bytes"] / 2
    assert step["tokens_per_s"] == pytest.approx(2 / step["seconds"])
    prompt = BOOK.by_phase(spans, "prompt", 5).set_index("batch").loc[2]
    assert prompt["tokens_per_s"] == pytest.approx(2 * 5 / prompt["seconds"])


def table_of(phase="generation", **seconds):
    """Turns of one text, at 16 bytes dense and 9 packed."""
    rows = [
        {"method": method, "repetition": number, "seconds": found, "read_bytes": 9 if method == "endor" else 16}
        for method, each in seconds.items()
        for number, found in enumerate(each, 1)
    ]
    shared = {"policy": "pipelined", "batch": 1, "phase": phase, "mode": "direct", "disturbed": False}
    shared |= {"memory_bytes": 1.0, "stored_bytes": 1.0, "manage_s": 0.0}
    return BOOK.speedups(BOOK.same_code(pd.DataFrame(rows).assign(**shared)))


@pytest.mark.parametrize(("dense", "speedup", "fault"), [([1.5, 2.5], 2.0, False), ([2.0, 2.0], 2.0, True)])
def test_a_speed_up_above_its_byte_limit_in_every_turn_is_a_fault(dense, speedup, fault):
    table = table_of(dense=dense, endor=[1.0, 1.0], accelerate=[9.0, 9.0]).set_index("method")
    assert table["speedup"]["endor"] == speedup
    assert table["byte_limit"]["endor"] == pytest.approx(16 / 9)
    assert pd.isna(table["byte_limit"]["accelerate"])
    assert table["fault"].to_dict() == {"dense": False, "endor": fault, "accelerate": False}
    assert ("faulty measurements" in BOOK.seen(table.reset_index()).lower()) == fault


def test_passes_by_the_same_code_are_one_row():
    """Seconds 1 and 3 of a prompt, 2 and 4 by the same code: a median of 2.5 over four turns."""
    seconds = {"dense": [5.0, 5.0], "endor": [1.0, 3.0], "endor_packed": [2.0, 4.0]}
    merged = table_of("prompt", **seconds).set_index("method")
    assert merged["seconds"].to_dict() == {"dense": 5.0, "endor": 2.5}
    assert merged.loc["endor", ["seconds_low", "seconds_high"]].tolist() == [1.0, 4.0]
    assert table_of(**seconds)["method"].tolist() == ["dense", "endor", "endor_packed"]
