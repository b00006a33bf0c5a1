"""SpQR figures 3.2, 4.1 and 4.2: its mat-vecs on this machine, their limits, and a cost model of the thesis' GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from toolkit.evidence.figures import colours
from toolkit.extras import extra
from toolkit.machines.machine import GB, THIS_MACHINE, Profile
from toolkit.measure.disturbance import starred
from toolkit.measure.summary import summary, times_as_fast
from toolkit.models.shapes import twin_shapes
from toolkit.papers.spqr.products import CONTESTANTS, FEW, MANY, READ

with extra("lab"):
    from matplotlib.axes import Axes
    from scipy.stats import gmean

DENSE, OURS, CSR, PTCSR, QUICKER = "dense", "dense, ours", "spqr, csr", "spqr, ptcsr", "spqr, the quicker"
STORAGES = {CSR: PTCSR, PTCSR: CSR}  # each with the other one
NAMES = {DENSE: "torch, dense bf16", OURS: "ours, dense bf16", "int8": "int8", "endor": "Endor, half zeros"}
NAMES |= {CSR: "SpQR, CSR", PTCSR: "SpQR, PTCSR"}  # in legends
MEAN = "geometric mean"
PRODUCT = ["op", "contestant"]  # the labels of a product
WORD_WEIGHTS = 16
LIMIT = {"color": "black", "linewidth": 1.6}
DENSE_BITS = 16  # on the thesis' GPUs, whatever this machine computes its dense products in


def measured_speedups(seconds: pd.DataFrame, baseline: str = DENSE) -> pd.DataFrame:
    """Each contestant's times, and how many times as fast as `baseline` it is.

    `seconds` is of `product_measurements`. A row an operation and contestant, then a row a contestant for the geometric
    mean over the operations (`op` is `MEAN`), which has ratios only. Columns: profile, op, contestant, evidence;

    - nbytes, bits_per_weight, byte_limit (the baseline's bytes over this one's);
    - seconds, with its range over the repetitions (`toolkit.measure.summary`); gb_s of stored bytes, and share_of_read,
      over the rate at which the same run read a large buffer;
    - speedup, and over_other, which is that of CSR over PTCSR and of PTCSR over CSR, with their ranges;
    - disturbed: the share of turns that other work disturbed.

    With both storages there is the contestant `QUICKER`: for each operation the one that `over_other` favours.
    """
    products = seconds[~seconds["contestant"].isin([READ, FEW, MANY])]
    over = {"speedup": {"contestant": baseline}}
    if set(STORAGES) <= set(products["contestant"]):
        products = pd.concat([products, _quicker(products)], ignore_index=True)
        over["over_other"] = {"contestant": STORAGES}
    products = pd.concat([products, _means(products)], ignore_index=True)
    table = summary(products, PRODUCT, over=over)
    limit = table.set_index(PRODUCT)["nbytes"].xs(baseline, level="contestant")
    table["byte_limit"] = table["op"].map(limit) / table["nbytes"]
    table["bits_per_weight"] = 8 * table["nbytes"] / (table["rows"] * table["columns"])
    table["gb_s"] = table["nbytes"] / table["seconds"] / 1e9
    read = seconds[seconds["contestant"] == READ]
    read_gb_s = (read["nbytes"] / read["seconds"] / 1e9).groupby(read["op"]).median()
    table["share_of_read"] = table["gb_s"] / table["op"].map(read_gb_s)
    ratios = ["op", "contestant", "byte_limit", "disturbed", *(name for name in table if name.startswith(tuple(over)))]
    table.loc[table["op"] == MEAN, table.columns.difference(ratios)] = np.nan
    table = table.drop(columns=["threads", "measured_at"], errors="ignore")
    return table.assign(profile=THIS_MACHINE, evidence="measured")


def _quicker(products: pd.DataFrame) -> pd.DataFrame:
    """The rows of the storage that is quicker, for each operation."""
    ratio = times_as_fast(products, PRODUCT, {"contestant": STORAGES})[products["contestant"] == CSR]
    is_csr = products["op"].map(ratio.groupby(products["op"]).median() >= 1)
    chosen = products["contestant"] == is_csr.map({True: CSR, False: PTCSR})
    return products[chosen].assign(contestant=QUICKER)


def _means(products: pd.DataFrame) -> pd.DataFrame:
    """A row for each contestant and repetition: the geometric means over the operations."""
    groups = products.groupby(["contestant", "repetition"], sort=False)
    means = groups[["seconds", "nbytes"]].agg(gmean).join(groups["disturbed"].mean())
    return means.reset_index().assign(op=MEAN)


def modelled_speedups(
    bits: Mapping[tuple[str, str], float], model: str, machines: Mapping[str, Profile]
) -> pd.DataFrame:
    """The products of the matrices of `model` on other machines, with bits a weight by operation and contestant.

    `product_s` gives the times: no attention, no uneven rows. The dense product is in 16 bits there. Columns as
    `measured_speedups` has them, without spreads. The null model is the same of machines without `software`.
    """
    bits = {key: DENSE_BITS if key[1] == DENSE else weight_bits for key, weight_bits in bits.items()}
    weights = {op: rows * columns for op, (rows, columns) in twin_shapes(model).items()}
    rows = [
        (name, op, contestant, each, weights[op] * each / 8, product_s(machine, weights[op], each))
        for name, machine in machines.items()
        for (op, contestant), each in bits.items()
    ]
    table = pd.DataFrame(rows, columns=["profile", "op", "contestant", "bits_per_weight", "nbytes", "seconds"])
    ours = table[table["contestant"].isin(STORAGES)].sort_values("seconds", kind="stable")
    table = pd.concat([table, ours.drop_duplicates(["profile", "op"]).assign(contestant=QUICKER)], ignore_index=True)
    for column, other in {"speedup": DENSE, "over_other": table["contestant"].map(STORAGES)}.items():
        table[column] = _seconds_of(table, other) / table["seconds"]
    means = table.groupby(["profile", "contestant"], sort=False)[["speedup", "over_other"]].agg(gmean)
    return pd.concat([table, means.reset_index().assign(op=MEAN)], ignore_index=True).assign(evidence="modelled")


def product_s(machine: Profile, weights: int, weight_bits: float) -> float:
    """Seconds of a mat-vec with so many weights in the machine's device memory.

    A launch, and then the longer of two: the bytes at the share of the bandwidth that the kernels reach, and the
    cycles of the multiprocessors for each word of 16 packed weights (none for weights of 16 bits). A machine without
    `software` takes bytes over bandwidth and nothing else.
    """
    bytes_s = weights * weight_bits / 8 / GB / machine.device.bandwidth_gb_s
    kernels = machine.software
    if kernels is None:
        return bytes_s
    cycles = kernels.word_cycles * weights / WORD_WEIGHTS if weight_bits < DENSE_BITS else 0
    return kernels.launch_s + max(bytes_s / kernels.bandwidth_share, cycles / GB / machine.device.sm_ghz)


def without_kernels(machines: Mapping[str, Profile]) -> dict[str, Profile]:
    """The null model's machines: bytes over bandwidth."""
    return {name: replace(machine, software=None) for name, machine in machines.items()}


