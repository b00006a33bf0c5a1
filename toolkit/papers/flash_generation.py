"""LLM in a flash: text from a model whose neurons come from disk (tables 3, 5 and 7 to 9, figure 8)."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit import sources
from toolkit.activations.thresholds import thresholded
from toolkit.cache import cached
from toolkit.evaluation.continuation import continuation_perplexity
from toolkit.evidence.claims import claims
from toolkit.machines.hardware import profile
from toolkit.measure.replay import Replay, replay_measurements
from toolkit.models.ffn import decoder_ffns
from toolkit.offload.budget import BudgetError
from toolkit.offload.model import OffloadedModel
from toolkit.offload.neuron_folder import neurons_needed
from toolkit.offload.speculative import speculate
from toolkit.papers.flash_io import measured_ways, modelled_reads
from toolkit.progress import progress
from toolkit.simulation.neuron_reads import Reads
from toolkit.storage.neuron_packing import pack_neurons
from toolkit.studies.predictors import PredictorVariant, predictors
from toolkit.studies.thresholded import ThresholdedModel, loaded, samples, thresholds, tokens_of, weights_key
from toolkit.timeline.spans import Timeline

FOLDER = "store"
FIRED = 0.33  # of the neurons that a predictor names, as in table 2's notebook
SAMPLING = {"greedy": {"do_sample": False}, "nucleus": {"do_sample": True, "top_p": 0.9}}
WAYS = {  # whether predictors tell what to read, and whether neurons stay; "speculative" checks guesses beside that
    "naive": (False, False),
    "hybrid": (False, True),
    "predictor": (True, False),
    "all": (True, True),
    "speculative": (True, True),
}


@dataclass(frozen=True)
class Generation:
    """How text is generated: the model and its predictors, the memory, and how much text.

    `memory_share` is the limit of all weights and buffers in memory, over the bytes of the dense model. A neuron stays
    for `window` tokens after its last use, if memory allows.
    """

    setting: ThresholdedModel
    variant: PredictorVariant
    memory_share: float
    window: int = 5
    prompt_tokens: int = 64
    new_tokens: int = 64

    @property
    def dram_bytes(self) -> int:
        """The limit in bytes."""
        return int(self.memory_share * model_bytes(self.setting))

    @property
    def prompt(self) -> Int64[Tensor, "1 tokens"]:
        """The beginning of the evaluation text."""
        return tokens_of(self.setting, "evaluation")[None, : self.prompt_tokens]

    def open(self, way: str) -> OffloadedModel:
        """The model from disk, by one of `WAYS`. Raises `UserError` for a limit below one token's neurons."""
        predicts, keeps = WAYS[way]
        layers = len(decoder_ffns(loaded(self.setting.model)[0]))
        found = predictors(self.setting, self.variant) if predicts else [None] * layers
        folder = bundle_folder(self.setting, self.variant)
        window = self.window if keeps else 0
        return OffloadedModel.open(folder, predictors=found, dram_bytes=self.dram_bytes, window=window, verify=False)


def model_bytes(setting: ThresholdedModel) -> int:
    """Bytes of the dense model."""
    return sum(parameter.nbytes for parameter in loaded(setting.model)[0].parameters())


def bundle_folder(setting: ThresholdedModel, variant: PredictorVariant) -> Path:
    """The model by neuron, with the setting's thresholds; made once and kept."""

    def make(folder: Path) -> None:
        model, tokenizer, _ = loaded(setting.model)
        seen, found = samples(setting, "limits"), predictors(setting, variant)
        needs = neurons_needed(seen, found)
        pack_neurons(model, folder / FOLDER, setting.model, tokenizer, thresholds(setting).tolist(), needs)

    code = sources.dependencies("toolkit.storage.neuron_packing", without=("toolkit.models.loading",))
    return cached("neurons", asdict(setting) | weights_key(setting) | asdict(variant), code, make) / FOLDER


