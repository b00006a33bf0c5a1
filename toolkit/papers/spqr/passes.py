"""SpQR figure 4.3: whole forward passes, measured here and modelled on the thesis' GPUs, and twins beside llama.cpp."""

from collections.abc import Mapping

import pandas as pd

from toolkit.machines.machine import GB, Profile
from toolkit.measure.summary import summary
from toolkit.measure.twin_forward import ModelTwin
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shapes import twin_shapes
from toolkit.papers.spqr.speedups import DENSE_BITS, MINE, product_s

RIVAL = "llama.cpp Q3_K"  # the other program's type of the fewest bits
DENSE, CSR, PTCSR = "dense", "spqr_packed", "spqr_ptcsr_packed"


def measured_passes(tokens: pd.DataFrame, model: str) -> pd.DataFrame:
    """A row a method, from `forward_measurements`: seconds_low, mean_s and median_s of a pass, over all repetitions.

    speedup is the dense median over this one, of the same repetition (`summary`). byte_limit is the dense bytes over
    this one's; gb_s the bytes over the median. bits_per_weight and dense_bits are those of the decoder linears, here
    and in the dense model: 16, or 32 on a CPU that is quicker in float32, where a ratio over dense is one over 32 bits.
    """
    turns = tokens.groupby(["method", "repetition"], sort=False)
    turns = turns[["seconds", "disturbed"]].median().join(turns[["weight_bytes"]].first()).reset_index()
    table = summary(turns, ["method"], (), {"speedup": {"method": DENSE}}).drop(columns="seconds").set_index("method")
    seconds = tokens.groupby("method", sort=False)["seconds"]
    table = table.assign(seconds_low=seconds.min(), mean_s=seconds.mean(), median_s=seconds.median())
    bits = pd.Series(stored_bits(tokens))
    table = table.assign(bits_per_weight=bits.reindex(table.index), dense_bits=bits[DENSE])
    return _finished(table.reset_index(), "median_s").assign(profile=MINE, model=model, evidence="measured")


def stored_bits(tokens: pd.DataFrame) -> dict[str, float]:
    """Bits a weight of the decoder linears, by method, from `forward_measurements`."""
    first = tokens.groupby("method", sort=False)[["linear_bytes", "weights"]].first()
    return (8 * first["linear_bytes"] / first["weights"]).to_dict()


def modelled_passes(
    bits: Mapping[str, float], model: str, machines: Mapping[str, Profile], dense_on: str
) -> pd.DataFrame:
    """A row a machine and method, with seconds_low: the products of all weights and of the head, one after the other.

    `bits` a weight of the decoder linears, by method; dense weights and the head have 16. Nothing else takes time: no
    attention, no norms. The dense model is asked for on the machine `dense_on` alone, since the other one cannot hold
    it.
    """
    shape = ARCHITECTURES[model]
    sizes = [rows * columns for rows, columns in twin_shapes(model).values()]
    head = shape.parameters["head"]
    bits = {method: DENSE_BITS if method == DENSE else weight_bits for method, weight_bits in bits.items()}
    tables = []
    for name, machine in machines.items():
        layer_s = [sum(product_s(machine, size, each) for size in sizes) for each in bits.values()]
        table = pd.DataFrame({"method": list(bits), "seconds_low": layer_s}).assign(profile=name)
        table["seconds_low"] = shape.layers * table["seconds_low"] + product_s(machine, head, DENSE_BITS)
        table = table.assign(bits_per_weight=bits.values(), dense_bits=DENSE_BITS)
        table["weight_bytes"] = [(shape.layers * sum(sizes) * each + head * DENSE_BITS) / 8 for each in bits.values()]
        table["speedup"] = table.loc[table["method"] == DENSE, "seconds_low"].item() / table["seconds_low"]
        table = _finished(table, "seconds_low")
        tables.append(table if name == dense_on else table[table["method"] != DENSE])
    return pd.concat(tables, ignore_index=True).assign(model=model, evidence="modelled")


def _finished(table: pd.DataFrame, seconds: str) -> pd.DataFrame:
    dense = table.loc[table["method"] == DENSE, "weight_bytes"].item()
    return table.assign(byte_limit=dense / table["weight_bytes"], gb_s=table["weight_bytes"] / table[seconds] / GB)


def twin_passes(turns: pd.DataFrame, twin: ModelTwin) -> pd.DataFrame:
    """A row a way and place, from `twin_measurements`: seconds of a token, with its range over the turns.

    bits_per_weight are those of the decoder linears; gb_s the bytes of linears and head over the seconds, or from the
    disk those that were read (`read_bytes`): the head stays in memory, ours and llama.cpp's. `over_rival` is the
    seconds of `RIVAL` over this way's in the same turn: the median, NaN where it did not run.
    """
    table = summary(turns, ["place", "way"], over={"over_rival": {"way": RIVAL}})
    table = table.drop(columns=["over_rival_low", "over_rival_high"]).rename(columns={"way": "method"})
    table["bits_per_weight"] = 8 * table["layer_bytes"] / table["weights"]
    table["read_bytes"] = table["read_bytes"].where(table["place"] == "storage")
    moved = table["read_bytes"].fillna(table["layer_bytes"] + table["head_bytes"])
    table["gb_s"] = moved / GB / table["seconds"]
    return table.assign(profile=MINE, model=twin.model, layers=twin.layers, evidence="measured")
