import json

import pytest

from toolkit.evidence.cards import MOST_BARS, Card
from toolkit.evidence.meta import Meta, read_meta

ODD = [
    None,
    3,
    "text",
    [],
    [1, {"a": 2}],
    {},
    {"a": 1},
    {"a": {"b": "c"}},
    {"n": "many"},
    True,
    [[]],
    -1.5,
    float("nan"),
]
FIELDS = ["id", "schema", "figures", "evidence", "verdicts", "score", "parameters", "card", "headline", "wall_s"]
FIELDS += ["disturbed", "finished", "git", "git_dirty", "cpu", "memory_gb", "gpu", "versions"]


def read(folder, value):
    (folder / "meta.json").write_text(json.dumps(value))
    return read_meta(folder)


def test_verdicts_are_kept_apart_by_kind_in_their_order(tmp_path):
    meta = read(
        tmp_path,
        {
            "verdicts": {
                "context": {"not run": 1},
                "prediction": {"differs": 2, "within tolerance": 1, "same effect": 0},
            }
        },
    )
    assert [(kind, list(counts.items())) for kind, counts in meta.verdicts.items()] == [
        ("prediction", [("within tolerance", 1), ("differs", 2)]),
        ("context", [("not run", 1)]),
    ]


def test_an_older_flat_count_is_of_no_kind(tmp_path):
    assert read(tmp_path, {"verdicts": {"same shape": 1, "within tolerance": 2}}).verdicts == {
        "claim": {"within tolerance": 2, "same shape": 1}
    }


def test_a_card_has_as_many_bars_as_there_is_room_for(tmp_path):
    bars = {str(number): number for number in range(MOST_BARS + 3)} | {"bad": "x", "below": -1}
    assert read(tmp_path, {"card": {"caption": "ms", "bars": bars}}).card == Card(
        "ms", {str(number): number for number in range(MOST_BARS)}
    )


def test_a_figure_never_leads_out_of_its_folder(tmp_path):
    assert read(tmp_path, {"figures": ["../../secret", "plot", 3]}).figures == ("secret", "plot")


@pytest.mark.parametrize("content", ["", "{half", "[]", "3", '"text"', "null"])
def test_a_file_that_holds_no_object_says_nothing(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    assert read_meta(tmp_path) == Meta()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_any_shape_is_read(tmp_path, name):
    for value in ODD:
        assert isinstance(read(tmp_path, {name: value}), Meta)
