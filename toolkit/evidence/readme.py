"""The generated blocks of README and of `results/reference/README.md`, made from one machine's kept results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.comparison import (
    COLUMNS,
    DIFFERS,
    GROUPS,
    LIMITS,
    STAND_INS,
    THIS_MACHINE,
    VALUES,
    VERDICTS,
    count_verdicts,
    group,
    omission_words,
    prediction_words,
    score,
)
from toolkit.evidence.literature import PAPERS
from toolkit.evidence.meta import HEADLINES
from toolkit.files import replacing
from toolkit.timeline.tables import model_error

GROUP_WORDS = {
    VALUES: "Values, on the machines of the papers or on none:",
    LIMITS: "Limits, which have no error:",
    STAND_INS: "Stand-ins, another model or this machine for the paper's: they show an effect, not a value:",
}
READS = ("io_ms", "gb_s", "value")  # the number of a table of reads, and what tells its rows apart
READ_KEYS = ("way", "window", "layout", "pattern", "chunk_bytes", "threads")

BEGIN, END = "<!-- begin generated {}: python -m toolkit.evidence.reference -->", "<!-- end generated {} -->"


def write_readme(folder: Path) -> None:
    """Put each block between its markers in its file. Raises `UserError` if the markers are not there."""
    for name, (place, write) in BLOCKS.items():
        file = paths.checkout() / place
        text = file.read_text(encoding="utf-8")
        start, end = _span(text, name)
        with replacing(file) as temporary:
            temporary.write_text(f"{text[:start]}{write(folder)}{text[end:]}", encoding="utf-8")


def read_block(text: str, name: str) -> str:
    """The text between the markers of a block. Raises `UserError` if the markers are not there."""
    start, end = _span(text, name)
    return text[start:end]


def _span(text: str, name: str) -> tuple[int, int]:
    """Where a block starts and ends, without its markers."""
    begin, end = BEGIN.format(name), END.format(name)
    start, stop = text.find(f"{begin}\n"), text.find(f"\n{end}")
    if -1 in (start, stop):
        raise UserError(f"README: the lines {begin!r} and {end!r} are not there; put them where the block belongs")
    return start + len(begin) + 1, stop


def readme_summary(folder: Path) -> str:
    """What is gained, what it costs, and what a user would take instead; a line each."""
    passes, meta = _table(folder, "endor/tab_e2e"), _meta(folder, "endor/tab_e2e")
    return "\n".join(
        [
            f"* **Gain** ({meta['cpu']}, `{folder.name}`; measured): {_gain(folder)}",
            f"* **Price**: {_price(folder)}",
            f"* **Instead**: {_instead(folder, passes, meta['parameters']['rival_model'])}",
            *_beside_three_bits(folder),
        ]
    )


def _machines(folder: Path, id: str) -> list[Path]:
    """The kept machines that have this notebook's results, the one at hand among them."""
    return [place for place in sorted(folder.parent.iterdir()) if (place / id / "meta.json").is_file()]


def _range(values: Mapping[str, float]) -> str:
    """The least and the most over kept machines, with their names; nothing for a single one."""
    if len(values) < 2:
        return ""
    ends = (min(values, key=values.__getitem__), max(values, key=values.__getitem__))
    least, most = (f"{values[machine]:.2f} on `{machine}`" for machine in ends)
    return f"; over {len(values)} kept machines from {least} to {most}"


def _beside_three_bits(folder: Path) -> list[str]:
    """The speed of SpQR's packed weights over llama.cpp's 3 bits, all layers in memory; no line without the race."""
    id = "spqr/fig4_3"
    ratios: dict[str, dict[str, float]] = {}
    for machine in _machines(folder, id):
        rows = _table(machine, id)
        if "over_rival" in rows:
            rows = rows[rows["place"].eq("dram") & rows["method"].str.startswith("spqr")]
            for model, best in rows.groupby("model")["over_rival"].max().dropna().items():
                ratios.setdefault(str(model), {})[machine.name] = best
    words = [
        f"{of[folder.name]:.2f} times as fast through `{model}`'s layers{_range(of)}"
        for model, of in ratios.items()
        if folder.name in of
    ]
    return [f"* **3 bits in memory**: SpQR's tokens against llama.cpp's Q3_K: {'. '.join(words)}."] if words else []


