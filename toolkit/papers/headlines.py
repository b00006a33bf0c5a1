"""What one notebook's results say of a system as a whole: sentences for the first cards of the report.

run.save(table, headline=pass_headline(table))

Each is empty where the table lacks the rows for it, since parameters choose them.
"""

from collections.abc import Iterable

import pandas as pd

DENSE, PACKED = "dense", "endor"
SPQR = "spqr, csr"
PLACES = {"storage": "on disk", "dram": "in DRAM", "device": "in the device's memory"}


def size_headline(sizes: pd.DataFrame) -> dict[str, str]:
    """The bytes that half zeros leave, by data type; `sizes` as `toolkit.formats.sizes.twin_sizes` gives them."""
    half = sizes[sizes["sparsity"].eq(0.5) & sizes["format"].eq(PACKED)]
    if half.empty:
        return {}
    shares = [f"{row.ratio:.1%} in {row.dtype}" for row in half.itertuples()]
    about = ", ".join(sorted(half["evidence"].unique()))
    return {
        "gain": f"With half of the weights zero, packed weights take {_listed(shares)} of the dense bytes ({about})."
    }


def pass_headline(passes: pd.DataFrame) -> dict[str, str]:
    """The fastest packed pass from disk over the fastest dense one by our own reader, and over other programs.

    `passes` holds rows of `toolkit.measure.end_to_end.pass_measurements`. A program that is faster makes the negative
    result.
    """
    total = passes[passes["stage"].eq("total") & passes["evidence"].eq("measured") & passes["mapping"].eq("storage")]
    fastest = total.groupby("method")["seconds"].min()
    ours = fastest.index[fastest.index.str.startswith(PACKED)]
    if ours.empty or DENSE not in fastest:
        return {}
    packed = fastest[ours].min()
    times = fastest.drop([DENSE, *ours]) / packed
    won = [f", and {ratio:.1f} times as fast as {name}" for name, ratio in times.items() if ratio >= 1]
    lost = [
        f"{name} is {1 / ratio:.2f} times as fast as the fastest packed way"
        for name, ratio in times.items()
        if ratio < 1
    ]
    gain = (
        f"A token from disk comes {fastest[DENSE] / packed:.2f} times as fast as with dense weights by the same reader"
    )
    about = f" ({total['model'].iloc[0]}, measured)."
    return {"gain": gain + "".join(won) + about} | ({"negative": _listed(lost) + about} if lost else {})


def layer_headline(layers: pd.DataFrame) -> dict[str, str]:
    """Where packed weights are slower than dense ones, if anywhere; the slowest of the measured ways."""
    packed = layers["method"].str.startswith(PACKED) & layers["evidence"].eq("measured") & layers["stage"].eq("total")
    slower = layers[packed & layers["speedup"].lt(1)]
    if slower.empty:
        return {}
    worst = slower.loc[slower["speedup"].idxmin()]
    return {
        "negative": f"With weights {PLACES[worst['placement']]}, {worst['method']} runs a layer of {worst['model']} at "
        f"{worst['speedup']:.2f} times the speed of dense weights (measured)."
    }


def quality_headline(quality: pd.DataFrame) -> dict[str, str]:
    """What half zeros cost in perplexity by the best of the pruning methods; `quality` has `method` and `pattern`."""
    perplexity = quality[quality["metric"].eq("perplexity")].set_index(["pattern", "method"])["value"]
    if not {"none", "50 %"} <= set(perplexity.index.get_level_values("pattern")):
        return {}
    half = perplexity["50 %"]
    return {
        "cost": f"With half of its weights zero, {quality['model'].iloc[0]} has a perplexity of {half.min():.1f} "
        f"instead of {perplexity['none', DENSE]:.1f} ({half.idxmin()}, the best of {len(half)} pruning methods)."
    }


def product_headline(products: pd.DataFrame, model: str) -> dict[str, str]:
    """How fast mat-vecs are with SpQR's weights, and what they leave of the speed that their bytes allow.

    `products` is of `toolkit.papers.spqr.speedups.measured_speedups`.
    """
    measured = products[products["evidence"].eq("measured") & products["op"].eq("geometric mean")]
    mean = measured.set_index("contestant")
    if SPQR not in mean.index:
        return {}
    own, about = mean.loc[SPQR], f" ({model}, measured)."
    rows = products[products["contestant"].eq(SPQR) & products["evidence"].eq("measured")]
    faster = [
        name
        for name, row in mean.iterrows()
        if name != DENSE and not name.startswith("spqr") and row["speedup"] > own["speedup"]
    ]
    lost = f"; {_listed(faster)} with more bytes {'are' if len(faster) > 1 else 'is'} faster" if faster else ""
    return {
        "gain": f"Weights of {rows['bits_per_weight'].mean():.1f} bits, outliers included, are multiplied "
        f"{own['speedup']:.2f} times as fast as torch's dense bf16{about}",
        "negative": f"That product goes through its bytes at {rows['share_of_read'].mean():.0%} of the rate of reads, "
        f"so the bytes would allow more{lost}{about}",
    }


def neuron_headline(ways: pd.DataFrame) -> dict[str, str]:
    """What loading only the neurons that fire gains over reading the whole model, and with how much memory.

    `ways` is of `toolkit.papers.flash_io.measured_ways`.
    """
    rows = ways.set_index("way")
    if not {"naive", "bundling"} <= set(rows.index):
        return {}
    flash, naive = rows.loc["bundling"], rows.loc["naive"]
    held = flash["memory_gb"] / naive["read_gb"]
    return {
        "gain": f"A token that reads only the neurons which a predictor names comes {flash['speedup']:.1f} times as "
        f"fast as one that reads every weight, with {held:.0%} of the weights in memory "
        f"({naive['layers']} layers of {naive['model']}, measured)."
    }


def generation_headline(ways: pd.DataFrame, model: str) -> dict[str, str]:
    """What guessing ahead costs a real model whose neurons come from disk, where it does not pay.

    `ways` has a row for each way, with `way` and `total_ms`.
    """
    total = ways.set_index("way")["total_ms"]
    if not {"all", "speculative"} <= set(total.index) or total["speculative"] <= total["all"]:
        return {}
    return {
        "negative": f"Guessing ahead makes a token of {model} take {total['speculative'] / total['all']:.1f} times as "
        "long: neurons that happen to be in memory guess too badly (measured)."
    }


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
