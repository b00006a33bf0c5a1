import pandas as pd
import pytest
from matplotlib.figure import Figure

from toolkit.evidence.figures import (
    colours,
    evidence_dots,
    machines_figure,
    stacked_bars,
    timeline,
)
from toolkit.timeline import Span, Timeline


@pytest.fixture
def axes():
    return Figure().subplots()


def boxes(axes):
    """(left, width, middle, hatch) of every bar."""
    return sorted((b.get_x(), b.get_width(), b.get_y() + b.get_height() / 2, b.get_hatch()) for b in axes.patches)


@pytest.fixture
def spans():
    return Timeline(
        (
            Span("read", "fc1", "storage", 0.0, 1.0),
            Span("copy", "fc1", "dram", 1.0, 1.5),
            Span("read", "fc2", "storage", 1.0, 3.0),
        ),
        "modelled",
    )


def test_timeline_draws_each_span_in_its_lane(axes, spans):
    timeline(axes, spans.table())
    assert boxes(axes) == [(0.0, 1.0, 0.0, "///"), (1.0, 0.5, 1.0, "///"), (1.0, 2.0, 0.0, "///")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["storage", "dram"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["read", "copy"]


def test_stacked_bars_put_each_part_at_the_end_of_the_one_before(axes, spans):
    dense, endor = spans.stages().assign(method="dense"), spans.stages().assign(method="endor", evidence="measured")
    stacked_bars(axes, pd.concat([dense, endor[endor["stage"] != "read"]]), bar="method")
    assert boxes(axes) == [(0.0, 0.5, 1.0, ""), (0.0, 3.0, 0.0, "///"), (3.0, 0.5, 0.0, "///")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense", "endor"]


def test_evidence_dots_block_by_block_in_the_order_of_the_table(axes):
    table = pd.DataFrame(
        {
            "machine": ["mine", "mine", "theirs"],
            "tier": ["disk", "DRAM", "DRAM"],
            "bandwidth_gb_s": [1.0, 10.0, 50.0],
            "evidence": ["measured", "published", "modelled"],
        }
    )
    evidence_dots(axes, table, "bandwidth_gb_s", block="machine", dot="tier")
    dots = [(line.get_xdata()[0], round(line.get_ydata()[0], 9), line.get_marker()) for line in axes.lines]
    assert dots == [(1.0, -0.2, "o"), (10.0, 0.2, "D"), (50.0, 1.0, "o")]
    assert axes.lines[1].get_color() == axes.lines[2].get_color() != axes.lines[0].get_color()
    assert axes.lines[2].get_markerfacecolor() == "white"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["disk", "DRAM", "measured", "modelled", "published"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mine", "theirs"]


def test_a_method_has_one_colour_whatever_stands_beside_it():
    alone, among = colours(["endor_packed"]), colours(["toy", "dense, pipelined", "endor_packed, pipelined", "other"])
    assert alone["endor_packed"] == among["endor_packed, pipelined"]
    assert len(set(among.values())) == len(among)


ROWS = [
    # profile, evidence, way, stage, seconds
    ("paper", "modelled", "dense", "read", 4.0),
    ("paper", "modelled", "dense", "total", 4.0),
    ("here", "measured", "dense", "read", 2.0),
    ("here", "measured", "endor", "read", 1.0),
    ("here", "measured", "endor", "decode", 0.5),
    ("here", "modelled", "dense", "read", 2.5),
    ("here", "modelled", "endor", "read", 1.25),
]
TABLE = pd.DataFrame(ROWS, columns=["profile", "evidence", "way", "stage", "seconds"]).assign(model="toy")
CLAIMS = [
    ("fig00-endor-speedup", "speedup", 1.7, 1.5, "paper", "modelled"),
    ("fig00-endor-speedup", "speedup", 1.7, 1.25, "here", "measured"),
    ("fig00-layer", "s", 1.0, 4.0, "paper", "modelled"),
    ("fig00-copy-speedup", "speedup", 1.7, None, "paper", None),
]
COMPARISON = pd.DataFrame(CLAIMS, columns=["claim", "unit", "published", "ours", "profile", "evidence"])
COMPARISON = COMPARISON.assign(
    kind=["input", "prediction", "input", "input"],
    quantity="speed-up",
    ours_low=[None, 1.0, None, None],
    ours_high=[None, 1.5, None, None],
)
COMPARISON["conditions"] = ["a layer, Endor over dense; in words there"] * 2 + ["a layer", "a copy"]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_panel_a_machine_with_thin_bars_for_the_model_below_what_was_measured():
    disturbed = TABLE["evidence"].eq("measured") & TABLE["way"].eq("endor")
    paper, here, ratios = machines_figure(TABLE.assign(disturbed=disturbed.astype(float)), COMPARISON).axes
    assert "paper, toy, modelled" in (paper.get_title(), paper.get_title(loc="right"))
    assert names(paper) == ["dense"]
    assert names(here) == ["dense", "endor *"]
    bars = {(round(bar.get_y()), bar.get_x(), bar.get_width(), bar.get_hatch()) for bar in here.patches}
    assert bars == {(0, 0, 2, ""), (0, 0, 2.5, "///"), (1, 0, 1, ""), (1, 1, 0.5, ""), (1, 0, 1.25, "///")}
    assert max(bar.get_height() for bar in here.patches if bar.get_hatch()) == pytest.approx(0.24)
    assert [name.replace("\n", " ") for name in names(ratios)] == [
        "speed-up: a layer, Endor over dense",
        "speed-up: a layer, Endor over dense, here",
    ]
    assert [bar.get_fill() and bar.get_facecolor()[3] for bar in ratios.patches] == [0, 1]  # fitted: hollow
    assert [bar.get_width() for bar in ratios.patches] == [1.5, 1.25]
    assert [*next(line for line in ratios.lines if line.get_marker() == "D").get_xdata()] == [1.7, 1.7]
    assert whisker_ends(ratios) == {(1.0, 1.5, 1)}
    assert len(machines_figure(TABLE, COMPARISON.iloc[2:]).axes) == 2  # no ratios, no panel of them


def whisker_ends(axes):
    return {(*line.get_xdata(), line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "|"}