def _gain(folder: Path) -> str:
    """Of the model and the layers that this machine has measured; the range is over machines that measured the same."""
    same = _measured_twin(folder)
    machines = [machine for machine in _machines(folder, "endor/tab_e2e") if _measured_twin(machine) == same]
    ends = {machine.name: _dense_and_packed(machine) for machine in machines}
    ratios = {machine: dense["seconds"] / packed["seconds"] for machine, (dense, packed) in ends.items()}
    model, layers = same
    dense, packed = ends[folder.name]
    ratio, allowed = ratios[folder.name], dense["stored_bytes"] / packed["stored_bytes"]
    above = ""
    if ratio > allowed:
        in_spread = dense["low_s"] / packed["high_s"] <= allowed
        above = "; the rest " + ("lies within the turns' spread" if in_spread else "is a fault of the measurement")
    return (
        f"with half of the weights zero, one token through {layers} layers of `{model}`, of random weights, comes from "
        f"disk **{ratio:.2f} times as fast** as with dense weights by the same reader (its bytes allow "
        f"{allowed:.2f}{above}{_range(ratios)})."
    )


def _measured_twin(folder: Path) -> tuple[str, int]:
    """The model whose passes a machine has measured, and the number of its layers."""
    parameters = _meta(folder, "endor/tab_e2e")["parameters"]
    return parameters["measured_model"], parameters["measured_layers"]


def _dense_and_packed(folder: Path) -> tuple[pd.Series, pd.Series]:
    """The fastest passes from disk with dense weights and with Endor's, as the notebook's own sentence has them."""
    fastest = _fastest(_table(folder, "endor/tab_e2e"), _measured_twin(folder)[0])
    return fastest.loc["dense"], _endor(fastest)


def _price(folder: Path) -> str:
    rows = _perplexities(folder)
    dense = rows[rows["method"] == "dense"]["value"].item()
    half = rows[rows["pattern"] == "50 %"]
    best = half.loc[half["value"].idxmin()]
    return (
        f"perplexity grows from {dense:.1f} to {best['value']:.1f} at {best['bits_per_weight']:.1f} bits a weight "
        f"(`{_meta(folder, 'endor/tab_perplexity')['parameters']['model']}`, {best['method']})."
    )


def _instead(folder: Path, passes: pd.DataFrame, model: str) -> str:
    whole = _perplexities(folder)
    whole = whole[whole["pattern"].eq("none") & whole["method"].ne("dense")]
    kept = [f"{row.value:.1f} at {row.bits_per_weight:.1f} bits ({row.method})" for row in whole.itertuples()]
    fastest = _fastest(passes, model)
    endor = _endor(fastest)["seconds"]
    speeds = [
        f"{name} {endor / seconds:.2f}"
        for name, seconds in fastest["seconds"].sort_values().items()
        if not name.startswith(("dense", "endor"))
    ]
    return (
        f"without zeros, fewer bits keep a perplexity of {' and '.join(kept)}. From disk, through `{model}`'s layers, "
        f"other programs run at these multiples of Endor's speed: {', '.join(speeds)}."
    )


def _fastest(passes: pd.DataFrame, model: str) -> pd.DataFrame:
    """The fastest measured way of each method with all layers on disk, by method."""
    total = _measured(passes, model)
    total = total[total["mapping"] == "storage"]
    return total.loc[total.groupby("method")["seconds"].idxmin()].set_index("method")


def _endor(fastest: pd.DataFrame) -> pd.Series:
    """The fastest of Endor's ways: decoded, or multiplied as they are."""
    ours = fastest[fastest.index.str.startswith("endor")]
    return ours.loc[ours["seconds"].idxmin()]


def _perplexities(folder: Path) -> pd.DataFrame:
    """Perplexities of variants, without differences and calibration sizes."""
    table = _table(folder, "endor/tab_perplexity")
    return table[table["metric"].eq("perplexity") & table["bits_per_weight"].notna()]


def readme_papers(folder: Path) -> str:
    """A row a paper: how well its numbers are predicted, the gains, the first price and what first does not pay.

    `readme_tables` has all of it in full.
    """
    compared, spoken, rows = comparisons(folder), _headlines(folder), []
    for id, paper in PAPERS.items():
        if not paper.title:
            continue
        found, said = score(compared[compared["paper"] == id]), spoken.get(id, {})
        prices = said.get("cost", [])[:1] + said.get("negative", [])[:1]
        rows.append(
            {
                "paper": paper.name,
                "predictions": found.get("n", "–"),
                "off by": _off(found, ""),
                "bytes alone": _off(found, "null_"),
                "gain": " ".join(said.get("gain", [])) or "–",
                "price, and what does not pay": " ".join(prices) or "–",
            }
        )
    return markdown(pd.DataFrame(rows))


