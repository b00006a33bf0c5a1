"""SpQR figure 3.3: how the outliers of a quantised model are spread over rows, layers and operations."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from toolkit import sources
from toolkit.cache import cached_table
from toolkit.errors import UserError, unknown
from toolkit.kernels import csr
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.progress import progress
from toolkit.pruning.calibration import Calibration, checked_windows, walk
from toolkit.pruning.pruned import weights_sha256
from toolkit.quantization.quantised import QuantisedModel
from toolkit.quantization.spqr import Quantised, SpQR
from toolkit.text import load_tokens

CONCENTRATED = ("q_proj", "k_proj")  # section 3.4.1
TENTH = 0.1
DRAWS = 20  # of outliers at random, to know what chance alone makes


def outliers_of(quantised: QuantisedModel) -> Iterator[tuple[int, str, csr.Outliers]]:
    """The number of the decoder block, the operation's name in it and its outliers, for every decoder linear."""
    for layer in range(len(quantised.folders)):
        for name, matrix in quantised.matrices(layer).items():
            yield layer, name.rpartition(".")[2], matrix.outliers


def matrix_of(quantised: QuantisedModel, layer: int, op: str) -> Quantised:
    """The quantised matrix of an operation, such as "q_proj". Raises `UserError` for one that is not there."""
    found = {name.rpartition(".")[2]: matrix for name, matrix in _block(quantised, layer).items()}
    if op not in found:
        raise unknown("operation", op, found)
    return found[op]


def dense_weight(model_name: str, layer: int, op: str) -> Tensor:
    """The weight of an operation before it was quantised. Raises what `load_model` and `matrix_of` raise."""
    model, _ = load_model(model_name, fast_dtype())
    linears = decoder_linears(decoder_blocks(model)[layer])
    return next(linear.weight for name, linear in linears.items() if name.rpartition(".")[2] == op)


def _block(quantised: QuantisedModel, layer: int) -> dict[str, Quantised]:
    if not 0 <= layer < len(quantised.folders):
        raise UserError(f"layer is {layer}; expected 0 to {len(quantised.folders) - 1}, the model's blocks")
    return quantised.matrices(layer)


def row_counts(outliers: csr.Outliers) -> np.ndarray:
    """How many outliers each row has."""
    rows, _, _ = outliers.entries()
    return torch.bincount(rows, minlength=outliers.shape[0]).numpy()


def layer_densities(quantised: QuantisedModel, layer: int) -> dict[str, list[int]]:
    """Outliers of each row of one block's matrices, by operation. Raises `UserError` for a block that is not there."""
    found = _block(quantised, layer)
    return {name.rpartition(".")[2]: row_counts(matrix.outliers).tolist() for name, matrix in found.items()}


def densities_by_layer(matrices: Iterable[tuple[int, str, csr.Outliers]]) -> list[dict[str, list[int]]]:
    """`layer_densities` of every block, from `outliers_of`."""
    found: dict[int, dict[str, list[int]]] = {}
    for layer, op, outliers in matrices:
        found.setdefault(layer, {})[op] = row_counts(outliers).tolist()
    return [found[layer] for layer in sorted(found)]


def density_table(matrices: Iterable[tuple[int, str, csr.Outliers]]) -> pd.DataFrame:
    """How the outliers of each matrix are spread over its rows: a row a matrix.

    Columns: layer, op, rows, columns, outliers, share_percent; densities of rows in percent of their weights:
    density_low (5 % of the rows have less), density_median, density_high (95 %), density_most; densest_tenth_percent
    (share of the outliers that lie in the densest tenth of the rows), heaviest_over_chance (the heaviest row over the
    heaviest of as many outliers thrown at random), densest_tenth_chance. The last two are means over `DRAWS` draws.
    """
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        {"layer": layer, "op": op, **spread(row_counts(outliers), outliers.shape[1], generator)}
        for layer, op, outliers in matrices
    )


def spread(counts: np.ndarray, columns: int, generator: np.random.Generator) -> dict[str, float]:
    """What `density_table` says of a matrix with so many outliers in its rows."""
    rows, total = len(counts), int(counts.sum())
    thrown = generator.multinomial(total, np.full(rows, 1 / rows), size=DRAWS)
    density = 100 * counts / columns
    return {
        "rows": rows,
        "columns": columns,
        "outliers": total,
        "share_percent": 100 * total / (rows * columns),
        "density_low": np.quantile(density, 0.05),
        "density_median": np.median(density),
        "density_high": np.quantile(density, 0.95),
        "density_most": density.max(),
        "densest_tenth_percent": densest_tenth(counts),
        "densest_tenth_chance": np.mean([densest_tenth(draw) for draw in thrown]),
        "heaviest_over_chance": counts.max() / max(1, thrown.max(axis=1).mean()),
    }


def densest_tenth(counts: np.ndarray) -> float:
    """The percentage of the outliers that lie in the tenth of the rows which have most of them; 0 without outliers."""
    most = np.sort(counts)[len(counts) - max(1, round(TENTH * len(counts))) :]
    return 100 * most.sum() / max(1, counts.sum())


