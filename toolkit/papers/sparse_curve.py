"""What fewer neurons cost and save beside fewer bits: tables, figure and sentences of `beyond/sparse_curve`.

Bytes are those of a token's FFN weights: of the neurons that are active, as bundles in fp16 on whole blocks of the
disk, or of all neurons in fewer bits.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import pandas as pd
import seaborn as sns
import torch
from jaxtyping import Float64, Int64
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor, nn

from toolkit import sources
from toolkit.activations import Magnitudes, thresholded, thresholds_of
from toolkit.activations.relu import fatrelu, gate_limits
from toolkit.activations.sensitivity import fisher_losses
from toolkit.activations.thresholds import watched
from toolkit.cache import cached_table
from toolkit.errors import unknown
from toolkit.evaluation import perplexity
from toolkit.models import MODELS, fast_dtype, load_model
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.predictors import FewBits, predicted
from toolkit.pruning.calibration import Calibration
from toolkit.pruning.pruned import weights_sha256
from toolkit.recovery.shares import LEVELS, check_range, shares_of
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.studies.variants import EvaluationSettings
from toolkit.text import load_tokens

FITTED_ON = Calibration(windows=8, sequence_length=256)
HALF_BYTES = 2
BEYOND = 10  # times the dense model's perplexity: what is worse is shown at the edge of the figure
EDGE = 0.96  # of the axis
TICKS = (1, 1.5, 2, 3, 4, 5, 7)  # of each power of ten
RECOVERED, RECOVERED_RELU = "recovered by distillation", "ReLU for SiLU, recovered by distillation"
FEW_BITS = "fewer bits, all neurons"


@dataclass(frozen=True, eq=False)
class Fitted:
    """A dense model and the windows that thresholds are fitted on; what several ways need is measured once."""

    model: nn.Module
    windows: Int64[Tensor, "windows tokens"]

    @cached_property
    def sizes(self) -> Magnitudes:
        """Magnitudes of the neurons' outputs."""
        return Magnitudes.measure(self.model, self.windows.flatten(), *self.windows.shape)

    @cached_property
    def losses(self) -> Float64[Tensor, "layers levels"]:
        """What zeros cost each layer, foretold."""
        return fisher_losses(self.model, self.sizes, self.windows, LEVELS)


@contextmanager
def _even(dense: Fitted, zeros: float) -> Iterator[None]:
    with thresholded(dense.model, dense.sizes.thresholds(zeros)):
        yield


@contextmanager
def _shared_out(dense: Fitted, zeros: float) -> Iterator[None]:
    check_range([zeros])
    (by_layer,) = shares_of(dense.losses, [zeros])
    with thresholded(dense.model, dense.sizes.thresholds(by_layer)):
        yield


@contextmanager
def _predicted(dense: Fitted, zeros: float) -> Iterator[None]:
    """What the predictor loads, counts: neurons below the threshold, too."""
    limits = dense.sizes.thresholds(zeros)
    with predicted(dense.model, torch.zeros_like(limits), FewBits.fit(dense.model, limits.tolist())):
        yield


@contextmanager
def _fatrelu(dense: Fitted, zeros: float) -> Iterator[None]:
    with fatrelu(dense.model, gate_limits(dense.model, dense.windows, zeros)):
        yield


# how a dense model gets zeros without training
WAYS = {
    "threshold": _even,
    "threshold, by sensitivity": _shared_out,
    "threshold, few-bit predictor": _predicted,
    "FATReLU for SiLU, untrained": _fatrelu,
}


def dense_model(settings: EvaluationSettings) -> tuple[nn.Module, Int64[Tensor, "windows tokens"], Int64[Tensor, " n"]]:
    """The dense model, the windows that thresholds are fitted on, and the evaluation tokens."""
    model, tokenizer = load_model(settings.model, fast_dtype())
    windows = FITTED_ON.draw(load_tokens(settings.corpus, tokenizer, "calibration"))
    return model, windows, load_tokens(settings.corpus, tokenizer, "evaluation")


