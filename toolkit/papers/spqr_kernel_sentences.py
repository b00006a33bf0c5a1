"""What SpQR's notebooks of mat-vecs saw, as sentences made from their tables."""

import pandas as pd

from toolkit.papers.spqr_kernels import CSR, MEAN, MINE, PTCSR, QUICKER, STORAGES

PAIRS = {"avx2_table": "avx2_arithmetic", "table": "arithmetic"}
WAYS = {"avx2_table": "with AVX2", "table": "with plain loops"}


def conversion_sentence(tables: dict[str, pd.DataFrame], model: str) -> str:
    """Whether the table wins; `tables` are of `measured_speedups`, by the table's name, over its arithmetic."""
    said = []
    for name, table in tables.items():
        row = _row(table, name)
        side = (
            "as in the thesis"
            if row["speedup_low"] > 1
            else "unlike the thesis"
            if row["speedup_high"] < 1
            else "a tie"
        )
        said.append(
            f"{WAYS[name]} the table is {row['speedup']:.2f} times as fast as the conversion (quartiles "
            f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}; {side})"
        )
    fused = [_row(table, "avx2") for table in tables.values() if "avx2" in set(table["contestant"])]
    over = fused[0]["speedup"] / _row(tables["avx2_table"], "avx2_table")["speedup"] if fused else None
    beside = f" The product that does neither is {over:.2f} times as fast as the table." if fused else ""
    return f"on this CPU, for the matrices of {model}, {'; '.join(said)}.{beside} On a GPU it was not run."


def speedup_sentence(table: pd.DataFrame, limits: pd.DataFrame, model: str) -> str:
    """How fast SpQR is beside dense, what bounds it, and what others reach."""
    mine = table[table["profile"] == MINE]
    ours = {name: _row(mine, name) for name in (CSR, PTCSR, QUICKER)}
    others = [_row(mine, name) for name in dict.fromkeys(mine["contestant"]) if name not in (*ours, "dense")]
    of_csr = mine[mine["contestant"].eq(CSR) & mine["op"].ne(MEAN)].set_index("op")
    bounds = limits[limits["contestant"] == CSR].set_index("op")
    reached = bounds[["bytes_s", "instructions_s"]].max(axis=1) / of_csr["seconds"]
    by_instructions = int(bounds["bound"].eq("instructions").sum())
    said = ", ".join(f"{row['contestant']} {row['speedup']:.2f} (limit {row['byte_limit']:.2f})" for row in others)
    return (
        f"this machine (measured, {model}) multiplies {ours[CSR]['speedup']:.2f} times as fast as torch's dense bf16 "
        f"with CSR, {ours[PTCSR]['speedup']:.2f} with PTCSR and {ours[QUICKER]['speedup']:.2f} with the quicker one "
        f"(geometric means over {len(of_csr)} matrices; bytes allow {ours[CSR]['byte_limit']:.2f} over a dense product "
        f"that is limited by bytes); beside it {said}. It reaches {reached.min():.0%} to {reached.max():.0%} of what "
        f"bytes and instructions allow ({by_instructions} of {len(bounds)} matrices are bound by instructions), and "
        f"{of_csr['share_of_read'].min():.0%} to {of_csr['share_of_read'].max():.0%} of the rate of reads. "
        + _modelled(table)
    )


def storages_sentence(table: pd.DataFrame, model: str) -> str:
    """Which storage wins on which matrices, and how the thesis contradicts itself."""
    mine = table[table["profile"].eq(MINE) & table["contestant"].eq(CSR) & table["op"].ne(MEAN)]
    wins = {
        "CSR": mine[mine["over_other_low"] > 1]["op"],
        "PTCSR": mine[mine["over_other_high"] < 1]["op"],
        "neither clearly": mine[(mine["over_other_low"] <= 1) & (mine["over_other_high"] >= 1)]["op"],
    }
    said = "; ".join(f"{name} on {', '.join(ops)}" for name, ops in wins.items() if len(ops))
    least, most = mine["over_other"].min(), mine["over_other"].max()
    return (
        f"on this machine (measured, {model}) the quicker storage is {said} (speed of CSR over PTCSR: {least:.2f} to "
        f"{most:.2f}). " + _modelled(table)
    )


def _modelled(table: pd.DataFrame) -> str:
    """The rooflines of the other machines."""
    rows = table[table["profile"].ne(MINE) & table["op"].eq(MEAN) & table["contestant"].isin(STORAGES)]
    said = [
        f"{name} {', '.join(f'{row.speedup:.2f} ({row.contestant})' for row in found.itertuples())}"
        for name, found in rows.groupby("profile", sort=False)
    ]
    return f"Bytes and peaks alone allow (modelled): {'; '.join(said)}." if said else ""


def _row(table: pd.DataFrame, contestant: str) -> pd.Series:
    return table[table["contestant"].eq(contestant) & table["op"].eq(MEAN)].iloc[0]
