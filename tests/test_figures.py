import pandas as pd
import pytest
from matplotlib.figure import Figure

from toolkit.figures import comparison_bars, timeline


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