def sparse_rows(settings: EvaluationSettings, ways: Sequence[str], sparsities: Sequence[float]) -> pd.DataFrame:
    """A row for the dense model, for each way and share of zeros, and for each recovered version. Kept in the cache.

    Columns: family, asked (share of zeros asked for), zeros (share on the evaluation text), perplexity, ffn_bytes (of
    the neurons that are active for a token), bits_per_weight (these bytes over all FFN weights), evidence. Raises
    `UserError` for an unknown way or model.
    """
    model, windows, tokens = dense_model(settings)
    dense = Fitted(model, windows)
    measure = partial(_row, settings=settings, tokens=tokens)
    rows = [measure("dense", 0.0, model, nullcontext)]
    for way in ways:
        if way not in WAYS:
            raise unknown("way to get zeros", way, WAYS)
        rows += [measure(way, zeros, model, partial(WAYS[way], dense, zeros)) for zeros in sparsities]
    for family, zeros, name in recovered(settings.model):
        rows.append(measure(family, zeros, load_model(name, fast_dtype())[0], nullcontext))
    found, weights = pd.DataFrame(rows), ffn_weights(model)
    whole = found["family"].eq("dense")
    bundles = sum(bundle_bytes(ffn) * ffn.neurons for ffn in decoder_ffns(model))
    nbytes = ((1 - found["zeros"]) * bundles).where(~whole, weights * HALF_BYTES)
    return found.assign(ffn_bytes=nbytes, bits_per_weight=8 * nbytes / weights, evidence="measured")


def few_bits_rows(quality: pd.DataFrame, weights: int) -> pd.DataFrame:
    """The same columns for models with fewer bits, which read every neuron, from the table of `compare_variants`.

    `weights` are those of all FFNs. The perplexity is that of a model whose attention has fewer bits, too.
    """
    lost = quality[quality["metric"].eq("perplexity") & quality["form"].ne("fp16")]
    rows = lost[["form", "bits_per_weight", "evidence"]].assign(perplexity=lost["value"], family=FEW_BITS, zeros=0.0)
    return rows.assign(ffn_bytes=rows["bits_per_weight"] * weights / 8)


def recovered(model: str) -> list[tuple[str, float, str]]:
    """Family, share of zeros and name of a model's recovered versions, by family and share."""
    names = [re.fullmatch(rf"{re.escape(model)}-(?:(\w+)-)?sparse(\d+)", name) for name in MODELS]
    families = {None: RECOVERED, "relu": RECOVERED_RELU}
    return sorted((families[name[1]], int(name[2]) / 100, name[0]) for name in names if name)


def ffn_weights(model: nn.Module) -> int:
    """Weights of all FFNs."""
    linears = [linear for ffn in decoder_ffns(model) for linear in (ffn.gate, ffn.up, ffn.down) if linear is not None]
    return sum(linear.weight.numel() for linear in linears)


def bundle_bytes(ffn: FFN) -> int:
    """What a neuron takes on disk in fp16: its rows and its column, filled up to whole blocks."""
    nbytes = (2 if ffn.gate is None else 3) * ffn.down.out_features * HALF_BYTES
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def joined(sparse: pd.DataFrame, few_bits: pd.DataFrame) -> pd.DataFrame:
    """Both tables, with `relative` (perplexity over the dense model's) and `beaten_by`.

    That is the form with fewer bits that has a lower perplexity at no more bytes, the best of them; empty for none.
    """
    table = pd.concat([sparse, few_bits], ignore_index=True)
    table["relative"] = table["perplexity"] / table.loc[table["family"].eq("dense"), "perplexity"].item()
    table["beaten_by"] = [_rival(row, few_bits) if pd.notna(row.asked) else "" for row in table.itertuples()]
    return table


def draw(axes: Axes, table: pd.DataFrame, x: str) -> None:
    """Perplexity (log) over a column, a line for each family; the dense model is a dotted line.

    Triangles at the upper edge, with their perplexity, stand for those beyond `BEYOND` times the dense model's: one of
    them on the axis would make all others look alike.
    """
    dense = table.loc[table["family"].eq("dense"), "perplexity"].item()
    shown = table[table["family"].ne("dense") & ~(table["family"].eq(FEW_BITS) & (x == "zeros"))]
    families = list(dict.fromkeys(table.loc[table["family"].ne("dense"), "family"]))
    colours = dict(zip(families, sns.color_palette("colorblind", len(families)), strict=True))
    for family, rows in shown.groupby("family", sort=False):
        line = rows[rows["perplexity"].le(BEYOND * dense)].sort_values(x)
        style = "s--" if family == FEW_BITS else "o-"
        axes.plot(line[x], line["perplexity"], style, color=colours[family], markersize=5, label=family)
        for number, row in enumerate(line[line["family"].eq(FEW_BITS)].itertuples()):  # neighbours below and above
            _note(axes, row.form, (getattr(row, x), row.perplexity), (4, 5 if number % 2 else -12))
        edge = axes.get_xaxis_transform()
        for row in rows[rows["perplexity"].gt(BEYOND * dense)].itertuples():
            axes.plot(getattr(row, x), EDGE, "^", color=colours[family], transform=edge)
            _note(axes, f"{row.perplexity:,.0f}", (getattr(row, x), EDGE), (6, -3), xycoords=edge)
    axes.axhline(dense, color="gray", linestyle=":")
    axes.set(yscale="log")
    axes.yaxis.set(major_locator=LogLocator(subs=TICKS), major_formatter="{x:.0f}", minor_locator=NullLocator())
    axes.margins(x=0.08, y=0.14)  # room for the triangles, and for words beside the outermost points


