import pandas as pd

from toolkit.evidence.cards import Card, latency_card

HEAD = ["model", "op", "way", "stage", "evidence", "seconds"]
ROWS = [
    ("opt/8", "fc1", "storage, dense", "read", "measured", 0.1),
    ("opt/8", "fc1", "storage, dense", "total", "measured", 0.2),
    ("opt/8", "fc1", "storage, dense", "total", "modelled", 0.3),
    ("opt/8", "fc1", "storage, endor", "total", "measured", 0.125),
    ("llama", "fc1", "storage, dense", "total", "measured", 9.0),
]


def test_the_bars_are_the_first_models_measured_totals():
    card = latency_card(pd.DataFrame(ROWS, columns=HEAD))
    assert card == Card(caption="ms a product of opt/8, measured, storage", bars={"dense": 200.0, "endor": 125.0})


def test_what_all_bars_share_is_said_once():
    ways = [
        ("llama", "layer", f"llama, {method}", "total", "measured", 2.5) for method in ("dense", "endor, pipelined")
    ]
    assert latency_card(pd.DataFrame(ways, columns=HEAD)) == Card(
        caption="s a layer of llama, measured", bars={"dense": 2.5, "endor, pipelined": 2.5}
    )


def test_a_table_that_is_no_race_has_no_card():
    table = pd.DataFrame(ROWS, columns=HEAD)
    assert latency_card(table.iloc[:2]) is None
    assert latency_card(table[table["evidence"] == "modelled"]) is None
    assert latency_card(table.drop(columns="way")) is None
