import pandas as pd

from toolkit.papers.headlines import generation_headline, layer_headline, pass_headline, quality_headline, size_headline


def passes(**seconds):
    table = pd.DataFrame({"method": seconds.keys(), "seconds": seconds.values()})
    table = table.assign(stage="total", evidence="measured", mapping="storage", model="tiny")
    decoys = [table.assign(seconds=0.001, **other) for other in ({"evidence": "modelled"}, {"mapping": "dram"})]
    return pd.concat([table, *decoys])


def test_a_pass_is_compared_with_the_fastest_dense_one():
    table = pd.concat([passes(dense=3.0), passes(dense=2.0, endor=1.6, endor_packed=1.0, other=4.0, rival=0.8)])
    assert pass_headline(table) == {
        "gain": "A token from disk comes 2.00 times as fast as with dense weights by the same reader, and 4.0 times as "
        "fast as other (tiny, measured).",
        "negative": "rival is 1.25 times as fast as the fastest packed way (tiny, measured).",
    }
    assert pass_headline(passes(dense=1.0)) == {}


def test_a_layer_says_where_packing_is_slower_if_anywhere():
    table = pd.DataFrame(
        {
            "method": ["dense", "endor", "endor", "endor_packed", "endor"],
            "placement": ["dram", "dram", "storage", "dram", "dram"],
            "speedup": [1.0, 0.5, 1.5, 0.9, 0.1],
            "evidence": ["measured"] * 4 + ["modelled"],
        }
    ).assign(stage="total", model="tiny")
    assert layer_headline(table) == {
        "negative": "With weights in DRAM, endor runs a layer of tiny at 0.50 times the speed of dense "
        "weights (measured)."
    }
    assert layer_headline(table.iloc[[0, 2]]) == {}


def test_perplexity_is_that_of_the_best_method():
    table = pd.DataFrame(
        {
            "metric": ["perplexity"] * 3 + ["accuracy"],
            "pattern": ["none", "50 %", "50 %", "50 %"],
            "method": ["dense", "a", "b", "b"],
            "value": [20.0, 60.0, 40.0, 0.5],
        }
    ).assign(model="tiny")
    assert quality_headline(table) == {
        "cost": "With half of its weights zero, tiny has a perplexity of 40.0 instead of 20.0 (b, the best of 2 "
        "pruning methods)."
    }
    assert quality_headline(table.iloc[:1]) == {}


def test_sizes_are_shares_of_the_dense_bytes():
    table = pd.DataFrame({"dtype": ["float16", "int8"], "ratio": [0.5625, 0.625]})
    table = table.assign(sparsity=0.5, format="endor", evidence="modelled")
    assert size_headline(pd.concat([table, table.assign(sparsity=0.9, ratio=0.1)])) == {
        "gain": "With half of the weights zero, packed weights take 56.2% in float16 and 62.5% in int8 of the dense "
        "bytes (modelled)."
    }
    assert size_headline(table.iloc[:0]) == {}


def test_guessing_ahead_is_told_where_it_loses():
    ways = pd.DataFrame({"way": ["naive", "all", "speculative"], "total_ms": [200.0, 100.0, 250.0]})
    assert "of tiny take 2.5 times as long" in generation_headline(ways, "tiny")["negative"]
    assert generation_headline(ways.replace(250.0, 90.0), "tiny") == {}
    assert generation_headline(ways[:2], "tiny") == {}