def _note(axes: Axes, words: str, place: tuple[float, float], offset: tuple[int, int], **others) -> None:
    axes.annotate(words, place, xytext=offset, textcoords="offset points", fontsize=8, **others)


def sentence(table: pd.DataFrame) -> str:
    """What the table says: the cost of zeros by family, and where fewer bits beat fewer neurons."""
    parts = []
    for family, rows in table[table["asked"].gt(0)].groupby("family", sort=False):
        shown = ", ".join(f"{row.relative:.2f} at {row.zeros:.0%}" for row in rows.itertuples())
        parts.append(f"{family} {shown}")
    return f"perplexity over the dense model's, by share of zeros: {'; '.join(parts)}. {rival_sentence(table)}"


def rival_sentence(table: pd.DataFrame) -> str:
    """Of how many models with fewer neurons a model with fewer bits is better at no more bytes."""
    sparse = table[table["asked"].gt(0)]
    beaten = sparse[sparse["beaten_by"].ne("")]
    rivals = ", ".join(dict.fromkeys(beaten["beaten_by"]))
    which = f" ({rivals})" if rivals else ""
    return (
        f"A model with fewer bits that reads no more FFN bytes a token{which} has a lower perplexity than "
        f"{len(beaten)} of {len(sparse)} models with fewer neurons."
    )


def headline(table: pd.DataFrame, model: str) -> dict[str, str]:
    """What the fewest zeros cost, and where fewer bits are better than fewer neurons, if anywhere."""
    sparse, dense = table[table["asked"].gt(0)], table.loc[table["family"].eq("dense"), "perplexity"].item()
    best = sparse.sort_values(["asked", "perplexity"]).iloc[0]
    found = {
        "cost": f"With {best['zeros']:.0%} of the FFN outputs zero, {model} has a perplexity of "
        f"{best['perplexity']:.1f} instead of {dense:.1f} ({best['family']}, measured)."
    }
    return found | ({"negative": rival_sentence(table)} if sparse["beaten_by"].ne("").any() else {})


def _row(
    family: str, asked: float, model: nn.Module, prepare: Callable, settings: EvaluationSettings, tokens: Tensor
) -> dict[str, object]:
    limits = thresholds_of(model)
    key = {"family": family, "asked": asked, "settings": asdict(settings), "dtype": str(fast_dtype())}
    key |= {"weights_sha256": weights_sha256(model), "thresholds": None if limits is None else limits.tolist()}
    measure = partial(_measured, model, prepare, tokens, settings)
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))  # the key has the weights
    found = cached_table("sparse_curve", key, code, measure)
    return {"family": family, "asked": asked} | found.iloc[0].to_dict()


def _measured(model: nn.Module, prepare: Callable, tokens: Tensor, settings: EvaluationSettings) -> pd.DataFrame:
    zeros: list[float] = []
    see = lambda _, outputs: zeros.append((outputs == 0).double().mean().item())  # noqa: E731
    with prepare(), watched(model, see):
        lost = perplexity(model, tokens, settings.sequence_length, settings.windows)
    return pd.DataFrame([{"zeros": sum(zeros) / len(zeros), "perplexity": float(lost)}])


def _rival(row, few_bits: pd.DataFrame) -> str:
    better = few_bits[few_bits["perplexity"].lt(row.perplexity) & few_bits["ffn_bytes"].le(row.ffn_bytes)]
    return "" if better.empty else better.loc[better["perplexity"].idxmin(), "form"]
