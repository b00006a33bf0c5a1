"""Tables of `Timeline.stages()` side by side: how many times faster than dense weights, stage by stage."""

import pandas as pd

from toolkit.errors import UserError
from toolkit.machines.machine import THIS_MACHINE

# what tells two timelines of one table apart; all other columns are numbers about them
LABELS = (
    *("profile", "model", "dtype", "sparsity", "op", "placement", "mapping"),
    *("method", "path", "policy", "device", "stage", "evidence"),
)
DENSE = {"method": "dense", "path": "host"}


def relative_to(table: pd.DataFrame, column: str, **baseline: object) -> pd.Series:
    """Divide each row's column by that of its baseline row, which has the same labels except those given.

    `relative_to(table, "seconds", op="fc1")` divides every operation's time by fc1's, method by method and stage by
    stage; `relative_to(table, "seconds", evidence="measured")` every modelled time by the measured one. NaN where there
    is no baseline row. Raises `UserError` for a baseline that is no label of the table, or rows that the labels do not
    tell apart.
    """
    keys = [label for label in LABELS if label in table]
    if missing := baseline.keys() - set(keys):
        raise UserError(f"baseline {min(missing)!r}: expected a label of the table, one of {', '.join(keys)}")
    values = table.set_index(keys)[column]
    if values.index.has_duplicates:
        twice = dict(zip(keys, values.index[values.index.duplicated()][0], strict=True))
        raise UserError(f"two rows of the table have the labels {twice}: give each timeline labels of its own")
    base = values.reindex(pd.MultiIndex.from_frame(table[keys].assign(**baseline)))
    return table[column] / base.to_numpy()


def beside_dense(table: pd.DataFrame, **baseline: object) -> pd.DataFrame:
    """Add four columns that compare each row with the same stage for dense weights on the host path.

    speedup (of the stage's seconds), time_over_dense (its inverse), bytes_over_dense, bandwidth_over_dense. Further
    labels of the baseline are given by name, for example `mapping="published"`. NaN for a stage that dense weights do
    not have. If the table has seconds_low and seconds_high, speedup and time_over_dense get a low and a high too: the
    quickest repetition over the baseline's slowest, and the slowest over its quickest.
    """
    baseline = DENSE | baseline
    time = relative_to(table, "seconds", **baseline)
    table = table.assign(
        speedup=1 / time,
        time_over_dense=time,
        bytes_over_dense=relative_to(table, "nbytes", **baseline),
        bandwidth_over_dense=relative_to(table, "gb_s", **baseline),
    )
    return table if "seconds_low" not in table else table.assign(**_ranges(table, baseline))


def _ranges(table: pd.DataFrame, baseline: dict) -> dict[str, pd.Series]:
    dense_low_s, dense_high_s = (
        table[name] / relative_to(table, name, **baseline) for name in ("seconds_low", "seconds_high")
    )
    quickest, slowest = table["seconds_low"] / dense_high_s, table["seconds_high"] / dense_low_s
    over_dense = {"time_over_dense_low": quickest, "time_over_dense_high": slowest}
    return over_dense | {"speedup_low": 1 / slowest, "speedup_high": 1 / quickest}


def beside_measured(table: pd.DataFrame) -> pd.DataFrame:
    """Add `modelled_over_measured` to modelled rows: their seconds over the measured ones."""
    ratio = relative_to(table, "seconds", evidence="measured")
    return table.assign(modelled_over_measured=ratio.where(table["evidence"] == "modelled"))


def rows_beside_measured(table: pd.DataFrame, number: str, *keys: str) -> pd.DataFrame:
    """Add `modelled_over_measured` to the rows that are modelled for this machine, where it measured the number, too.

    `keys` are the columns that both rows have alike. A row without one of them stands beside no other.
    """
    mine = table[table["profile"] == THIS_MACHINE]
    measured = mine[number].where(mine["evidence"] == "measured")
    measured = measured.groupby([mine[key] for key in keys]).transform("first")
    ratio = (mine[number] / measured).where(mine["evidence"] == "modelled")
    return table.assign(modelled_over_measured=ratio)


def model_error(table: pd.DataFrame) -> pd.Series:
    """The model's errors as shares of what was measured: the medians over single `stages` and over `totals`.

    The largest of each are `stages_largest` and `totals_largest`. They are of rows with `modelled_over_measured`, as
    `beside_measured` gives them. A table without stages has reads or products, which count as single stages.
    """
    off = (table["modelled_over_measured"] - 1).abs()
    stage = table.get("stage", pd.Series("", table.index))
    single, total = ~stage.isin(["transfer", "total"]), stage == "total"
    medians = {"stages": off[single].median(), "totals": off[total].median()}
    return pd.Series(medians | {"stages_largest": off[single].max(), "totals_largest": off[total].max()})


def error_words(table: pd.DataFrame) -> str:
    """`model_error` in words: "stages by 9% (median; 31% at most) and totals by 3% (7% at most)"."""
    off = model_error(table)
    return (
        f"stages by {off['stages']:.0%} (median; {off['stages_largest']:.0%} at most) and "
        f"totals by {off['totals']:.0%} ({off['totals_largest']:.0%} at most)"
    )


def way_names(table: pd.DataFrame, *labels: str) -> pd.Series:
    """A name for each row's way: the given labels, the method, and `direct` and `pipelined` where they hold."""
    names = table[[*labels, "method"]].astype(str).agg(", ".join, axis=1)
    for column, plain in (("path", "host"), ("policy", "sequential")):
        if column in table:
            names += (", " + table[column]).where(table[column] != plain, "")
    return names


def stage_seconds(table: pd.DataFrame, *labels: str) -> pd.DataFrame:
    """Seconds to look at: a row for each way (`way_names`) and kind of evidence, a column for each stage."""
    named = table.assign(way=way_names(table, *labels))
    return named.pivot_table(index=["way", "evidence"], columns="stage", values="seconds", sort=False)
