"""Prompts and batches through a model on disk: the time to the first token, and tokens a second after it.

    generation_measurements(GenerationRace(Workload("opt-1536"), layers=4, batches=(1, 4, 16)))

The model is a twin with random weights on the CPU, all its layers on disk. Prompts are random, and the new tokens are
those that the model in memory picks, so that every way does the same work. Ways take turns. Logits of every pass are
compared with those of the model in memory after the last one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.end_to_end import PASS_METHODS, above_limit
from toolkit.measure.llama_cpp import MODE
from toolkit.measure.repetitions import kept_spans
from toolkit.measure.turns import Turns, drop_store_pages, open_model, prepared
from toolkit.models.workload import Workload
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.ways import Placed, Way, all_ways
from toolkit.timeline.spans import Recorder, Timeline

PHASES = ("prompt", "generation")
STAGES = ("read", "decode", "compute", "other")


@dataclass(frozen=True)
class Text:
    """What goes through the model in one run, pass by pass, and the logits of the last token that each must give.

    The first input is the prompts, int64 [batch, prompt_tokens]; each later one is a new token of each, [batch, 1].
    """

    inputs: list[Tensor]
    expected: list[Tensor]

    @property
    def batch(self) -> int:
        """How many texts there are."""
        return len(self.inputs[0])


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


def generation_measurements(generation: GenerationRace, fresh: bool = False) -> pd.DataFrame:
    """A row for each way, batch and phase: "prompt", up to the first new token, and "generation", all later ones.

    Ways are the methods, pipelined from disk, and Accelerate for the smallest batch. Columns: seconds, of the prompt or
    of one step of the generation (median over the turns); tokens_per_s, of all texts together; read_bytes of the prompt
    or a step, and bytes_a_token, the same over the tokens that it takes in; seconds in which a stage was busy (read_s,
    decode_s, compute_s, other_s). speedup is over dense weights, low and high its quartiles over the turns; byte_limit
    the bytes of dense weights over ours; fault, whether the speed-up is above that (`above_limit`). Raises `UserError`
    for unknown names, a disk too small, or a way whose logits are not those of the model in memory.
    """
    sizes = {name: getattr(generation, name) for name in ("layers", "prompt_tokens", "new_tokens", "repetitions")}
    lists = {"methods": list(generation.methods), "batches": sorted(generation.batches)}
    key = asdict(generation.workload) | sizes | lists

    def measure() -> pd.DataFrame:
        with scratch_folder(make_folder(paths.cache_dir())) as place:
            return pd.DataFrame(_runs(generation, place))

    runs = kept_spans(key, ("toolkit.measure.generation",), measure, fresh)
    return _summary(runs).assign(**asdict(generation.workload), layers=generation.layers, evidence="measured")


def _runs(generation: GenerationRace, folder: Path) -> Iterator[dict]:
    """A row for each turn of each way, batch and phase."""
    texts: list[Text] = []

    def look(model: nn.Module) -> None:
        for batch in sorted(generation.batches):
            texts.append(_text(model, batch, generation.prompt_tokens, generation.new_tokens))

    with prepared(generation.workload, generation.layers, generation.ways, folder, look=look) as turns:
        for repetition in range(1, generation.repetitions + 1):
            for text in texts:
                for way, _ in generation.ways:
                    if way.method != ACCELERATE or text is texts[0]:
                        yield from _run(turns, way, text, repetition)


def _run(turns: Turns, way: Way, text: Text, repetition: int) -> Iterator[dict]:
    if way.method == ACCELERATE:
        rival = turns.accelerate
        instants, logits = _timed(rival.module, rival.recorder, text, rival.drop_pages)
        mode, timeline = MODE, rival.recorder.timeline()
    else:
        where = turns.maps[way, "storage"]
        with open_model(turns.store, way, where) as ours:

            def drop() -> None:
                if ours.mode != "direct":
                    drop_store_pages(turns.store, way.stored.format)

            instants, logits = _timed(ours.model, ours.recorder, text, drop)
        mode, timeline = ours.mode, ours.recorder.timeline()  # closed: every read has ended
    for found, expected in zip(logits, text.expected, strict=True):
        turns.check(way, found, expected)
    steps = len(text.inputs) - 1
    windows = (timeline.window(*instants[:2]), timeline.window(instants[1], instants[-1]))
    for phase, window, passes in zip(PHASES, windows, (1, steps), strict=True):
        tokens = text.batch * (text.inputs[0].shape[1] if phase == "prompt" else 1)
        labels = {"method": way.method, "policy": way.policy, "batch": text.batch, "phase": phase}
        yield labels | {"repetition": repetition, "mode": mode} | _numbers(window, passes, tokens)


def _numbers(window: Timeline, passes: int, tokens: int) -> dict[str, float]:
    """What a window over some passes says of one of them, which takes in so many tokens."""
    seconds = window.total_s / passes
    read_bytes = sum(span.nbytes for span in window.spans if span.stage == "read") / passes
    busy = {f"{stage}_s": window.busy_s(stage) / passes for stage in STAGES}
    rates = {"tokens_per_s": tokens / seconds, "read_bytes": read_bytes, "bytes_a_token": read_bytes / tokens}
    return {"seconds": seconds} | rates | busy


def _timed(
    model: nn.Module, recorder: Recorder, text: Text, drop: Callable[[], None]
) -> tuple[list[float], list[Tensor]]:
    """The instants between passes, one more than there are passes, and each pass's logits of the last token."""
    drop()
    instants, logits, past = [recorder.now_s()], [], None
    for tokens in text.inputs:
        if past is not None:
            drop()
        found, past = _step(model, tokens, past)
        logits.append(found)
        instants.append(recorder.now_s())
    return instants, logits


