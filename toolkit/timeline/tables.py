"""Tables of `Timeline.stages()` side by side: how many times faster than dense weights, stage by stage."""

import pandas as pd

from toolkit.errors import UserError

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
    """The table with four columns more: what it has over the same with dense weights on the host path.

    speedup (of the stage's seconds), time_over_dense (the same upside down), bytes_over_dense, bandwidth_over_dense.
    Further labels of the baseline by name, `mapping="published"` say. NaN for a stage that dense weights do not have.
    """
    baseline = DENSE | baseline
    time = relative_to(table, "seconds", **baseline)
    return table.assign(
        speedup=1 / time,
        time_over_dense=time,
        bytes_over_dense=relative_to(table, "nbytes", **baseline),
        bandwidth_over_dense=relative_to(table, "gb_s", **baseline),
    )


def beside_measured(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `modelled_over_measured` more, in rows that are modelled: their seconds over the measured ones.

    Measured are the stage's `median_s` over all repetitions, since a single one may hold a pause that no other has.
    """
    typical = table.assign(seconds=table["median_s"].fillna(table["seconds"]))
    ratio = relative_to(typical, "seconds", evidence="measured")
    return table.assign(modelled_over_measured=ratio.where(table["evidence"] == "modelled"))


def model_error(table: pd.DataFrame) -> pd.Series:
    """How far the model is off, as a share of what was measured: medians over single `stages` and over `totals`.

    Of rows with `modelled_over_measured`, as `beside_measured` gives them.
    """
    off = (table["modelled_over_measured"] - 1).abs()
    single = ~table["stage"].isin(["transfer", "total"])
    return pd.Series({"stages": off[single].median(), "totals": off[table["stage"] == "total"].median()})


def way_names(table: pd.DataFrame, *labels: str) -> pd.Series:
    """A name for each row's way, to call a bar by: the labels named, the method, `direct` and `pipelined` if so."""
    names = table[[*labels, "method"]].astype(str).agg(", ".join, axis=1)
    for column, plain in (("path", "host"), ("policy", "sequential")):
        if column in table:
            names += (", " + table[column]).where(table[column] != plain, "")
    return names


def stage_seconds(table: pd.DataFrame, *labels: str) -> pd.DataFrame:
    """To be looked at: a row a way (`way_names`, with these labels) and kind of evidence, a column a stage."""
    named = table.assign(way=way_names(table, *labels))
    return named.pivot_table(index=["way", "evidence"], columns="stage", values="seconds", sort=False)