def _off(found: Mapping[str, object], whose: str) -> str:
    """The median and the largest error of a score, with the count if it is of fewer quantities."""
    if f"{whose}median_error" not in found:
        return "–"
    ends = "{:.0%}, {:.0%}".format(*(found[f"{whose}{end}_error"] for end in ("median", "largest")))
    count = found.get(f"{whose}n", found["n"])
    return ends if count == found["n"] else f"{ends} (on {count})"


def _headlines(folder: Path) -> dict[str, dict[str, list[str]]]:
    """What the notebooks say of each system, by paper and kind: "gain", "cost", "negative"."""
    spoken: dict[str, dict[str, list[str]]] = {}
    for id in notebooks():
        if (folder / id / "meta.json").is_file():
            headline = dict(_meta(folder, id).get("headline") or {})
            system = headline.pop("system", id.split("/")[0])
            for kind, sentence in headline.items():
                spoken.setdefault(system, {}).setdefault(kind, []).append(sentence)
    return spoken


def readme_tables(folder: Path) -> str:
    """All results as Markdown, from one machine's kept results."""
    meta = _meta(folder, "endor/tab_perplexity")
    relative = Path(folder.name)  # the file lies beside the folders of the machines
    parts = [
        f"Measured on {meta['cpu']}, {meta['gpu'] or 'no GPU'}, {meta['finished'][:10]}; all of it in `{relative}/`.",
        _headlines_part(folder),
        _score_part(folder),
        _quality_part(folder),
        _sizes_part(folder, relative),
        _passes_part(folder),
        _errors_part(folder),
    ]
    return "\n\n".join(parts)


def scores(folder: Path) -> dict[str, str]:
    """By paper: how many predictions, how far off, beside the null model, and what is left out."""
    return {
        paper: f"{prediction_words(rows)}; {omission_words(rows)}"
        for paper, rows in comparisons(folder).groupby("paper", sort=False)
    }


def _headlines_part(folder: Path) -> str:
    """All sentences on gains and prices, by paper and kind."""
    spoken = _headlines(folder)
    lines = [
        f"* `{system}`, {kind}: {sentence}"
        for system in PAPERS
        for kind in HEADLINES
        for sentence in spoken.get(system, {}).get(kind, [])
    ]
    return "**What is gained, what it costs, and what does not pay.**" + "".join(f"\n{line}" for line in ["", *lines])


def _score_part(folder: Path) -> str:
    """The headline: predictions against the null model; then all verdicts apart, and what differs with its reason."""
    compared = comparisons(folder)
    papers = [f"* `{paper}`: {words}." for paper, words in scores(folder).items()]
    tables = [f"{GROUP_WORDS[name]}\n\n{markdown(_verdicts(compared[group(compared) == name]))}" for name in GROUPS]
    differing = compared[compared["verdict"].eq(DIFFERS) & compared["kind"].ne("context")]
    lines = [
        f"* {row.quantity} (`{row.paper}/{row.claim}`): {row.published:g} published, {row.ours:.3g} {row.evidence}"
        + (f", {row.profile}" if isinstance(row.profile, str) else "")
        + (f": {row.reason}." if isinstance(row.reason, str) else ".")
        for row in differing.itertuples()
    ]
    return "\n\n".join(
        [
            "**What is predicted, and how well.** All that is modelled for a machine of a paper and could have missed; "
            "a quantity counts once a machine.",
            "\n".join(papers),
            "Verdicts on the published numbers compared so far; `toolkit/evidence/comparison.py` has the rules. "
            "An `input` is what a profile was derived from, `arithmetic` follows from shapes, formats and inputs.",
            *tables,
            "What differs:" if lines else "Nothing differs.",
            *(["\n".join(lines)] if lines else []),
        ]
    )


def _quality_part(folder: Path) -> str:
    used = _meta(folder, "endor/tab_perplexity")["parameters"]
    return (
        f"**What pruning costs** `{used['model']}` on `{used['corpus']}`: perplexity over "
        f"{used['evaluation_windows']} windows of {used['sequence_length']} tokens, "
        f"{used['calibration_windows']} calibration windows; accuracy on "
        f"{used['task_limit'] or 'all'} items a task (± standard error).\n\n"
        + markdown(_quality(_table(folder, "endor/tab_perplexity")))
    )


def _sizes_part(folder: Path, relative: Path) -> str:
    sizes = _table(folder, "endor/fig04")
    half = sizes[sizes["source"].str.startswith("opt-66b") & sizes["sparsity"].eq(0.5)]
    rows = _meta(folder, "endor/fig04")["parameters"]["twin_rows"]
    scaled = f"scaled up from {rows} of its rows, so modelled" if "modelled" in set(half["evidence"]) else "measured"
    return (
        "**What packing saves**, bytes over dense bytes at 50 % sparsity: all decoder linears of the real model, "
        f"measured, and a random twin of ENDOR's first FFN matrix (36864 × 9216), {scaled}.\n\n"
        f"{markdown(_sizes(sizes))}\n\n"
        f"![Bytes over sparsity, by format]({relative}/endor/fig04/sizes.png)"
    )


