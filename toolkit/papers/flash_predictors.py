"""LLM in a flash: predictors of active neurons (sections 3.1, B and C), as its notebooks train and compare them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from toolkit import sources
from toolkit.activations import Magnitudes, thresholds_of
from toolkit.activations.thresholds import CRITERIA
from toolkit.cache import cached, cached_table
from toolkit.errors import unknown
from toolkit.evaluation import evaluate_tasks, perplexity
from toolkit.models import fast_dtype, load_model
from toolkit.models.activation import activation_name
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.predictors import (
    COPIED,
    Oracle,
    Predictor,
    Predictors,
    Samples,
    copied,
    predicted,
    quality,
    train,
    with_limits,
)
from toolkit.pruning.pruned import weights_sha256
from toolkit.simulation.replay import replay, units_of
from toolkit.text import load_tokens

SAMPLED_WINDOWS = 2  # on which limits are chosen (of calibration text) and predictions are counted (of evaluation text)
FILE = "predictors.safetensors"


@dataclass(frozen=True)
class Setting:
    """A model with thresholds on its activations, and the text that these and its predictors are fitted on."""

    model: str = "smollm2-135m"
    corpus: str = "wiki-slice"
    zeros: float = 0.8
    """Share of the outputs that each layer's threshold sets to zero; a model with thresholds of its own keeps them."""
    windows: int = 8
    """Of calibration text."""
    sequence_length: int = 512
    """Tokens a window, of calibration and evaluation."""
    criterion: str = "output"
    """What thresholds look at: a key of `toolkit.activations.thresholds.CRITERIA`."""


@dataclass(frozen=True)
class Variant:
    """A kind of predictor and how its limits are chosen.

    `kind` is "none" (thresholds alone), "low_rank", "gate" or "few_bits". `ranks` are a low-rank predictor's in the
    first layers and in the last `sensitive` ones; it predicts where the sigmoid of the score exceeds `sigmoid`. The
    others predict where the score exceeds the layer's threshold. If `kept` is given, limits are chosen instead so that
    they keep this share of the magnitudes on calibration text. With `cut`, a predicted neuron counts only if it exceeds
    the threshold; without, all that is loaded counts, which costs no byte.
    """

    kind: str = "none"
    ranks: tuple[int, int] = (0, 0)
    sensitive: int = 0
    sigmoid: float = 0.5
    kept: float | None = None
    cut: bool = True

    @property
    def label(self) -> str:
        """In tables and figures."""
        ranks = "-".join(map(str, dict.fromkeys(self.ranks))) if self.kind == "low_rank" else ""
        kept = "" if self.kept is None else f"keeps {self.kept:.0%}".replace("%", " %")
        limit = f"above {self.sigmoid:g}" if self.kind == "low_rank" and not kept else ""
        used = "" if self.cut else "all used"
        return " ".join(filter(None, [self.kind.replace("_", " "), ranks, limit or kept, used]))

    @property
    def named_once(self) -> "Variant":
        """The same variant as the cache names it: where all layers have one rank, no layer is a sensitive one."""
        alike = self.sensitive == 0 or self.ranks[0] == self.ranks[1]
        return replace(self, ranks=(self.ranks[0],) * 2, sensitive=0) if alike else self

    @property
    def predictor(self) -> "Variant":
        """The variant that predicts alike, whatever counts of what it predicts."""
        return replace(self.named_once, cut=True)


ALONE = Variant()  # thresholds without a predictor, as if an oracle told which neurons to load


@cache
def loaded(name: str) -> tuple[nn.Module, object, str]:
    """A model, its tokenizer and the checksum of its weights; loaded once."""
    model, tokenizer = load_model(name, fast_dtype())
    return model, tokenizer, weights_sha256(model)


def tokens_of(setting: Setting, split: str) -> Tensor:
    """The token ids of a split of the setting's text."""
    return _tokens(setting.corpus, setting.model, split)


@cache  # many tables of a notebook need them
def _tokens(corpus: str, model: str, split: str) -> Tensor:
    return load_tokens(corpus, loaded(model)[1], split)


def thresholds(setting: Setting) -> Float32[Tensor, " layers"]:
    """The threshold of each layer, kept; those of the model itself, if it has any, and 0 if no zeros are asked for."""
    own = thresholds_of(loaded(setting.model)[0])
    if own is not None:
        return own
    if setting.zeros == 0:
        return torch.zeros(len(decoder_ffns(loaded(setting.model)[0])))

    def measure() -> pd.DataFrame:
        model, tokens = loaded(setting.model)[0], tokens_of(setting, "calibration")
        sizes = Magnitudes.measure(model, tokens, setting.windows, setting.sequence_length, setting.criterion)
        return pd.DataFrame({"threshold": sizes.thresholds(setting.zeros).double()})

    code = sources.dependencies("toolkit.activations.thresholds", without=("toolkit.models.loading",))
    table = cached_table("thresholds", key_of(setting), code, measure)
    return torch.tensor(table["threshold"].to_numpy(), dtype=torch.float32)


