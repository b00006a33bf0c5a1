"""Tables of the bytes that weights take in each format (ENDOR, section 4.1 and figure 4)."""

from collections.abc import Iterable, Mapping
from itertools import product

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit.errors import unknown
from toolkit.formats import FORMATS, encode, expected_nbytes
from toolkit.formats.csr import index_dtype
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.shapes import SHAPES, random_pruned
from toolkit.progress import progress
from toolkit.quantization import absmax_int8


def twin_sizes(
    model: str, layer: str, sparsities: Iterable[float], dtypes: Iterable[str], rows: int, seed: int = 0
) -> pd.DataFrame:
    """Sizes of a random twin of one paper-scale layer, pruned row by row, over sparsity and data type.

    At most `rows` rows are packed. The size of a layer with more rows is scaled up, and the table says `modelled`. The
    size of 2:4 follows from its closed form, at 50 %. The parts of Endor have their own rows, such as `endor values`.

    Columns: source, format, dtype, sparsity, size_mb (10^6 bytes), ratio (over dense), evidence. Raises `UserError` for
    an unknown model or layer.
    """
    shape = _shape(model, layer)
    packed_rows = min(rows, shape[0])
    found, cases = [], list(product(dtypes, sparsities))
    with progress(f"packing {model} {layer}", len(cases), "weights") as bar:
        for dtype, sparsity in cases:
            weight = random_pruned((packed_rows, shape[1]), sparsity, getattr(torch, dtype), seed)
            packed = {name: encode(name, weight) for name in FORMATS if name != "two_four"}
            nbytes = {name: each.nbytes for name, each in packed.items()}
            nbytes |= {f"endor {part}": tensor.nbytes for part, tensor in packed["endor"].tensors.items()}
            if sparsity == 0.5:
                nbytes["two_four"] = expected_nbytes("two_four", tuple(weight.shape), sparsity, weight.dtype)
            found += [{"format": name, "dtype": dtype, "sparsity": sparsity, "nbytes": n} for name, n in nbytes.items()]
            bar.update()
    table = pd.DataFrame(found)
    evidence = "measured" if packed_rows == shape[0] else "modelled"
    return _tidy(table, scale=shape[0] / packed_rows).assign(
        source=f"{model} {layer}",
        evidence=["modelled" if name == "two_four" else evidence for name in table["format"]],
    )


def model_sizes(models: Mapping[str, nn.Module], source: str, dtypes: Iterable[str]) -> pd.DataFrame:
    """Total sizes of all decoder linears of pruned models (pattern → model), in every format that can hold them.

    int8 weights are quantised by `absmax_int8`. `sparsity` is the counted share of zeros. All rows are measured.
    Columns: those of `twin_sizes`, and pattern.
    """
    cases = [case for case in product(models, dtypes, FORMATS) if case[2] != "two_four" or case[0] == "2:4"]
    found = []
    with progress(f"packing {source}", len(cases), "times") as bar:
        for pattern, dtype, name in cases:
            found.append({"pattern": pattern, "dtype": dtype, **_totals(models[pattern], dtype, name)})
            bar.update()
    return _tidy(pd.DataFrame(found), by=["pattern", "dtype"]).assign(source=source, evidence="measured")


def linear_sizes(model: nn.Module, dtype: str = "float16") -> pd.DataFrame:
    """Bits a weight of each decoder linear of one pruned model, by format, as its own zeros make them.

    Formats: `endor` and `csr`, packed and counted (measured). `ell`: all rows as long as the longest, a value and a
    column index as CSR's in every slot (modelled). `two_four`: its closed form, as if the weight had first lost what
    2:4 cannot hold (modelled). Columns: layer, op, format, dtype, sparsity, bits_per_weight, evidence.
    """
    rows = []
    for layer, block in enumerate(decoder_blocks(model)):
        for name, linear in decoder_linears(block).items():
            weight = _cast(linear.weight.detach(), dtype)
            labels = {"layer": layer, "op": name.rpartition(".")[2], "dtype": dtype, "sparsity": _sparsity(weight)}
            nbytes = {form: encode(form, weight).nbytes for form in ("endor", "csr")}
            nbytes["ell"] = _ell_nbytes(weight)
            nbytes["two_four"] = expected_nbytes("two_four", tuple(weight.shape), 0.5, weight.dtype)
            for form, count in nbytes.items():
                evidence = "measured" if form in ("endor", "csr") else "modelled"
                bits = 8 * count / weight.numel()
                rows.append(labels | {"format": form, "bits_per_weight": bits, "evidence": evidence})
    return pd.DataFrame(rows)


def _sparsity(weight: Tensor) -> float:
    return int((weight == 0).sum()) / weight.numel()


def _ell_nbytes(weight: Tensor) -> int:
    longest = int((weight != 0).sum(dim=1).max())
    return weight.shape[0] * longest * (weight.element_size() + index_dtype(weight.shape[1]).itemsize)


def _totals(model: nn.Module, dtype: str, name: str) -> dict[str, object]:
    zeros = elements = nbytes = 0
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            weight = _cast(linear.weight.detach(), dtype)
            nbytes += encode(name, weight).nbytes
            zeros += int((weight == 0).sum())
            elements += weight.numel()
    return {"format": name, "sparsity": round(zeros / elements, 4), "nbytes": nbytes}


def _cast(weight: Tensor, dtype: str) -> Tensor:
    return absmax_int8(weight) if dtype == "int8" else weight.to(getattr(torch, dtype))


def _tidy(
    table: pd.DataFrame, scale: float = 1.0, by: tuple[str, ...] | list[str] = ("dtype", "sparsity")
) -> pd.DataFrame:
    dense = table[table["format"].eq("dense")].set_index(list(by))["nbytes"]
    over = pd.MultiIndex.from_frame(table[list(by)]).map(dense)
    sized = table.assign(size_mb=table["nbytes"] * scale / 1e6, ratio=table["nbytes"].to_numpy() / over.to_numpy())
    return sized.drop(columns="nbytes")


def _shape(model: str, layer: str) -> tuple[int, int]:
    if model not in SHAPES:
        raise unknown("twin model", model, SHAPES)
    if layer not in SHAPES[model]:
        raise unknown(f"layer of {model}", layer, SHAPES[model])
    return SHAPES[model][layer]