def density_summary(table: pd.DataFrame, sensitive: pd.DataFrame) -> pd.DataFrame:
    """The numbers that the thesis speaks of: rows with quantity, value and unit.

    The arguments are of `density_table` and `sensitive_shares`; of the latter the median over all matrices is taken.
    """
    whole = 100 * table["outliers"].sum() / (table["rows"] * table["columns"]).sum()
    named = table["op"].isin(CONCENTRATED)
    tenth = table["densest_tenth_percent"]
    rows = [
        ("share of outliers", whole, "percent"),
        ("concentration of Q and K over the others", tenth[named].mean() / tenth[~named].mean(), "ratio"),
        ("heaviest row over chance, least of all matrices", table["heaviest_over_chance"].min(), "ratio"),
        ("error of the worst weights", sensitive["worst_percent"].median(), "percent"),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value", "unit"])


def sensitive_shares(model_name: str, share: float, calibration: Calibration) -> pd.DataFrame:
    """`sensitive_share` of every decoder linear of a dense model, kept: layer, op, share, worst_percent."""
    model, tokenizer = load_model(model_name, fast_dtype())
    windows = checked_windows(model, calibration.draw(load_tokens(calibration.corpus, tokenizer, "calibration")))

    def measure() -> pd.DataFrame:
        rows, blocks = [], decoder_blocks(model)
        with progress("errors of rounding", len(blocks), "blocks") as bar:
            for layer, (block, grams) in enumerate(walk(model, windows)):
                for name, linear in decoder_linears(block).items():
                    worst = sensitive_share(linear.weight, grams[name], share)
                    rows.append((layer, name.rpartition(".")[2], share, worst))
                bar.update()
        return pd.DataFrame(rows, columns=["layer", "op", "share", "worst_percent"])

    key = {"model": model_name, "share": share, "weights_sha256": weights_sha256(model), **asdict(calibration)}
    return cached_table("measured", key, sources.dependencies(__name__), measure)


def sensitive_share(weight: Tensor, gram: Tensor, share: float, damping: float = SpQR.damping) -> float:
    """The percentage of a matrix's quantisation error that its worst weights make, so large a share of them.

    The error of weight (i, j) is (w − ŵ)² / [H⁻¹]ⱼⱼ (thesis, chapter 2), where ŵ is w in 3 bits without any outliers,
    and H is `gram` = XᵀX, damped. 0 where nothing is lost.
    """
    hessian = gram.double() + damping * gram.diagonal().double().mean() * torch.eye(len(gram), dtype=torch.float64)
    rounded = SpQR(outliers=0).round(weight.float()).decode()
    errors = (weight.float() - rounded).double().square() / torch.linalg.inv(hessian).diagonal()
    worst = errors.flatten().topk(max(1, round(share * errors.numel()))).values
    return 100 * float(worst.sum() / errors.sum()) if errors.sum() else 0.0


def density_figure(table: pd.DataFrame) -> Figure:
    """A panel for each operation: densities of the rows by layer; the last one shows how concentrated they are."""
    ops = list(dict.fromkeys(table["op"]))
    figure, panels = plt.subplots(2, 4, figsize=(11.5, 5.6), layout="constrained", sharex=False)
    for axes, op in zip(panels.flat, ops, strict=False):
        rows = table[table["op"] == op]
        axes.fill_between(
            rows["layer"], rows["density_low"], rows["density_high"], alpha=0.25, label="5 to 95 % of rows"
        )
        axes.plot(rows["layer"], rows["density_median"], label="median row")
        axes.plot(rows["layer"], rows["density_most"], ".", color="C3", label="heaviest row")
        axes.set_yscale("symlog", linthresh=0.5)
        axes.set(title=op, ylim=(0, 100), yticks=[0, 0.5, 1, 10, 100])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.yaxis.set_major_formatter("{x:g}")
    for axes in panels[:, 0]:
        axes.set_ylabel("% of a row's weights")
    _draw_concentration(panels.flat[-1], table, ops)
    figure.supxlabel("layer", fontsize=10)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def _draw_concentration(axes: Axes, table: pd.DataFrame, ops: list[str]) -> None:
    sns.stripplot(table, y="op", x="densest_tenth_percent", order=ops, size=3, jitter=0.2, ax=axes, color="C0")
    axes.axvline(table["densest_tenth_chance"].mean(), color="gray", linestyle=":", linewidth=1)
    axes.set(title="densest tenth of rows", xlabel="% of the outliers (dotted: chance)", ylabel="", xlim=(0, 100))
    axes.grid(axis="x")


def density_sentence(table: pd.DataFrame, summary: pd.DataFrame, sensitive: pd.DataFrame) -> str:
    """How concentrated outliers are, and where."""
    value = summary.set_index("quantity")["value"]
    tenth = table.groupby("op", sort=False)["densest_tenth_percent"].mean()
    heavy = table["density_most"] / table["density_median"].clip(lower=100 / table["columns"])
    return (
        f"{value['share of outliers']:.2f} % of the weights are outliers. The densest tenth of the rows holds "
        + ", ".join(f"{share:.0f} % ({op})" for op, share in tenth.items())
        + f" of a matrix's outliers on average, by chance {table['densest_tenth_chance'].mean():.0f} %: in Q and K "
        f"{value['concentration of Q and K over the others']:.2f} times as much as elsewhere. The heaviest row has "
        f"{heavy.median():.0f} times the median row's (median of {len(table)} matrices), and in each matrix at least "
        f"{value['heaviest row over chance, least of all matrices']:.1f} times what chance gives. The worst "
        f"{sensitive['share'].iloc[0]:.0%} of the weights make {sensitive['worst_percent'].median():.0f} % of the "
        f"error of rounding (median of {len(sensitive)} matrices)."
    )
