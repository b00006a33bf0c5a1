"""Prompts and batches through a model on disk: the time to the first token, and tokens a second after it.

    generation_measurements(GenerationRace(Workload("opt-1536"), layers=4, batches=(1, 4, 16)))

The model is a twin with random weights on the CPU, all its layers on disk. Prompts are random, and the new tokens are
those that the model in memory picks, so that every way does the same work. Ways take turns (`toolkit.measure.turns`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch import nn

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.decoding import Text, greedy_text
from toolkit.measure.end_to_end import PASS_METHODS, above_limit
from toolkit.measure.model_passes import SLACK, contestants
from toolkit.measure.turns import measured, take_turns, timeline_of
from toolkit.models.workload import Workload
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.ways import Placed, all_ways
from toolkit.timeline.spans import Timeline

STAGES = ("read", "decode", "compute", "other")
TURN = ["method", "policy", "batch", "repetition", "mode", "disturbed", "measured_at"]
LIMITED = ("speedup", "speedup_low", "speedup_high", "byte_limit")


@dataclass(frozen=True)
class GenerationRace:
    """What to measure: a twin of `workload` with so many layers, and the texts that go through it, by each method.

    Each text has `prompt_tokens` tokens and gets `new_tokens` more; `batches` says how many texts run at once.
    `repetitions` is the number of turns. Raises `UserError` for numbers below their least.
    """

    workload: Workload
    layers: int
    methods: Sequence[str] = PASS_METHODS
    prompt_tokens: int = 128
    new_tokens: int = 32
    batches: Sequence[int] = (1, 4, 16)
    repetitions: int = 1

    def __post_init__(self):
        """Refuse numbers that make no sense."""
        if min(self.prompt_tokens, self.repetitions, *self.batches) < 1 or self.new_tokens < 2:
            raise UserError(
                f"prompt_tokens={self.prompt_tokens}, batches={list(self.batches)}, repetitions={self.repetitions}: "
                f"expected 1 or more of each; new_tokens={self.new_tokens}: expected 2 or more"
            )

    @property
    def ways(self) -> list[Placed]:
        """The methods, pipelined from disk, and Accelerate."""
        return [*((way, "storage") for way in all_ways(["pipelined"], "cpu", self.methods)), RIVAL]


def generation_measurements(race: GenerationRace, fresh: bool = False) -> pd.DataFrame:
    """A row for each way, batch and phase: "prompt", up to the first new token, and "generation", all later ones.

    Ways are the methods, pipelined from disk, and Accelerate for the smallest batch. Columns: seconds, of the prompt or
    of one step of the generation (median over the turns, low_s and high_s their ends); tokens_per_s, of all texts
    together; read_bytes of the prompt or a step, and bytes_a_token, the same over the tokens that it takes in; seconds
    in which a stage was busy (read_s, decode_s, compute_s, other_s). speedup is over dense weights, speedup_low and
    speedup_high its quartiles over the turns; byte_limit the bytes of dense weights over ours; fault, whether the
    speed-up is above that (`above_limit`). Raises `UserError` for unknown names, a disk too small, or a way whose
    logits are not those of the model in memory.
    """
    runs = _runs(race, fresh=fresh)
    return _summary(runs).assign(**asdict(race.workload), layers=race.layers, evidence="measured")


@measured
def _runs(race: GenerationRace) -> pd.DataFrame:
    """A row for each turn of each way, batch and phase."""

    def texts(model: nn.Module) -> list[Text]:
        return [_text(model, batch, race.prompt_tokens, race.new_tokens) for batch in sorted(race.batches)]

    with (
        scratch_folder(make_folder(paths.cache_dir())) as folder,
        contestants(race.workload, race.layers, race.ways, folder, texts) as racing,
    ):
        spans = take_turns(racing, race.repetitions, race.new_tokens)
    rows = []
    for turn, turn_spans in spans.groupby(TURN, sort=False):
        labels = dict(zip(TURN, turn, strict=True))
        is_prompt = turn_spans["token"] == 0
        sizes = {"prompt": (1, race.prompt_tokens), "generation": (race.new_tokens - 1, 1)}
        for phase, (passes, tokens) in sizes.items():
            window = timeline_of(turn_spans[is_prompt == (phase == "prompt")])
            rows.append(labels | {"phase": phase} | _numbers(window, passes, labels["batch"] * tokens))
    return pd.DataFrame(rows)


def _numbers(window: Timeline, passes: int, tokens: int) -> dict[str, float]:
    """What a window over some passes says of one of them, which takes in so many tokens."""
    seconds = window.total_s / passes
    read_bytes = sum(span.nbytes for span in window.spans if span.stage == "read") / passes
    busy = {f"{stage}_s": window.busy_s(stage) / passes for stage in STAGES}
    rates = {"tokens_per_s": tokens / seconds, "read_bytes": read_bytes, "bytes_a_token": read_bytes / tokens}
    return {"seconds": seconds} | rates | busy


def _text(model: nn.Module, batch: int, prompt_tokens: int, new_tokens: int) -> Text:
    """Random prompts, and the most likely tokens after them. Raises `UserError` for more than the model has places."""
    places = model.config.max_position_embeddings
    if prompt_tokens + new_tokens > places:
        raise UserError(f"{prompt_tokens} + {new_tokens} tokens: expected no more than the model's {places} positions")
    random = torch.Generator().manual_seed(batch)
    prompt = torch.randint(model.config.vocab_size, (batch, prompt_tokens), generator=random)
    return greedy_text(model, prompt, new_tokens, SLACK)


def _same_code(runs: pd.DataFrame) -> pd.DataFrame:
    """Turns of `endor_packed` count as `endor` wherever it decodes, too: a pass over more than a single token."""
    several = runs["phase"].eq("prompt") | runs["batch"].gt(1)
    decoded = runs["method"].eq("endor_packed") & several & runs["method"].eq("endor").any()
    return runs.assign(method=runs["method"].mask(decoded, "endor"))


def _summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Medians over the turns, and the speed-up over dense weights in the same turn."""
    runs = _same_code(runs)
    labels = ["method", "policy", "batch", "phase"]
    dense = runs[runs["method"] == "dense"].set_index(["repetition", "batch", "phase"])
    places = pd.MultiIndex.from_frame(runs[["repetition", "batch", "phase"]])
    beside = dense[["seconds", "read_bytes"]].reindex(places).to_numpy()
    runs = runs.assign(speedup=beside[:, 0] / runs["seconds"], byte_limit=beside[:, 1] / runs["read_bytes"])
    groups = runs.groupby(labels, sort=False)
    medians = groups.median(numeric_only=True).drop(columns="repetition")
    spread = {"low_s": groups["seconds"].min(), "high_s": groups["seconds"].max()}
    spread |= {"speedup_low": groups["speedup"].quantile(0.25), "speedup_high": groups["speedup"].quantile(0.75)}
    disturbed = groups["disturbed"].mean()
    medians = medians.assign(**spread, disturbed=disturbed, **groups[["mode", "measured_at"]].first()).reset_index()
    medians.loc[medians["method"] == ACCELERATE, "byte_limit"] = float("nan")
    return medians.assign(fault=above_limit(*(medians[name] for name in LIMITED)))