def _passes_part(folder: Path) -> str:
    used, table = _meta(folder, "endor/tab_e2e")["parameters"], _table(folder, "endor/tab_e2e")
    devices = table.loc[table["evidence"] == "measured", "device"].dropna().str.upper().unique()
    return (
        f"**What it buys**, one token through {used['measured_layers']} layers of `{used['measured_model']}`'s "
        f"shapes with half zeros, all on disk, run on the {' and '.join(devices)}; measured. Sequential: one thing "
        "after the other. Pipelined: the next layer is read meanwhile, the fair rival. Low and high are the quickest "
        "and the slowest repetition.\n\n"
        + markdown(_passes(_measured(table, used["measured_model"])))
        + "\n\nThe paper's own protocol, sequential with its share of layers in memory (`published`), and with as "
        "many packed layers as fit into the bytes of the dense ones (`refilled`):\n\n"
        + markdown(_mapped(table, used["measured_model"]))
        + f"\n\nOther programs on a Llama-shaped twin, `{used['rival_model']}`, {used['rival_layers']} layers:\n\n"
        + markdown(_passes(_measured(table, used["rival_model"])))
    )


def _errors_part(folder: Path) -> str:
    return (
        "**What the cost model is worth on this machine**: how far it is off what was measured, as the median and the "
        "largest error. Of SpQR's products it is the larger of their limits, bytes and instructions.\n\n"
        + markdown(_errors(folder))
    )


