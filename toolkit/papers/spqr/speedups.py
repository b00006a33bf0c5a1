"""SpQR figures 3.2, 4.1 and 4.2: its mat-vecs on this machine, their limits, and a cost model of the thesis' GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from toolkit.machines.machine import GB, Profile
from toolkit.measure.products import FEW, MANY, READ
from toolkit.models.shapes import twin_shapes

DENSE, OURS, CSR, PTCSR, QUICKER = "dense", "dense, ours", "spqr, csr", "spqr, ptcsr", "spqr, the quicker"
STORAGES = {CSR: PTCSR, PTCSR: CSR}  # each with the other one
MEAN = "geometric mean"
MINE = "this-machine"
WORD_BYTES, WORD_WEIGHTS = 8, 16
DENSE_BITS = 16  # on the thesis' GPUs, whatever this machine computes its dense products in


def measured_speedups(seconds: pd.DataFrame, baseline: str = DENSE) -> pd.DataFrame:
    """Each contestant's times, and how many times as fast as `baseline` it is.

    `seconds` is of `product_measurements`. A row an operation and contestant, then a row a contestant for the geometric
    mean over the operations (`op` is `MEAN`), which has ratios only. Columns: profile, op, contestant, evidence;

    - nbytes, bits_per_weight, byte_limit (the baseline's bytes over this one's);
    - seconds, low_s, high_s: the median and the quartiles of all repetitions; gb_s of stored bytes, and share_of_read,
      over the rate at which the same run read a large buffer;
    - speedup, speedup_low, speedup_high: the ratio of the two times of a repetition, its median and quartiles;
    - over_other, over_other_low, over_other_high: the same for CSR over PTCSR, and for PTCSR over CSR;
    - disturbed: the share of turns that other work disturbed.

    With both storages there is the contestant `QUICKER`: for each operation the one that `over_other` favours.
    """
    products = seconds[~seconds["contestant"].isin([READ, FEW, MANY])]
    if set(STORAGES) <= set(products["contestant"]):
        products = pd.concat([products, _quicker(products)], ignore_index=True)
    ratios = {"speedup": _against(products, baseline)}
    if set(STORAGES) <= set(products["contestant"]):
        ratios["over_other"] = _against(products, STORAGES)
    rows = []
    for contestant in dict.fromkeys(products["contestant"]):
        for op in [*dict.fromkeys(products["op"]), MEAN]:
            row = {"profile": MINE, "op": op, "contestant": contestant, "evidence": "measured"}
            for name, values in ratios.items():
                row |= _quartiles(name, values.get((op, contestant)))
            rows.append(row)
    sizes = _sizes(products, baseline)
    read = seconds[seconds["contestant"] == READ]
    read_gb_s = (read["nbytes"] / read["seconds"] / 1e9).groupby(read["op"]).median()
    table = pd.DataFrame(rows).merge(sizes, how="left", on=["op", "contestant"])
    return table.assign(share_of_read=table["gb_s"] / table["op"].map(read_gb_s))


def _quicker(products: pd.DataFrame) -> pd.DataFrame:
    """The rows of the storage that is quicker, for each operation."""
    ratios = {
        op: values.median() for (op, contestant), values in _against(products, STORAGES).items() if contestant == CSR
    }
    chosen = products["contestant"] == products["op"].map(
        {op: CSR if ratio >= 1 else PTCSR for op, ratio in ratios.items()}
    )
    return products[chosen].assign(contestant=QUICKER)


def _against(products: pd.DataFrame, other: str | Mapping[str, str]) -> dict[tuple[str, str], pd.Series]:
    """The other's seconds over a contestant's, by repetition, for each (operation, contestant); and for `MEAN`."""
    times = products.pivot(index=["op", "repetition"], columns="contestant", values="seconds")
    ratios = {}
    for contestant in times:
        against = other if isinstance(other, str) else other.get(contestant)
        if against is None:
            continue
        ratio = times[against] / times[contestant]
        ratios |= {(op, contestant): ratio.loc[op] for op in ratio.index.levels[0]}
        ratios[MEAN, contestant] = np.exp(np.log(ratio).groupby("repetition").mean())
    return ratios


def _quartiles(name: str, values: pd.Series | None) -> dict[str, float]:
    low, middle, high = [np.nan] * 3 if values is None else values.quantile([0.25, 0.5, 0.75])
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _sizes(products: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Bytes and seconds of each operation and contestant, and the mean byte limit of each contestant."""
    groups = products.groupby(["op", "contestant"], sort=False)
    quartiles = groups["seconds"].quantile([0.25, 0.5, 0.75]).unstack()
    quartiles.columns = ["low_s", "seconds", "high_s"]
    table = groups[["nbytes", "rows", "columns"]].first().join(quartiles).join(groups["disturbed"].mean()).reset_index()
    dense = table[table["contestant"] == baseline].set_index("op")["nbytes"]
    table["byte_limit"] = table["op"].map(dense) / table["nbytes"]
    table["bits_per_weight"] = 8 * table["nbytes"] / (table["rows"] * table["columns"])
    table["gb_s"] = table["nbytes"] / table["seconds"] / 1e9
    means = table.groupby("contestant", sort=False).agg({"byte_limit": geometric_mean, "disturbed": "mean"})
    return pd.concat([table, means.reset_index().assign(op=MEAN)], ignore_index=True)


