"""What ENDOR's notebooks saw, as sentences made from their tables."""

from collections.abc import Iterable

import pandas as pd

from toolkit.evidence.comparison import prediction_words
from toolkit.papers.endor import goal_words
from toolkit.timeline.tables import error_words

HIDES = {True: "they hide", False: "they do not hide"}


def layer_gains(
    table: pd.DataFrame, machine: str, twins: Iterable[str], measured: Iterable[str], policies: Iterable[str]
) -> str:
    """Speed-ups of packed layers on the paper's machine, modelled, and on this one, measured (figure 7)."""
    labels = ["profile", "evidence", "policy", "model", "method", "path"]
    gain = table[table["stage"] == "total"].set_index(labels)["speedup"].sort_index()
    paper, mine = gain[machine, "modelled", "sequential"], gain["this-machine", "measured"]
    steps = "; ".join(
        f"{name}: {paper[name, 'endor', 'host']:.2f} packed, {paper[name, 'endor', 'direct']:.2f} direct"
        for name in twins
    )
    ours = "; ".join(
        f"{name}, {policy}: {mine[policy, name, 'endor', 'host']:.2f} decoded, "
        f"{mine[policy, name, 'endor_packed', 'host']:.2f} used packed"
        for name in measured
        for policy in policies
    )
    return (
        f"On {machine} (modelled) a layer from disk is so many times faster: {steps}. "
        f"On this machine (measured), over dense weights under the same policy: {ours}."
    )


def int8_costs(quality: pd.DataFrame) -> str:
    """Perplexities of a pruned model in int8; `quality` is of `toolkit.studies.int8.int8_quality`."""
    said = [f"{row.perplexity:.1f} ± {row.standard_error:.1f}" for row in quality.itertuples()]
    found = quality.assign(said=said).set_index(["smoothed", "weights", "activations"])["said"]
    dtype = quality["activations"].iloc[0]
    return (
        f"{quality['model'].iloc[0]}, pruned, has perplexity {found[False, dtype, dtype]} (± standard error). Smoothed "
        f"it has {found[True, 'int8', dtype]} with weights in int8 and {found[True, 'int8', 'int8']} with activations "
        f"in int8 too; without smoothing {found[False, 'int8', dtype]} and {found[False, 'int8', 'int8']}."
    )


def modelled_passes(total: pd.DataFrame, machine: str, models: Iterable[str], comparison: pd.DataFrame) -> str:
    """Seconds of the paper's passes as modelled, and how far the predictions are off (sections 5.1 and C.3)."""
    seconds = total.set_index(["model", "mapping", "method", "path"])["seconds"]
    words = "; ".join(
        f"{name} {seconds[name, 'published', 'dense', 'host']:.1f} s dense, "
        f"{seconds[name, 'published', 'endor', 'host']:.1f} packed, {seconds[name, 'remapped', 'endor', 'host']:.1f} "
        f"remapped, {seconds[name, 'remapped', 'endor', 'direct']:.1f} direct as well"
        for name in models
    )
    return (
        f"On {machine} (modelled) a pass takes {words}. "
        f"Beside the published times and speed-ups: {prediction_words(comparison)}."
    )


def measured_passes(table: pd.DataFrame, goals: pd.DataFrame, rates: pd.DataFrame) -> str:
    """What packing gains on this machine, and whether decoding hides; the arguments as `tab_e2e` makes them."""
    measured = table[table["evidence"] == "measured"]
    gain = measured[measured["stage"] == "total"].set_index(["mapping", "method"])["speedup"]
    reading = measured[measured["way"] == "storage, endor, pipelined"].set_index("stage")["share_percent"]["read"]
    cpu = rates.loc["this-machine"]
    return (
        f"This machine (measured), all layers on disk: {goal_words(goals)}. With the paper's share of layers in memory "
        f"packing gains {gain['published', 'endor']:.2f} times, refilled {gain['refilled', 'endor']:.2f}; used packed "
        f"{gain['published', 'endor_packed']:.2f} and {gain['refilled', 'endor_packed']:.2f}. The model misses "
        f"{error_words(table)}. Decoding makes {cpu['decode_gb_s']:.1f} GB/s, with the product {cpu['cpu_gb_s']:.1f}; "
        f"{cpu['pays_pipelined_gb_s']:.1f} would hide both: {HIDES[bool(cpu['hides'])]}, and reading fills "
        f"{reading:.0f} % of Endor's pipelined pass."
    )


def other_software(model: str, goals: pd.DataFrame, missing: str | None) -> str:
    """How ours compare with other programs on a Llama-shaped model; `missing` is why llama.cpp did not run, if so."""
    return f"Of {model}: {goal_words(goals)}{'; llama.cpp did not run' if missing else ''}."
