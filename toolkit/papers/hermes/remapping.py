"""Hermes's figure 8: how uneven the loads of the DIMMs are, and what moving cold neurons once a window changes.

The first `PROMPT` tokens of a trace say which neurons are hot and where cold ones lie; the others are counted. `active`
of a layer is [tokens, neurons] everywhere.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int8

from toolkit.machines.hardware import profile
from toolkit.machines.machine import GB
from toolkit.papers.hermes.systems import MACHINE
from toolkit.policies.dimms import by_chance, imbalance, in_snake_order, loads
from toolkit.policies.remapping import remap
from toolkit.simulation.near_data import link_s

PROMPT = 128  # tokens (Hermes, section V-A4)
HOT = 0.2  # of the neurons (section III-A)
CHANNEL_GB_S = 25.6  # a channel of DDR4-3200, 8 B × 3.2 GT/s

Active = Bool[np.ndarray, "tokens neurons"]


def random(profile: Active, dimms: int) -> Int8[np.ndarray, " neurons"]:
    """As many neurons on each DIMM, whatever they do."""
    return by_chance(profile.shape[1], dimms)


def balanced(profile: Active, dimms: int) -> Int8[np.ndarray, " neurons"]:
    """As much activity on each DIMM, by the prompt."""
    return in_snake_order(np.argsort(-profile.mean(0), kind="stable"), dimms)


def clustered(profile: Active, dimms: int) -> Int8[np.ndarray, " neurons"]:
    """Neurons that are active together on one DIMM: in the order of their first principal component, cut evenly."""
    centred = (profile - profile.mean(0)).astype(np.float32)
    token = np.linalg.eigh(centred @ centred.T)[1][:, -1]  # of so few tokens the eigenvectors are found faster
    order = np.argsort(token @ centred, kind="stable")
    dimm = np.empty(len(order), dtype=np.int8)
    dimm[order] = np.arange(len(order)) * dimms // len(order)
    return dimm


PLACEMENTS = {"random": random, "balanced": balanced, "clustered": clustered}


def hot_neurons(profile: Active) -> Bool[np.ndarray, " neurons"]:
    """The most used ones, `HOT` of them."""
    hot = np.zeros(profile.shape[1], dtype=bool)
    hot[np.argsort(-profile.mean(0), kind="stable")[: round(HOT * len(hot))]] = True
    return hot


def changed_hot(active: Active) -> float:
    """Of the neurons that the prompt makes hot, the share that is not among as many hot ones of the last tokens."""
    first, last = hot_neurons(active[:PROMPT]), hot_neurons(active[-PROMPT:])
    return 1 - float(last[first].mean())


def imbalance_table(layers: Sequence[Active], dimms: int, windows: Sequence[int]) -> pd.DataFrame:
    """A row for each placement and window, 0 if cold neurons stay; means over layers and tokens, or windows.

    Columns: placement; window, in tokens; imbalance (the busiest DIMM over the mean, for one token); imbalance_before
    and imbalance_after (the same of a window's sums, as the window found the neurons, and where they lie once they were
    moved by these sums); moved (neurons of a layer and window). Without moves the sums are those of 5 tokens.
    """
    rows = []
    for name, place in PLACEMENTS.items():
        for window in windows:
            found = [_numbers(layer, place(layer[:PROMPT], dimms), dimms, window) for layer in layers]
            rows.append({"placement": name, "window": window} | pd.DataFrame(found).mean().to_dict())
    return pd.DataFrame(rows)


def _numbers(active: Active, dimm: Int8[np.ndarray, " neurons"], dimms: int, window: int) -> dict[str, float]:
    cold = active[PROMPT:] & ~hot_neurons(active[:PROMPT])
    step, found = window or 5, []
    for first in range(0, len(cold) - step + 1, step):
        tokens = cold[first : first + step]
        count = tokens.sum(0)
        each = [float(imbalance(loads(token, dimm, dimms))) for token in tokens]
        row = {"imbalance": np.mean(each), "imbalance_before": float(imbalance(loads(count, dimm, dimms)))}
        if window:
            dimm, moved = remap(count, dimm, dimms)
            row |= {"imbalance_after": float(imbalance(loads(count, dimm, dimms))), "moved": len(moved)}
        found.append(row)
    return pd.DataFrame(found).mean().to_dict()


def migration(moved: float, layers: int, neuron_bytes: int, window: int, tokens_s: float, dimms: int) -> pd.DataFrame:
    """What moving so many neurons of each layer costs after each window: seconds, and the share of the window's time.

    Pairs of DIMMs move beside each other over links of their own. Through the host all bytes cross a channel twice, one
    pair after the other; `paper` is the rate that makes the published 62 × out of the link.
    """
    nbytes = moved * layers * neuron_bytes
    by_link_s = float(link_s(profile(MACHINE).near_data, nbytes / (dimms // 2)))
    seconds = {"DIMM-link": by_link_s, "host": 2 * nbytes / CHANNEL_GB_S / GB, "host, as 62 × has it": 62 * by_link_s}
    rows = [{"through": way, "seconds": value} for way, value in seconds.items()]
    table = pd.DataFrame(rows)
    share = 100 * table["seconds"] / (table["seconds"] + window / tokens_s)
    return table.assign(time_percent=share, slower=table["seconds"] / table["seconds"].iloc[0])
