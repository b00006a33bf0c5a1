"""LLM in a flash beside what a user would take instead: llama.cpp, and packed or dense weights streamed from disk.

All of them run a Llama-shaped twin from the same disk. llama.cpp's pages are dropped before each token: with less
memory than the model has, a page that is read in a circle is always gone when it is needed again.
"""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from toolkit.evidence.figures import first_on_top, whiskers
from toolkit.measure.end_to_end import Passes, measured_spans
from toolkit.measure.llama_cpp import missing
from toolkit.measure.model_passes import turn_bytes, turn_seconds
from toolkit.models.workload import Workload
from toolkit.policies.methods import LLAMA_CPP
from toolkit.policies.ways import Placed, Way

STREAMED = {"dense": "dense, streamed", "endor_packed": "endor packed, streamed"}
OURS = "bundling"


def rivals() -> list[Placed]:
    """Ways that this machine can run, all layers on disk."""
    ways = [Way(method, policy="pipelined", device="cpu") for method in STREAMED]
    ways += [Way(name, device="cpu") for name in LLAMA_CPP] if missing() is None else []
    return [(way, "storage") for way in ways]


def rival_tokens(model: str, layers: int, repetitions: int = 3, fresh: bool = False) -> pd.DataFrame:
    """One token by each rival, as rows of `toolkit.papers.flash.reads`: medians over the turns, and their range.

    Endor's weights are pruned to one half, so its model is another one than llama.cpp's; latency alone is compared.
    """
    passes = Passes(Workload(model), layers, rivals(), repetitions)
    spans = measured_spans(passes, fresh=fresh)
    seconds, nbytes = turn_seconds(spans), turn_bytes(spans)
    rows = [_row(column, seconds[column] * 1e3, nbytes[column].median()) for column in seconds]
    return pd.DataFrame(rows).assign(model=model, layers=layers, profile="this-machine", evidence="measured")


def beside_rivals(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Ours and the rivals' rows, with `over_rival`: the rival's time over that of our last way."""
    table = pd.concat([ours, theirs], ignore_index=True)
    own = table.loc[table["way"] == OURS, "total_ms"].iloc[0]
    return table.assign(over_rival=table["total_ms"] / own)


def rival_words(table: pd.DataFrame) -> str:
    """How many times as long as ours each other way takes, and where fewer bits are quicker than fewer neurons."""
    others = table[table["way"] != OURS].sort_values("over_rival", ascending=False)
    times = ", ".join(f"{row.way} {row.over_rival:.1f}" for row in others.itertuples())
    lost = others[others["over_rival"] < 1]["way"].tolist()
    model, layers = table[["model", "layers"]].iloc[0]
    verdict = f"Quicker than fewer neurons: {', '.join(lost)}." if lost else "None of them is quicker."
    return f"of the time that {OURS} takes for {layers} layers of {model}, others take (measured): {times}. {verdict}"


def rival_figure(table: pd.DataFrame) -> Figure:
    """Milliseconds a token of every way, the slowest on top; ours in another colour."""
    rows = table.sort_values("total_ms", ascending=False)
    figure, axes = plt.subplots(figsize=(6.4, 0.36 * len(rows) + 0.9), layout="constrained")
    axes.barh(rows["way"], rows["total_ms"], color=["C1" if way == OURS else "C0" for way in rows["way"]])
    whiskers(axes, rows["total_ms_low"], rows["total_ms_high"])
    first_on_top(axes)
    model, layers = table[["model", "layers"]].iloc[0]
    axes.set(xlabel="ms a token", title=f"{layers} layers of {model}, measured here")
    return figure


def _row(column: tuple[str, ...], milliseconds: pd.Series, nbytes: float) -> dict[str, object]:
    ends = {"total_ms_low": milliseconds.min(), "total_ms_high": milliseconds.max()}
    name = STREAMED.get(column[0], column[0])
    return {"way": name, "total_ms": milliseconds.median(), **ends, "read_gb": nbytes / 1e9}
