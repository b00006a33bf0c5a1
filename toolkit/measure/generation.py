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
from toolkit.measure.end_to_end import PASS_METHODS
from toolkit.measure.model_passes import SLACK, contestants
from toolkit.measure.summary import by_turn, summary, times_as_fast
from toolkit.measure.turns import measured, take_turns
from toolkit.models.workload import Workload
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.ways import Placed, all_ways

LABELS = ["method", "policy", "batch", "phase"]
DENSE = {"method": "dense"}


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
    of one step of the generation; tokens_per_s, of all texts together; read_bytes of the prompt or a step, and
    bytes_a_token, the same over the tokens that it takes in; seconds in which a stage was busy (read_s, decode_s,
    compute_s, other_s). speedup is over dense weights; byte_limit the bytes of dense weights over ours; fault, whether
    the speed-up is above that in every turn. seconds and speedup have their ranges (`summary`). Raises `UserError` for
    unknown names, a disk too small, or a way whose logits are not those of the model in memory.
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
    is_prompt = spans["token"] == 0
    taken_in = {"prompt": race.prompt_tokens, "generation": 1}
    tables = []
    for phase, rows in (("prompt", spans[is_prompt]), ("generation", spans[~is_prompt])):
        turns = by_turn(rows, LABELS[:-1])
        tokens = turns["batch"] * taken_in[phase]
        rates = {"tokens_per_s": tokens / turns["seconds"], "bytes_a_token": turns["read_bytes"] / tokens}
        tables.append(turns.assign(phase=phase, **rates))
    columns = ["repetition", "mode", "disturbed", "measured_at", "seconds", "tokens_per_s", "read_bytes"]
    columns += ["bytes_a_token", *(f"{stage}_s" for stage in ("read", "decode", "compute", "other"))]
    return pd.concat(tables, ignore_index=True)[[*LABELS, *columns]]


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
    runs = runs.assign(byte_limit=times_as_fast(runs, LABELS, DENSE, "read_bytes"))
    table = summary(runs, LABELS, over={"speedup": DENSE})
    table.loc[table["method"] == ACCELERATE, "byte_limit"] = float("nan")
    return table.assign(fault=table["speedup_low"] > table["byte_limit"])


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