def samples(setting: Setting, part: str) -> Samples:
    """What the thresholded model's FFNs see of a part of the text.

    "training" is what the thresholds are fitted on; "limits" lies behind it; "evaluation" is other text.
    """
    windows = setting.windows if part == "training" else SAMPLED_WINDOWS
    tokens = tokens_of(setting, "evaluation" if part == "evaluation" else "calibration")
    if part == "limits":
        tokens = tokens[setting.windows * setting.sequence_length :]
    model, limits, length = loaded(setting.model)[0], thresholds(setting), setting.sequence_length
    return Samples.record(model, limits, tokens, windows, length, setting.criterion)


_few = cache(samples)  # of the parts that several predictors are held against


def predictors(setting: Setting, variant: Variant) -> Predictors:
    """The predictors of a variant. Low-rank ones are trained once and kept.

    Raises `UserError` for an unknown kind, "none", or ranks that the model does not have.
    """
    return _predictors(setting, variant.predictor)


@cache
def _predictors(setting: Setting, variant: Variant) -> Predictors:
    found = _without_limits(setting, replace(variant, kept=None))
    if variant.kept is not None:
        found = with_limits(found, _few(setting, "limits"), variant.kept)
    return Predictors(setting.model, tuple(found))


@cache
def _without_limits(setting: Setting, variant: Variant) -> Sequence[Predictor]:
    limits = thresholds(setting).tolist()
    if variant.kind == "low_rank":
        return _low_rank(setting, variant, len(limits))
    if variant.kind not in COPIED:
        raise unknown("predictor", variant.kind, ["low_rank", *COPIED])
    return copied(variant.kind, loaded(setting.model)[0], limits)


def _low_rank(setting: Setting, variant: Variant, layers: int) -> list[Predictor]:
    """Low-rank predictors: those of the last layers may have a rank of their own."""
    first, last = variant.ranks
    found = list(_trained(setting, first, (0, layers)))
    if variant.sensitive and last != first:
        start = layers - variant.sensitive
        found[start:] = _trained(setting, last, (start, layers))
    return [predictor.at(math.log(variant.sigmoid / (1 - variant.sigmoid))) for predictor in found]


def _trained(setting: Setting, rank: int, layers: tuple[int, int]) -> Predictors:
    """The predictors of some layers, trained once and kept."""

    def make(folder: Path) -> None:
        seen = _of_last_layers if layers[0] else _of_layers
        Predictors(setting.model, tuple(train(seen(setting, layers), rank))).save(folder / FILE)

    code = sources.dependencies("toolkit.predictors.training", without=("toolkit.models.loading",))
    folder = cached("predictors", key_of(setting) | {"rank": rank, "layers": layers}, code, make)
    return Predictors.load(folder / FILE, setting.model)


def _of_layers(setting: Setting, layers: tuple[int, int]) -> Samples:
    return samples(setting, "training").of_layers(slice(*layers))


# the last layers are trained at several ranks; samples of all layers take too much memory to stay
_of_last_layers = lru_cache(maxsize=1)(_of_layers)


