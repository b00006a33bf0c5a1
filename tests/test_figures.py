import pandas as pd
import pytest
from matplotlib.figure import Figure

from toolkit.figures import comparison_bars, evidence_bars, timeline


@pytest.fixture
def axes():
    return Figure().subplots()


def test_timeline_draws_each_span_in_its_lane(axes):
    spans = pd.DataFrame(
        {
            "lane": ["SSD", "PCIe", "SSD"],
            "operation": ["read", "copy", "read"],
            "start_s": [0.0, 1.0, 1.0],
            "end_s": [1.0, 1.5, 3.0],
        }
    )
    timeline(axes, spans)
    bars = sorted((bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches)
    assert bars == [(0.0, 1.0, 0.0), (1.0, 0.5, 1.0), (1.0, 2.0, 0.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["SSD", "PCIe"]


def test_comparison_bars_hatch_what_is_modelled_and_mark_what_is_published(axes):
    comparison = pd.DataFrame(
        {
            "conditions": ["a", "b", "c"],
            "published": [1.0, 2.0, 3.0],
            "ours": [1.1, 2.2, None],
            "evidence": ["measured", "modelled", None],
        }
    )
    comparison_bars(axes, comparison)
    assert [bar.get_width() for bar in axes.patches] == [1.1, 2.2]
    assert [bar.get_hatch() for bar in axes.patches] == ["", "///"]
    assert axes.lines[0].get_xdata().tolist() == [1.0, 2.0, 3.0]


def test_evidence_bars_block_by_block_in_the_order_of_the_table(axes):
    table = pd.DataFrame(
        {
            "machine": ["mine", "mine", "theirs"],
            "tier": ["disk", "DRAM", "DRAM"],
            "bandwidth_gb_s": [1.0, 10.0, 50.0],
            "evidence": ["measured", "measured", "modelled"],
        }
    )
    evidence_bars(axes, table, "bandwidth_gb_s", block="machine", bar="tier")
    bars = [(bar.get_width(), round(bar.get_y() + bar.get_height() / 2, 9), bar.get_hatch()) for bar in axes.patches]
    assert bars == [(1.0, -0.2, ""), (10.0, 0.2, ""), (50.0, 1.0, "///")]
    assert axes.patches[1].get_facecolor() == axes.patches[2].get_facecolor() != axes.patches[0].get_facecolor()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["disk", "DRAM", "modelled"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mine", "theirs"]


def test_evidence_bars_leave_the_place_of_a_block_without_rows(axes):
    row = {"machine": ["theirs"], "tier": ["DRAM"], "value": [50.0], "evidence": ["published"]}
    evidence_bars(axes, pd.DataFrame(row), "value", block="machine", bar="tier", blocks=["mine", "theirs"])
    assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == [1.0]
    assert axes.get_ylim() == (1.5, -0.5)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["DRAM"]