def end_to_end(generation: Generation, ways: Sequence[str] = tuple(WAYS), repetitions: int = 3) -> pd.DataFrame:
    """A row a way: the time of a token and its parts, medians over the turns that the ways take.

    Columns: way, io_ms (reads), memory_ms (bookkeeping and copies beside reads), compute_ms (all the rest, predictors
    among it), total_ms, low and high (quartiles of the total over the turns), predictor_ms (a part of compute),
    mb_a_token (read), neurons_held (share at the end), dram_mb, speedup over naive in the same turn, acceptance and
    tokens_a_pass of the speculative way, memory_share, evidence. Raises what `Generation.open` raises.
    """
    rows = []
    with progress("generating", len(ways) * repetitions, "runs") as bar:
        for turn in range(repetitions):
            for way in ways:
                rows.append(_run(generation, way) | {"way": way, "turn": turn})
                bar.update()
    runs = pd.DataFrame(rows)
    naive = runs[runs["way"] == "naive"].set_index("turn")["total_ms"]
    runs["speedup"] = runs["turn"].map(naive) / runs["total_ms"]
    groups = runs.groupby("way", sort=False)
    spread = {"low": groups["total_ms"].quantile(0.25), "high": groups["total_ms"].quantile(0.75)}
    found = groups.median(numeric_only=True).drop(columns="turn").assign(**spread).reset_index()
    return found.assign(model=generation.setting.model, memory_share=generation.memory_share, evidence="measured")


def _run(generation: Generation, way: str) -> dict[str, float]:
    with generation.open(way) as model, torch.no_grad():
        greedy = {"max_new_tokens": generation.new_tokens, **SAMPLING["greedy"], "pad_token_id": 0}
        if way == "speculative":
            speculate(model, generation.prompt, 2)  # compiles what is not compiled
            clock = _Clock(model)
            clock.put(None)
            found = speculate(model, generation.prompt, generation.new_tokens)
            clock.put(None)
            times = token_times(model.timeline, _after_prompt(model.timeline, clock.instants))
            tokens = found.passes + found.accepted
            more = {"acceptance": found.acceptance, "tokens_a_pass": tokens / found.passes}
        else:
            model.generate(generation.prompt, **greedy | {"max_new_tokens": 2})
            clock = _Clock(model)
            model.generate(generation.prompt, streamer=clock, **greedy)
            times = token_times(model.timeline, clock.instants[1:])
            tokens, more = len(times), {}
        each = times[["io_ms", "memory_ms", "compute_ms", "total_ms", "predictor_ms", "mb"]].sum() / tokens
        stores = [ffn.store for ffn in model.strategy.ffns]
        held = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
        more |= {"neurons_held": held, "dram_mb": model.budgets["dram"].used_bytes / 1e6}
        return each.rename({"mb": "mb_a_token"}).to_dict() | more


class _Clock:
    """Takes the time at each token, as a streamer of `generate`: at the prompt's, too."""

    def __init__(self, model: OffloadedModel):
        self.recorder, self.instants = model.recorder, []

    def put(self, _: object) -> None:
        self.instants.append(self.recorder.now_s())

    def end(self) -> None:
        pass


def _after_prompt(timeline: Timeline, instants: Sequence[float]) -> list[float]:
    """The end of the first pass over all layers since the first instant, and the last instant."""
    last = max(span.layer for span in timeline.spans if span.layer is not None)
    ends = (s.end_s for s in timeline.spans if s.layer == last and s.op == "ffn" and s.start_s > instants[0])
    return [next(iter(sorted(ends))), instants[-1]]


def token_times(timeline: Timeline, instants: Sequence[float]) -> pd.DataFrame:
    """A row for each stretch between two instants, of one token as a rule: milliseconds of each part, and MB read.

    Columns: token, io_ms, memory_ms, predictor_ms, compute_ms, total_ms, mb.
    """
    spans = timeline.table()
    spans["token"] = np.searchsorted(instants, spans["start_s"], side="right") - 1
    spans = spans[spans["token"].between(0, len(instants) - 2)]
    parts = spans["stage"].mask(spans["op"] == "predictor", "predictor")
    sums = spans.groupby(["token", parts])["seconds"].sum().unstack(fill_value=0.0)
    sums = 1e3 * sums.reindex(range(len(instants) - 1), columns=["read", "manage", "predictor"], fill_value=0.0)
    read = spans[spans["stage"] == "read"].groupby("token")["nbytes"].sum().reindex(sums.index, fill_value=0)
    total = 1e3 * np.diff(instants)
    return pd.DataFrame(
        {
            "token": sums.index,
            "io_ms": sums["read"],
            "memory_ms": sums["manage"],
            "predictor_ms": sums["predictor"],
            "compute_ms": total - sums["read"] - sums["manage"],
            "total_ms": total,
            "mb": read / 1e6,
        }
    ).reset_index(drop=True)