def generation_headline(table: pd.DataFrame) -> dict[str, str]:
    """What packing gains for prompts and later tokens, and where its gain is not above the turns' spread."""
    about = f" ({table['model'].iloc[0]}, {table['layers'].iloc[0]} layers, measured)."
    packed = table[~table["method"].isin(["dense", ACCELERATE])]
    sentences = [
        f"{words} comes {rows['speedup'].min():.2f} to {rows['speedup'].max():.2f} times as fast from packed weights "
        "as from dense ones"
        for phase, words in (("prompt", "the first token"), ("generation", "a later token"))
        if len(rows := packed[packed["phase"] == phase])
    ]
    gain = ", ".join(sentences)
    losing = [f"the {row.phase} of batch {row.batch}" for row in packed[packed["speedup_low"] <= 1].itertuples()]
    headline = {"gain": gain[0].upper() + gain[1:] + about} if gain else {}
    if losing:
        headline["negative"] = (
            f"Packing gains no more than the turns differ in {', '.join(dict.fromkeys(losing))}{about}"
        )
    return headline


def generation_words(table: pd.DataFrame) -> str:
    """Sentences about `generation_measurements`: each phase and batch, where packing pays, and faults."""
    parts = []
    for (phase, batch), rows in table.groupby(["phase", "batch"], sort=False):
        dense = rows[rows["method"] == "dense"].iloc[0]
        unit = "to the first token" if phase == "prompt" else "a step"
        others = rows[rows["method"] != "dense"]
        times = ", ".join(
            f"{row.method} {row.speedup:.2f} times as fast ({row.speedup_low:.2f} to {row.speedup_high:.2f})"
            for row in others.itertuples()
        )
        parts.append(f"{phase}, batch {batch}: dense {dense.seconds:.2f} s {unit}; {times}")
    packed = table[~table["method"].isin(["dense", ACCELERATE])]
    losing = packed[packed["speedup_low"] <= 1]
    names = [f"{row.method} in the {row.phase} of batch {row.batch}" for row in losing.itertuples()]
    faults = [f"{row.method} in the {row.phase} of batch {row.batch}" for row in table[table["fault"]].itertuples()]
    parts.append(f"packing does not pay for {', '.join(names)}" if names else "packing pays throughout")
    if faults:
        parts.append(f"faulty measurements, above their byte limit: {', '.join(faults)}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