def markdown(table: pd.DataFrame) -> str:
    """A data frame as a Markdown table."""
    rows = [table.columns.tolist(), ["---"] * len(table.columns), *table.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _quality(table: pd.DataFrame) -> pd.DataFrame:
    """A row a variant: bits a weight, perplexity and accuracies; the chance level stands in the header."""
    table = table[table["bits_per_weight"].notna() & ~table["metric"].str.contains(", by ")]
    chance = table["chance"].map(" (chance {:.0%})".format).where(table["chance"].notna(), "")
    shown = table.assign(
        metric=table["metric"] + chance,
        bits=table["bits_per_weight"].map("{:.2f}".format),
        shown=[
            f"{row.value:.1f} ± {row.standard_error:.1f}"
            if row.metric == "perplexity"
            else f"{row.value:.1%} ± {row.standard_error:.1%}"
            for row in table.itertuples()
        ],
    )
    wide = shown.pivot_table(
        index=["pattern", "method", "bits"], columns="metric", values="shown", aggfunc="first", sort=False
    )
    return wide.reset_index().rename(columns=str)


def _sizes(table: pd.DataFrame) -> pd.DataFrame:
    """A row a format, a column for each source and data type; 2:4 on a real model is of its own pattern."""
    from toolkit.formats import FORMATS  # brings torch, which the report needs nowhere else

    twin = table["source"].str.startswith("opt-66b") & table["sparsity"].eq(0.5)
    real = table["pattern"].eq("50 %") | (table["pattern"].eq("2:4") & table["format"].eq("two_four"))
    half = table[table["format"].isin(FORMATS) & (twin | real)]
    half = half.assign(ratio=half["ratio"].map("{:.1%}".format), column=half["source"] + ", " + half["dtype"])
    return half.pivot_table(index="format", columns="column", values="ratio", aggfunc="first", sort=False).reset_index()


def _measured(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Totals of a model's measured passes."""
    return table[(table["stage"] == "total") & (table["evidence"] == "measured") & (table["model"] == model)]


def _passes(totals: pd.DataFrame) -> pd.DataFrame:
    """Passes with all layers on disk, the quickest first, beside the fair dense one."""
    total = totals[totals["mapping"] == "storage"].sort_values("seconds")
    fair = total[(total["method"] == "dense") & (total["policy"] == "pipelined")].iloc[0]
    times = (fair["seconds"] / total["seconds"]).map("{:.2f}".format)
    allowed = (
        (fair["stored_bytes"] / total["stored_bytes"]).map("{:.2f}".format).where(total["mode"] == fair["mode"], "–")
    )
    return pd.DataFrame({**_seconds(total), "times as fast as dense, pipelined": times, "bytes allow": allowed})


def _mapped(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Passes with a part of the layers in memory, beside dense weights on the published map."""
    total = _measured(table, model)
    total = total[total["mapping"] != "storage"]
    places = {"mapping": total["mapping"], "layers in memory": total["dram_layers"].astype(int)}
    return pd.DataFrame({**places, **_seconds(total), "times as fast as dense": total["speedup"].map("{:.2f}".format)})


def _seconds(total: pd.DataFrame) -> dict[str, pd.Series]:
    columns = {"seconds": "seconds", "low": "low_s", "high": "high_s"}
    shown = {name: total[column].map("{:.3f}".format) for name, column in columns.items()}
    return {"method": total["method"], "policy": total["policy"], **shown}


def _errors(folder: Path) -> pd.DataFrame:
    present = {id: _table(folder, id) for id in notebooks() if (folder / id / "table.csv").is_file()}
    ratios = {id: _modelled_over_measured(table) for id, table in present.items()}
    predicted = {id: table for id, table in ratios.items() if len(table)}
    if predicted:
        predicted["all together"] = pd.concat(predicted.values())
    rows = []
    for id, table in predicted.items():
        off = {name: "–" if pd.isna(share) else f"{share:.0%}" for name, share in model_error(table).items()}
        rows.append({"figure": id, **{name.replace("_largest", ", largest"): share for name, share in off.items()}})
    return pd.DataFrame(rows)


def _modelled_over_measured(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with `stage` and `modelled_over_measured`: of stages, of products beside their limits, or of reads."""
    if "modelled_over_measured" in table or "profile" not in table:
        return table if "modelled_over_measured" in table else table[:0]
    if "instructions_s" in table:
        ratio = table[["bytes_s", "instructions_s"]].max(axis=1) / table["seconds"]
        ratio = ratio[table["profile"].eq(THIS_MACHINE)].dropna()
    else:
        mine = table[table["profile"] == THIS_MACHINE]
        number, keys = next((name for name in READS if name in mine), None), [key for key in READ_KEYS if key in mine]
        if not number or not keys or {"measured", "modelled"} - set(mine["evidence"]):
            return table[:0]
        wide = mine.groupby([*keys, "evidence"], dropna=False)[number].first().unstack()
        ratio = (wide["modelled"] / wide["measured"]).dropna()
    return pd.DataFrame({"stage": "read or product", "modelled_over_measured": ratio})


def _verdicts(compared: pd.DataFrame) -> pd.DataFrame:
    """A row a kind, a column a verdict."""
    counts = count_verdicts(compared[compared["ours"].notna()])
    return pd.DataFrame(
        [
            {"kind": kind.partition(",")[0]} | {verdict: found.get(verdict, 0) for verdict in VERDICTS[:-1]}
            for kind, found in counts.items()
        ],
        columns=["kind", *VERDICTS[:-1]],
    )


def comparisons(folder: Path) -> pd.DataFrame:
    """Every notebook's comparison, with its paper."""
    tables = [
        pd.read_csv(folder / id / "comparison.csv").assign(paper=id.split("/")[0])
        for id in notebooks()
        if (folder / id / "comparison.csv").is_file()
    ]
    kept = [table.reindex(columns=[*COLUMNS, "paper"]) for table in tables if len(table)]
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame(columns=[*COLUMNS, "paper"])


def _meta(folder: Path, id: str) -> dict:
    return json.loads((folder / id / "meta.json").read_text())


def _table(folder: Path, id: str) -> pd.DataFrame:
    return pd.read_csv(folder / id / "table.csv")


def tutorial(paper: str) -> Callable[[Path], str]:
    """Writes what the notebooks of a paper found on one machine, for the page that explains the paper."""

    def found(folder: Path) -> str:
        metas = [_meta(folder, id) for id in notebooks() if (folder / id / "meta.json").is_file()]
        spoken = _headlines(folder).get(paper, {})
        words = {"gain": "Gain", "cost": "Price", "negative": "Does not pay"}
        lines = [f"* **{words[kind]}.** {sentence}" for kind in HEADLINES for sentence in spoken.get(kind, [])]
        return (
            f"On {metas[0]['cpu']} (`{folder.name}`):\n\n" + "\n".join(lines) + "\n\n"
            f"Against the paper's numbers: {scores(folder).get(paper, 'nothing is compared so far')}."
        )

    return found


TUTORIALS = ("endor", "flash", "spqr", "hermes", "corm")
BLOCKS = {
    "summary": ("README.md", readme_summary),
    "papers": ("README.md", readme_papers),
    "results": ("results/reference/README.md", readme_tables),
    **{paper: (f"docs/{paper}.md", tutorial(paper)) for paper in TUTORIALS},
}