def _text(model: nn.Module, batch: int, prompt_tokens: int, new_tokens: int) -> Text:
    """Random prompts, and the most likely tokens after them. Raises `UserError` for more than the model has places."""
    places = model.config.max_position_embeddings
    if prompt_tokens + new_tokens > places:
        raise UserError(f"{prompt_tokens} + {new_tokens} tokens: expected no more than the model's {places} positions")
    random = torch.Generator().manual_seed(batch)
    inputs = [torch.randint(model.config.vocab_size, (batch, prompt_tokens), generator=random)]
    expected, past = [], None
    for _ in range(new_tokens):
        logits, past = _step(model, inputs[-1], past)
        expected.append(logits)
        inputs.append(logits.argmax(-1, keepdim=True))
    return Text(inputs[:-1], expected)


def _step(model: nn.Module, tokens: Tensor, past) -> tuple[Tensor, object]:
    with torch.no_grad():
        found = model(tokens, past_key_values=past, use_cache=True)
    return found.logits[:, -1], found.past_key_values


def _summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Medians over the turns, and the speed-up over dense weights in the same turn."""
    labels = ["method", "policy", "batch", "phase"]
    dense = runs[runs["method"] == "dense"].set_index(["repetition", "batch", "phase"])
    places = pd.MultiIndex.from_frame(runs[["repetition", "batch", "phase"]])
    beside = dense[["seconds", "read_bytes"]].reindex(places).to_numpy()
    runs = runs.assign(speedup=beside[:, 0] / runs["seconds"], byte_limit=beside[:, 1] / runs["read_bytes"])
    groups = runs.groupby(labels, sort=False)
    found = groups.median(numeric_only=True).drop(columns="repetition")
    spread = {"low": groups["speedup"].quantile(0.25), "high": groups["speedup"].quantile(0.75)}
    found = found.assign(**spread, **groups[["mode", "measured_at"]].first()).reset_index()
    found.loc[found["method"] == ACCELERATE, "byte_limit"] = float("nan")
    return found.assign(fault=above_limit(found["speedup"], found["low"], found["high"], found["byte_limit"]))


def generation_words(table: pd.DataFrame) -> str:
    """Sentences about `generation_measurements`: each phase and batch, where packing pays, and faults."""
    parts = []
    for (phase, batch), rows in table.groupby(["phase", "batch"], sort=False):
        dense = rows[rows["method"] == "dense"].iloc[0]
        unit = "to the first token" if phase == "prompt" else "a step"
        others = rows[rows["method"] != "dense"]
        times = ", ".join(f"{row.method} {row.speedup:.2f} times as fast" for row in others.itertuples())
        parts.append(f"{phase}, batch {batch}: dense {dense.seconds:.2f} s {unit}; {times}")
    packed = table[~table["method"].isin(["dense", ACCELERATE])]
    losing = packed[packed["speedup"] <= 1]
    names = [f"{row.method} in the {row.phase} of batch {row.batch}" for row in losing.itertuples()]
    faults = [f"{row.method} in the {row.phase} of batch {row.batch}" for row in table[table["fault"]].itertuples()]
    parts.append(f"packing does not pay for {', '.join(names)}" if names else "packing pays throughout")
    if faults:
        parts.append(f"faulty measurements, above their byte limit: {', '.join(faults)}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
