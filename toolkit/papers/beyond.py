"""The sentence of `endor/tab_perplexity`."""

import pandas as pd


def pruning_sentence(table: pd.DataFrame, differences: pd.DataFrame) -> str:
    """What `endor/tab_perplexity` shows: perplexity beside bits, and whether the paired difference is real."""
    lost = table[table["metric"].eq("perplexity")]
    said = lambda row: f"{row.method} {row.value:.1f} ({row.bits_per_weight:.1f} bits)"  # noqa: E731
    parts = []
    for pattern, rows in lost.groupby("pattern", sort=False):
        where = "not pruned" if pattern == "none" else f"at {pattern}"
        parts.append(f"{where}, {', '.join(map(said, rows.itertuples()))}")
    clear = int((differences["value"].abs() > 2 * differences["standard_error"]).sum())
    return (
        f"{'; '.join(parts)}. Paired by window, the difference of log-perplexity {differences['method'].iloc[0]} "
        f"is {differences['value'].min():+.3f} to {differences['value'].max():+.3f} (draws of calibration text: "
        f"{len(differences)}, of which beyond two standard errors: {clear})."
    )