def long_generation(generation: Generation, seed: int = 0) -> pd.DataFrame:
    """`token_times` of one long text, greedy and by nucleus sampling, with the columns sampling and evidence more.

    The text goes on after a token that would end it.
    """
    tables = []
    for name, settings in SAMPLING.items():
        torch.manual_seed(seed)
        with generation.open("all") as model:
            clock = _Clock(model)
            count = {"max_new_tokens": generation.new_tokens, "min_new_tokens": generation.new_tokens}
            model.generate(generation.prompt, streamer=clock, pad_token_id=0, **count, **settings)
            tables.append(token_times(model.timeline, clock.instants[1:]).assign(sampling=name))
    return pd.concat(tables, ignore_index=True).assign(evidence="measured")


def side_by_side(generation: Generation, prompts: Sequence[str]) -> pd.DataFrame:
    """Greedy texts after each prompt: of the dense model, with thresholds, and with predictors from disk.

    Columns: prompt, way, text, tokens (of the text), same_words (of the dense text, up to the first that differs),
    dense_perplexity (of the text after the prompt, as the dense model reads it), evidence.
    """
    model, tokenizer, _ = loaded(generation.setting.model)
    rows = []
    with generation.open("all") as ours, progress("generating", 3 * len(prompts), "texts") as bar:
        for prompt in prompts:
            given = tokenizer(prompt, return_tensors="pt")
            length, made = given["input_ids"].shape[1], {}
            for way, make in _texts(generation, model, ours):
                made[way] = make(**given, max_new_tokens=generation.new_tokens, do_sample=False, pad_token_id=0)[0]
                bar.update()
            rows += _compared(prompt, length, made, model, tokenizer)  # without the thresholds that `_texts` sets
    return pd.DataFrame(rows).assign(evidence="measured")


def _compared(prompt: str, length: int, made: dict[str, Tensor], model, tokenizer) -> Iterator[dict]:
    """A row for each way's text, of the tokens behind the first `length`."""
    texts = {way: tokenizer.decode(tokens[length:], skip_special_tokens=True) for way, tokens in made.items()}
    for way, text in texts.items():
        yield {
            "prompt": prompt,
            "way": way,
            "text": text,
            "tokens": len(made[way]) - length,
            "same_words": _same_words(text, texts["dense"]),
            "dense_perplexity": continuation_perplexity(model, made[way], length),
        }


def _texts(generation: Generation, model, ours: OffloadedModel) -> Iterator[tuple[str, object]]:
    limits = thresholds(generation.setting)
    for way, context in {"dense": nullcontext(), "thresholds": thresholded(model, limits)}.items():
        with context, torch.no_grad():
            yield way, model.generate
    yield "thresholds and predictors, from disk", ours.generate


def _same_words(text: str, other: str) -> int:
    pairs = list(zip(text.split(), other.split(), strict=False))
    return next((number for number, (one, two) in enumerate(pairs) if one != two), len(pairs))


def least_share(generation: Generation) -> float:
    """The smallest share of the model's bytes that holds what stays in memory and one token's neurons."""
    whole = model_bytes(generation.setting)
    try:
        replace(generation, memory_share=1 / whole).open("all").close()
    except BudgetError as error:
        return error.needed_bytes / whole
    return 0.0


def twin(model: str, layers: int, tokens: int, paper_model: str, paper_layers: int, machine: str) -> pd.DataFrame:
    """Tokens of a paper's size: measured here on so many layers with random weights, and their reads modelled there.

    Columns as in `end_to_end`, and those of `toolkit.papers.flash_io.measured_ways`; the replay is that of table 2.
    """
    measured = measured_ways(replay_measurements(Replay(model, layers, fired=FIRED, tokens=tokens)))
    theirs = modelled_reads(profile(machine), Reads(paper_model, paper_layers))
    return pd.concat([theirs, measured.rename(columns={"manage_ms": "memory_ms"})], ignore_index=True)


def published() -> pd.DataFrame:
    """Table 3 of the paper: a row a model, machine and way, with the columns io_ms, memory_ms, compute_ms, total_ms."""
    found = claims("flash")
    found = found[found["id"].str.match(r"tab03-(?!repeated).*-(io|memory|compute|total)$")]
    part = found["id"].str.rpartition("-")[2] + "_ms"
    table = found.assign(part=part).pivot_table(index="conditions", columns="part", values="value", sort=False)
    names = table.index.to_series().str.split(", ", expand=True).set_axis(["model", "machine", "way"], axis=1)
    return names.join(table).reset_index(drop=True).assign(evidence="published")