def _seconds_of(table: pd.DataFrame, contestant: str | pd.Series) -> np.ndarray:
    """The seconds of another contestant for the same product, row by row."""
    keys = ["profile", "op", "contestant"]
    wanted = pd.MultiIndex.from_frame(table[keys].assign(contestant=contestant))
    return table.set_index(keys)["seconds"].reindex(wanted).to_numpy()


def stored_bits(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Bits a weight by operation and contestant, as `modelled_speedups` takes them, from `measured_speedups`."""
    rows = table[table["op"].ne(MEAN) & table["contestant"].isin([DENSE, *STORAGES])]
    return rows.set_index(["op", "contestant"])["bits_per_weight"].to_dict()


def by_op(table: pd.DataFrame, column: str, contestants: Sequence[str] = ()) -> pd.DataFrame:
    """To be looked at: a column of this machine's rows, an operation a row, a contestant a column."""
    rows = table[table["profile"] == THIS_MACHINE]
    wide = rows.pivot(index="op", columns="contestant", values=column).loc[list(dict.fromkeys(rows["op"]))]
    return wide[list(contestants) or list(dict.fromkeys(rows["contestant"]))]


def mean_row(table: pd.DataFrame, contestant: str) -> pd.Series:
    """The row of a contestant's geometric mean."""
    return table[table["contestant"].eq(contestant) & table["op"].eq(MEAN)].iloc[0]


def draw_bars(
    axes: Axes, table: pd.DataFrame, column: str, contestants: Sequence[str], limit: str | None = "byte_limit"
) -> None:
    """A group of bars an operation, a bar a contestant, a whisker for its range, a line at the column `limit`.

    The limit must be of the same baseline as `column`; dense products have none. One way to multiply has one colour on
    every CPU.
    """
    ops, kinds = list(dict.fromkeys(table["op"])), [name.removeprefix("avx2_") for name in CONTESTANTS]
    faces = colours({OURS: "ours", PTCSR: "ptcsr"}.get(name, name) for name in kinds)
    faces = dict(zip(dict.fromkeys(kinds), faces.values(), strict=True))
    width = 0.84 / len(contestants)
    for number, name in enumerate(contestants):
        rows = table[table["contestant"] == name].set_index("op").reindex(ops)
        places = np.arange(len(ops)) + width * (number - (len(contestants) - 1) / 2)
        style = {"color": faces[name.removeprefix("avx2_")], "label": NAMES.get(name, name)}
        axes.bar(places, rows[column], 0.92 * width, **style)
        axes.vlines(places, rows[f"{column}_low"], rows[f"{column}_high"], color="black", linewidth=1)
        if limit and name not in (DENSE, OURS):
            axes.hlines(rows[limit], places - 0.46 * width, places + 0.46 * width, **LIMIT)
    axes.set_xticks(
        range(len(ops)), starred(table, "op").drop_duplicates().str.replace("_proj|geometric ", "", regex=True)
    )
    if limit:
        axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, fontsize=8)
