import pandas as pd

from toolkit.evidence.latency_figure import machines_figure

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
COMPARISON = COMPARISON.assign(ours_low=None, ours_high=None)
COMPARISON["conditions"] = ["a layer, Endor over dense; in words there"] * 2 + ["a layer", "a copy"]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_panel_a_machine_with_what_was_modelled_below_what_was_measured():
    paper, here, _ = machines_figure(TABLE, COMPARISON).axes
    assert "paper, toy, modelled" in (paper.get_title(), paper.get_title(loc="left"))
    assert names(paper) == ["dense"]
    assert names(here) == ["dense", "dense, modelled", "endor", "endor, modelled"]
    boxes = {(bar.get_y() + 0.35, bar.get_x(), bar.get_width(), bar.get_hatch()) for bar in here.patches}
    assert boxes == {(0, 0, 2, ""), (1, 0, 2.5, "///"), (2, 0, 1, ""), (2, 1, 0.5, ""), (3, 0, 1.25, "///")}


def test_what_other_work_disturbed_has_a_star():
    disturbed = TABLE["evidence"].eq("measured") & TABLE["way"].eq("endor")
    _, here, _ = machines_figure(TABLE.assign(disturbed=disturbed.astype(float)), COMPARISON).axes
    assert names(here) == ["dense", "dense, modelled", "endor *", "endor, modelled"]


def test_ratios_stand_beside_the_published_ones_and_what_was_not_run_is_left_out():
    ratios = machines_figure(TABLE, COMPARISON).axes[-1]
    assert names(ratios) == ["a layer, Endor over dense", "a layer, Endor over dense, here"]
    assert [bar.get_width() for bar in ratios.patches] == [1.5, 1.25]
    assert list(ratios.lines[0].get_xdata()) == [1.7, 1.7]


def test_without_ratios_there_is_no_panel_of_them():
    assert len(machines_figure(TABLE, COMPARISON.iloc[2:]).axes) == 2
    assert len(machines_figure(TABLE, COMPARISON.iloc[:0]).axes) == 2


def test_the_total_is_marked_where_stages_overlap():
    rows = [("read", 2.0), ("compute", 1.0), ("total", 2.5)]
    table = pd.DataFrame(rows, columns=["stage", "seconds"]).assign(
        profile="here", evidence="measured", way="endor, pipelined", model="toy"
    )
    [axes] = machines_figure(table, COMPARISON.iloc[:0]).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[2.5, 2.5]]
    [apart] = machines_figure(table.assign(seconds=[2.0, 1.0, 3.0]), COMPARISON.iloc[:0]).axes
    assert list(apart.lines) == []


def whisker_ends(axes):
    return {(*line.get_xdata(), line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "|"}


def test_a_total_has_a_whisker_from_the_least_to_the_most_where_they_differ():
    rows = [("dense", "total", 4.0, 3.5, 6.0), ("endor", "total", 2.0, None, None), ("zstd", "total", 5.0, 5.0, 7.0)]
    rows += [("dense", "read", 4.0, 1.0, 9.0), ("endor", "read", 2.0, None, None), ("zstd", "read", 5.0, None, None)]
    table = pd.DataFrame(rows, columns=["way", "stage", "seconds", "seconds_low", "seconds_high"])
    table = table.assign(profile="paper", evidence="modelled", model="toy")
    figure = machines_figure(table, COMPARISON.iloc[:0])
    assert whisker_ends(figure.axes[0]) == {(3.5, 6.0, 0), (5.0, 7.0, 2)}
    assert "range: least to most" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_ratio_has_a_whisker_where_its_range_is_known():
    ratios = machines_figure(
        TABLE, COMPARISON.assign(ours_low=[1.4, 1.0, None, None], ours_high=[1.9, 1.5, None, None])
    )
    assert whisker_ends(ratios.axes[-1]) == {(1.4, 1.9, 0), (1.0, 1.5, 1)}
