"""LLM in a flash: random reads by chunk size and threads (section 2.2 and appendix B), as its notebooks show them."""

from collections.abc import Sequence

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from toolkit.errors import UserError
from toolkit.machines.machine import Profile


def random_reads(measurements: pd.DataFrame, measured_on: Profile, modelled: Sequence[Profile]) -> pd.DataFrame:
    """GB/s of random reads, a row for each chunk size and number of threads: measured here, modelled on each machine.

    `measurements` are those of `toolkit.machines.probe`; measured values are medians of all repetitions but the first.
    """
    storage = measurements.query("part == 'storage' and pattern == 'random' and repetition > 0")
    cells = storage.groupby(["pattern", "chunk_bytes", "threads", "mode"], as_index=False)["value"].median()
    cells = cells.astype({"chunk_bytes": int, "threads": int})
    tables = [cells.assign(profile=measured_on.id, evidence="measured")]
    for machine in modelled:
        rates = [machine.storage.read_gb_s(row.chunk_bytes, row.threads) for row in cells.itertuples()]
        tables.append(cells.assign(profile=machine.id, mode=None, evidence="modelled", value=rates))
    return pd.concat(tables).assign(quantity="random_read_gb_s", tier="flash or disk")


def enough_chunks(cells: pd.DataFrame, machines: Sequence[Profile], threads: int, share: float) -> pd.DataFrame:
    """The smallest chunk, in KiB, with which so many threads reach a share of each disk's bandwidth.

    `cells` as `random_reads` gives them. Raises `UserError` for a number of threads that the probe did not try.
    """
    if threads not in (tried := sorted(set(cells["threads"]))):
        raise UserError(f"many_threads is {threads}; expected one that the probe tried: {tried}")
    limits = {machine.id: machine.storage.bandwidth_gb_s for machine in machines}
    many = cells[cells["threads"] == threads]
    enough = many[many["value"] >= share * many["profile"].map(limits)]
    chunks = enough.groupby(["profile", "evidence"], as_index=False)["chunk_bytes"].min()
    return chunks.assign(quantity="enough_chunk_kib", value=chunks["chunk_bytes"] / 1024, threads=threads)


def read_curves(cells: pd.DataFrame, machines: Sequence[Profile]) -> Figure:
    """A panel for each machine: modelled curves over chunk size by number of threads, and measured points if any."""
    figure, panels = plt.subplots(1, len(machines), figsize=(8.4, 3.8))
    for axes, machine in zip(panels, machines, strict=True):
        rows = cells[cells["profile"] == machine.id]
        for evidence, style in (("modelled", "--"), ("measured", "o")):
            for number, (threads, group) in enumerate(rows[rows["evidence"] == evidence].groupby("threads")):
                label = threads if evidence == "modelled" else None
                axes.plot(
                    group["chunk_bytes"] / 1024, group["value"], style, color=f"C{number}", label=label, markersize=5
                )
        axes.axhline(machine.storage.bandwidth_gb_s, color="gray", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        kinds = " and ".join(sorted(rows["evidence"].unique()))
        axes.set(xlabel="chunk, KiB", ylabel="GB/s", ylim=(0, None), title=f"(b) {machine.id}, {kinds}")
    panels[0].plot([], [], "ko", label="measured")
    panels[0].legend(title="threads", title_fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=5)
    figure.tight_layout()
    return figure


def read_gains(cells: pd.DataFrame, machine: str) -> str:
    """What larger chunks and more threads gain on a machine, measured, and how far the model is off, as a sentence."""
    rows = cells[cells["profile"] == machine]
    grids = {
        kind: found.pivot(index="chunk_bytes", columns="threads", values="value")
        for kind, found in rows.groupby("evidence")
    }
    grid, error = grids["measured"], (grids["modelled"] / grids["measured"] - 1).abs().stack()
    large, small, one, most = grid.index.max(), grid.index.min(), grid.columns.min(), grid.columns.max()
    by_chunk, by_threads = (grid.diff(axis=axis).stack().dropna() > 0 for axis in (0, 1))
    return (
        f"On {machine} a random read of {small // 1024} KiB gains {grid.at[small, most] / grid.at[small, one]:.1f} "
        f"times from {most} threads instead of {one}, and {grid.at[large, one] / grid.at[small, one]:.0f} times from "
        f"{large // 1024} KiB instead; {by_chunk.mean():.0%} of the steps to a larger chunk and "
        f"{by_threads.mean():.0%} of those to more threads are steps up. The model misses these cells by "
        f"{error.median():.0%} (median), {error.max():.0%} at most."
    )
