"""Routing traces in the format `route_trace v1` of BigMoeOnEdge, and the three of real models in `data/route_traces`.

    load_route_trace("qwen3-30b-a3b").active(0)

The file is text, as it is or compressed with xz: header lines that begin with #, then comma-separated columns.
"""

import lzma
import os
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import check_memory
from toolkit.records import line, read_regular
from toolkit.sparsity.trace import Trace, pack

FORMAT = "# route_trace v1"
LIMIT_BYTES = 64 << 20  # of the text
NUMBERS = {"turn": np.int64, "step": np.int64, "layer": np.int64, "expert": np.int64, "weight": np.float32}
ROUTE_TRACES = {  # the experts a token that the model was trained with; these files have fewer
    "qwen3-30b-a3b": 8,
    "gemma-4-26b-a4b": 8,
    "gpt-oss-120b": 4,
}
UNKNOWN_TOKEN = -1  # these files do not say which tokens they are of


def load_route_trace(name: str) -> Trace:
    """One of `ROUTE_TRACES`. Raises `UserError` for another name, and as `read_route_trace` does."""
    if name not in ROUTE_TRACES:
        raise unknown("route trace", name, ROUTE_TRACES)
    return read_route_trace(paths.root() / "data" / "route_traces" / f"{name}.csv.xz")


def read_route_trace(path: str | os.PathLike) -> Trace:
    """The trace of a file, compressed with xz if its name ends so: one sequence, all turns one after the other.

    A token may lack a layer (of a prompt, the last layer often computes the last token alone); it then uses no expert
    there. Token ids are unknown (-1). Raises `UserError`, which names the file, for one that cannot be read, is of
    another version, or is inconsistent.
    """
    path = Path(path)
    try:
        return _trace(_text(path), path.name)
    except (OSError, ValueError, KeyError, IndexError, OverflowError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read as a route trace: {line(error)}") from error


def _text(path: Path) -> str:
    data = read_regular(path, LIMIT_BYTES)
    if path.suffix == ".xz":
        with lzma.open(BytesIO(data)) as stream:
            data = stream.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"more than {LIMIT_BYTES >> 20} MB of text")
    return data.decode("utf-8")


def _trace(text: str, corpus: str) -> Trace:
    head = [row for row in text.splitlines() if row.startswith("#")]
    if not head or head[0].strip() != FORMAT:
        raise ValueError(f"expected {FORMAT!r} in its first line")
    about = dict(part.split("=", 1) for part in head[1][1:].split())
    layers, experts, used = (int(about[name]) for name in ("n_layer", "n_expert", "n_expert_used"))
    table = pd.read_csv(StringIO(text), comment="#", usecols=[*NUMBERS], dtype=NUMBERS, na_filter=False)
    for name, count in {"layer": layers, "expert": experts}.items():
        if not table[name].between(0, count - 1).all():
            raise ValueError(f"{name} {table[name].max()}; expected 0 to {count - 1}")
    if not np.isfinite(table["weight"]).all():
        raise ValueError("a weight that is not finite")
    steps = pd.MultiIndex.from_frame(table[["turn", "step"]])
    tokens = steps.unique().sort_values()
    check_memory(5 * layers * len(tokens) * experts, corpus)
    active = np.zeros((layers, len(tokens), experts), dtype=bool)
    weights = np.zeros(active.shape, dtype=np.float32)
    place = table["layer"], tokens.get_indexer(steps), table["expert"]
    active[place], weights[place] = True, table["weight"]
    if not np.isin(active.sum(-1), (0, used)).all() or active.sum() != len(table):
        raise ValueError(f"expected {used} experts for each token and layer, each once, or none")
    ids = torch.full((1, len(tokens)), UNKNOWN_TOKEN, dtype=torch.int32)
    bits = tuple(pack(torch.from_numpy(each)[None]) for each in active)
    weighed = tuple(torch.from_numpy(each)[None] for each in weights)
    return Trace(Path(about["model"]).name, corpus, ids, (experts,) * layers, bits, "expert", None, weighed)