def compare_predictors(
    setting: Setting, variants: Sequence[Variant], evaluation_windows: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What each variant predicts in each layer, and what it costs in perplexity; kept, a variant by itself.

    The first table is `quality` on evaluation text with the columns `_labels` more. The second has a row a variant:
    those labels; resident_share and read_share (bytes of the predictors, and of the neurons that a token needs, over
    those of the FFNs); means over layers of active, predicted, recall, precision, false_negatives, false_positives and
    kept; perplexity, sequence_length, windows; over_thresholds (its ratio to the perplexity with thresholds alone, less
    1) and standard_error (of that ratio's logarithm, over windows). Raises what `predictors` raises.
    """
    wanted = list(dict.fromkeys((ALONE, *variants)))
    layers = {variant: _by_layer(setting, variant.predictor) for variant in wanted}
    losses = {variant: _window_nll(setting, variant, evaluation_windows) for variant in wanted}
    tables = [rows.assign(**_labels(setting, variant)) for variant, rows in layers.items()]
    ffns = decoder_ffns(loaded(setting.model)[0])
    whole = [
        _bytes(ffns, variant, layers[variant])
        | layers[variant][MEANS].mean().to_dict()
        | _cost(losses[variant], losses[ALONE])
        | _labels(setting, variant)
        for variant in variants
    ]
    more = {"sequence_length": setting.sequence_length, "evidence": "measured"}
    return pd.concat(tables, ignore_index=True).assign(**more), pd.DataFrame(whole).assign(**more)


def _cost(nll: np.ndarray, alone: np.ndarray) -> dict[str, float]:
    """What `compare_predictors` says of the perplexity of a variant, from losses by window."""
    spread = (nll - alone).std(ddof=1) / np.sqrt(len(nll)) if len(nll) > 1 else np.nan
    cost = {"perplexity": np.exp(nll.mean()), "over_thresholds": np.exp((nll - alone).mean()) - 1}
    return cost | {"standard_error": spread, "windows": len(nll)}


MEANS = ["active", "predicted", "recall", "precision", "false_negatives", "false_positives", "kept"]


def _labels(setting: Setting, variant: Variant) -> dict:
    named = {"model": setting.model, "zeros": setting.zeros, "criterion": setting.criterion, "label": variant.label}
    ranks = {"rank": variant.ranks[0], "sensitive_rank": variant.ranks[1]}
    return named | ranks | {"kind": variant.kind, "sigmoid": variant.sigmoid, "cut": variant.cut}


def _window_nll(setting: Setting, variant: Variant, windows: int) -> np.ndarray:
    """The loss of each evaluation window, in nats a token, with a variant in place; kept."""

    def measure() -> pd.DataFrame:
        model, tokens = loaded(setting.model)[0], tokens_of(setting, "evaluation")
        with _in_place(setting, variant):
            return pd.DataFrame({"nll": perplexity(model, tokens, setting.sequence_length, windows).window_nll})

    key = key_of(setting) | asdict(variant.named_once) | {"evaluation_windows": windows}
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))
    return cached_table("window_nll", key, code, measure)["nll"].to_numpy()


def _by_layer(setting: Setting, variant: Variant) -> pd.DataFrame:
    """What the predictors of a variant say of some evaluation text, a row for each layer, as `quality` has it; kept."""

    def measure() -> pd.DataFrame:
        rows = quality(_found(setting, variant), _few(setting, "evaluation"))
        oracle = {"predicted": rows["active"], "precision": 1.0, "false_positives": 0.0}
        return rows.assign(**oracle if variant == ALONE else {})

    code = sources.dependencies(__name__, without=("toolkit.models.loading",))
    return cached_table("predictions", key_of(setting) | asdict(variant), code, measure)


def compare_accuracy(
    setting: Setting, variants: Sequence[Variant], tasks: Sequence[str], task_limit: int | None
) -> pd.DataFrame:
    """Zero-shot accuracy of the dense model, with thresholds alone and with predictors; kept, a variant by itself.

    Columns: `_labels` (the dense model's label is "dense"), those of `evaluate_tasks`, and evidence. Raises what
    `predictors` and `evaluate_tasks` raise.
    """
    dense = replace(setting, zeros=0.0)
    chosen = [(dense, ALONE, "dense"), *((setting, variant, variant.label) for variant in (ALONE, *variants))]
    tables = []
    for of, variant, label in chosen:
        rows = _accuracy(of, variant, tasks, task_limit)
        tables.append(rows.assign(**_labels(of, variant) | {"label": label}))
    return pd.concat(tables, ignore_index=True).assign(evidence="measured")


def _accuracy(setting: Setting, variant: Variant, tasks: Sequence[str], task_limit: int | None) -> pd.DataFrame:
    def measure() -> pd.DataFrame:
        model, tokenizer, _ = loaded(setting.model)
        with _in_place(setting, variant):
            return evaluate_tasks(model, tokenizer, list(tasks), limit=task_limit)

    key = key_of(setting) | asdict(variant.named_once) | {"tasks": list(tasks), "task_limit": task_limit}
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))
    return cached_table("predicted_tasks", key, code, measure)


def _found(setting: Setting, variant: Variant) -> Sequence[Predictor | None]:
    """The predictors, or none at all for `ALONE`."""
    return [None] * len(thresholds(setting)) if variant == ALONE else predictors(setting, variant)


def _in_place(setting: Setting, variant: Variant):
    """The model with a variant's thresholds and predictors in place, as a block."""
    limits = thresholds(setting)
    used = limits if variant.cut else torch.full_like(limits, -1)
    return predicted(loaded(setting.model)[0], used, _found(setting, variant), setting.criterion)


def _bytes(ffns: Sequence[FFN], variant: Variant, by_layer: pd.DataFrame) -> dict[str, float]:
    """Bytes over those of the FFNs: what predictors keep in memory, and what a token reads. A gate kept is not read."""
    whole = sum(ffn_bytes(ffn) for ffn in ffns)
    gates = sum(ffn.gate.weight.nbytes for ffn in ffns) if variant.kind == "gate" else 0
    read = by_layer["predicted"].mean() * (1 - gates / whole)
    return {"resident_share": by_layer["nbytes"].sum() / whole, "read_share": read}


def ffn_bytes(ffn: FFN) -> int:
    """Bytes of an FFN's weights."""
    return sum(linear.weight.nbytes for linear in (ffn.gate, ffn.up, ffn.down) if linear)


def key_of(setting: Setting) -> dict:
    """What an artefact of a setting depends on, for the cache."""
    return asdict(setting) | {"weights_sha256": loaded(setting.model)[2], "dtype": str(fast_dtype())}


def paper_shares() -> pd.DataFrame:
    """What the paper's own predictors weigh beside their models, from shapes and ranks (B.3, C.1, C.2).

    Rows with quantity, model, value (percent) and evidence "modelled".
    """
    rows = []
    for model, ranks, hidden, ffn, others in PAPER_RANKS:
        weights = sum(layers * rank for layers, rank in ranks) * (hidden + ffn)
        rows.append({"quantity": "predictors' share of the weights", "model": model, "value": 100 * weights / others})
    return pd.DataFrame(rows).assign(evidence="modelled")


# (layers, rank) of the predictors, width and FFN, and the weights that they are set beside: of OPT all outside the
# embeddings (attention and FFN), of Falcon all of the model, with one key and one value head of 64
PAPER_RANKS = (
    ("opt-6.7b", ((28, 128), (4, 1024)), 4096, 16384, 32 * (4 * 4096**2 + 2 * 4096 * 16384)),
    ("falcon-7b", ((28, 256), (4, 1152)), 4544, 18176, 65024 * 4544 + 32 * (2 * 4544 + 128 + 2 * 18176) * 4544),
)


def outputs_by_prediction(setting: Setting, variant: Variant, layer: int, bins: int = 60) -> pd.DataFrame:
    """How large the outputs of a layer's neurons are, where they are predicted and where not; kept.

    Columns: label, layer, magnitude (middle of a bin, over the threshold), predicted, share (of all tokens' neurons).
    """

    def measure() -> pd.DataFrame:
        model, limit = loaded(setting.model)[0], thresholds(setting)[layer].item()
        x, predictor = _few(setting, "evaluation").inputs[layer], predictors(setting, variant)[layer]
        outputs = Oracle(limit, decoder_ffns(model)[layer], activation_name(model)).scores(x) / limit
        mask = predictor.scores(x) > predictor.limit
        edges = np.geomspace(0.01, 10, bins + 1)
        tables = []
        for predicted_ in (True, False):
            counts, _ = np.histogram(outputs[mask == predicted_].clamp(edges[0], edges[-1]).numpy(), edges)
            columns = {"magnitude": np.sqrt(edges[1:] * edges[:-1]), "share": counts / mask.numel()}
            tables.append(pd.DataFrame(columns).assign(predicted=predicted_))
        return pd.concat(tables, ignore_index=True).assign(label=variant.label, layer=layer)

    key = key_of(setting) | asdict(variant) | {"layer": layer, "bins": bins}
    return cached_table("outputs", key, sources.dependencies(__name__, without=("toolkit.models.loading",)), measure)


def cached_rows(setting: Setting, variant: Variant, window: int, tokens: int) -> pd.DataFrame:
    """How many neurons of each layer are in memory after each token of a text (figure 9d); kept.

    A neuron stays as long as one of the last `window` tokens was predicted to need it. Columns: label, layer, token,
    held (share of the layer's neurons), loaded (the same of those that this token brought).
    """

    def measure() -> pd.DataFrame:
        seen, found = _few(setting, "evaluation"), predictors(setting, variant)
        tables = []
        for layer, predictor in enumerate(found):
            mask = (predictor.scores(seen.inputs[layer][:tokens]) > predictor.limit).numpy()
            steps = replay(units_of(mask), SlidingWindow(mask.shape[1], window))
            shares = steps[["loaded", "held"]] / mask.shape[1]
            tables.append(shares.assign(token=range(len(mask)), layer=layer))
        return pd.concat(tables, ignore_index=True).assign(label=variant.label)

    key = key_of(setting) | asdict(variant) | {"window": window, "tokens": tokens}
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))
    return cached_table("cached_rows", key, code, measure)


def compare_criteria(setting: Setting, evaluation_windows: int) -> pd.DataFrame:
    """Perplexity dense, and with as many zeros by each criterion of thresholds; kept.

    Columns: label ("dense" or the criterion), zeros, perplexity, sequence_length, windows, evidence.
    """
    rows = []
    for label in ("dense", *CRITERIA):
        chosen = replace(setting, criterion=label) if label in CRITERIA else replace(setting, zeros=0.0)
        found = _window_nll(chosen, ALONE, evaluation_windows)
        rows.append({"label": label, "zeros": chosen.zeros, "perplexity": np.exp(found.mean()), "windows": len(found)})
    return pd.DataFrame(rows).assign(sequence_length=setting.sequence_length, evidence="measured")