def geometric_mean(values: pd.Series) -> float:
    """exp of the mean logarithm."""
    return float(np.exp(np.log(values.astype(float)).mean()))


def measured_limits(seconds: pd.DataFrame) -> pd.DataFrame:
    """The least time that bytes and instructions allow each of SpQR's products on this machine: its roofline.

    Columns: op, contestant; bytes_s, the stored bytes at the rate at which the same run read a large buffer;
    instructions_s, its words at what a word takes one core out of its second cache, over all threads; bound, "bytes" or
    "instructions", whichever takes longer; word_ns. Medians over the repetitions.
    """
    middle = seconds.groupby(["op", "contestant"], sort=False)[
        ["seconds", "nbytes", "threads", "rows", "columns"]
    ].median()
    rows = []
    for (op, contestant), product in middle.iterrows():
        if contestant in STORAGES:
            few, many, read = (middle.loc[(op, name)] for name in (FEW, MANY, READ))
            word_s = WORD_BYTES * (many["seconds"] - few["seconds"]) / (many["nbytes"] - few["nbytes"])
            bytes_s = product["nbytes"] / read["nbytes"] * read["seconds"]
            instructions_s = product["rows"] * product["columns"] / WORD_WEIGHTS * word_s / product["threads"]
            bound = "bytes" if bytes_s >= instructions_s else "instructions"
            rows.append((op, contestant, bytes_s, instructions_s, bound, 1e9 * word_s))
    return pd.DataFrame(rows, columns=["op", "contestant", "bytes_s", "instructions_s", "bound", "word_ns"])


def modelled_speedups(
    bits: Mapping[tuple[str, str], float], model: str, machines: Mapping[str, Profile]
) -> pd.DataFrame:
    """The products of the matrices of `model` on other machines, with bits a weight by operation and contestant.

    `product_s` gives the times: no attention, no uneven rows. The dense product is in 16 bits there. Columns as
    `measured_speedups` has them, without spreads. The null model is the same of machines without `software`.
    """
    shapes = twin_shapes(model)
    bits = {key: DENSE_BITS if key[1] == DENSE else weight_bits for key, weight_bits in bits.items()}
    table = pd.DataFrame(
        {"profile": name, "op": op, "contestant": contestant, "bits_per_weight": weight_bits}
        | _product(machine, shapes[op], weight_bits)
        for name, machine in machines.items()
        for (op, contestant), weight_bits in bits.items()
    )
    ours = table[table["contestant"].isin(STORAGES)].sort_values("seconds", kind="stable")
    table = pd.concat([table, ours.drop_duplicates(["profile", "op"]).assign(contestant=QUICKER)], ignore_index=True)
    for column, other in {"speedup": DENSE, "over_other": table["contestant"].map(STORAGES)}.items():
        table[column] = _seconds_of(table, other) / table["seconds"]
    means = table.groupby(["profile", "contestant"], sort=False)[["speedup", "over_other"]].agg(geometric_mean)
    return pd.concat([table, means.reset_index().assign(op=MEAN)], ignore_index=True).assign(evidence="modelled")


def _product(machine: Profile, shape: tuple[int, int], weight_bits: float) -> dict[str, float]:
    weights = shape[0] * shape[1]
    return {"nbytes": weights * weight_bits / 8, "seconds": product_s(machine, weights, weight_bits)}


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


def stored_bits(table: pd.DataFrame, contestants: Iterable[str] = (DENSE, *STORAGES)) -> dict[tuple[str, str], float]:
    """Bits a weight by operation and contestant, as `modelled_speedups` takes them, from `measured_speedups`."""
    rows = table[table["op"].ne(MEAN) & table["contestant"].isin(list(contestants))]
    return rows.set_index(["op", "contestant"])["bits_per_weight"].to_dict()


def by_op(table: pd.DataFrame, column: str, contestants: Sequence[str] = ()) -> pd.DataFrame:
    """To be looked at: a column of this machine's rows, an operation a row, a contestant a column."""
    rows = table[table["profile"] == MINE]
    wide = rows.pivot(index="op", columns="contestant", values=column).loc[list(dict.fromkeys(rows["op"]))]
    return wide[list(contestants) or list(dict.fromkeys(rows["contestant"]))]


def modelled_sentence(table: pd.DataFrame) -> str:
    """The speed-ups on the machines that are modelled; empty without such rows."""
    rows = table[table["profile"].ne(MINE) & table["op"].eq(MEAN) & table["contestant"].isin(STORAGES)]
    words = [
        f"{name} {', '.join(f'{row.speedup:.2f} ({row.contestant})' for row in of_machine.itertuples())}"
        for name, of_machine in rows.groupby("profile", sort=False)
    ]
    return f"The cost model gives: {'; '.join(words)}." if words else ""


def mean_row(table: pd.DataFrame, contestant: str) -> pd.Series:
    """The row of a contestant's geometric mean."""
    return table[table["contestant"].eq(contestant) & table["op"].eq(MEAN)].iloc[0]
