"""What it costs that groups of quantised weights lie along the neuron, so that each neuron's bits stand alone.

Groups of 64 weights in 4 bits and of 16 in 2 bits, chosen by `hqq`, in all FFNs of a dense model:

- "records": `toolkit.quantization.neuron_records`, scales and zero points in 8 bits within a neuron;
- "along the neuron": the same groups, scales and zero points in 16 bits;
- "along the inputs": of each matrix, as runtimes expect it; for the down projection a group spans neurons;
- "across neurons": every group spans neurons, so that no neuron stands alone.
"""

from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit import sources
from toolkit.cache import cached_table
from toolkit.evaluation import perplexity
from toolkit.kernels.neurons.records import group_of
from toolkit.models import load_model
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.progress import progress
from toolkit.pruning.pruned import weights_sha256
from toolkit.quantization.hqq import Groupwise
from toolkit.quantization.neuron_records import decode, encode, record_bytes
from toolkit.studies.variants import EvaluationSettings
from toolkit.text import load_tokens

RECORDS, ALONG_NEURON, ALONG_INPUTS, ACROSS = "records", "along the neuron", "along the inputs", "across neurons"
AXES = (RECORDS, ALONG_NEURON, ALONG_INPUTS, ACROSS)
DENSE, HALF_BYTES = "dense", 2

Matrices = tuple[Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"]]


def group_axes(settings: EvaluationSettings, bits: tuple[int, ...] = (4, 2)) -> pd.DataFrame:
    """A row for the dense model and for each axis and number of bits. Kept in the cache.

    Columns: axis, bits (0: dense), bits_per_weight (with scales and zero points), gate_error, up_error, down_error
    (‖decoded − weight‖ / ‖weight‖ over all layers), perplexity, evidence.
    """
    model, tokenizer = load_model(settings.model, torch.float32)
    tokens = load_tokens(settings.corpus, tokenizer, "evaluation")
    key = {"settings": vars(settings), "bits": bits, "weights_sha256": weights_sha256(model)}
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))  # the key has the weights
    return cached_table("group_axis", key, code, partial(_measured, model, tokens, settings, bits))


def _measured(model: nn.Module, tokens: Tensor, settings: EvaluationSettings, bits: tuple[int, ...]) -> pd.DataFrame:
    lost = partial(perplexity, model, tokens, settings.sequence_length, settings.windows)
    rows = [{"axis": DENSE, "bits": 0, "bits_per_weight": 8.0 * HALF_BYTES, "perplexity": float(lost())}]
    layers = [_matrices(ffn) for ffn in decoder_ffns(model)]
    dense = [tuple(weight.clone() for weight in matrices) for matrices in layers]
    hidden = dense[0][0].shape[1]
    for number in bits:
        sizes = {RECORDS: 8 * record_bytes(hidden, number) / (3 * hidden)}
        for axis, found in _decoded(dense, number).items():
            for matrices, given in zip(layers, found, strict=True):
                for target, weight in zip(matrices, given, strict=True):
                    target.copy_(weight)
            row = {"axis": axis, "bits": number, "bits_per_weight": sizes.get(axis, number + 32 / group_of(number))}
            rows.append(row | _errors(dense, found) | {"perplexity": float(lost())})
    return pd.DataFrame(rows).assign(evidence="measured")


def _matrices(ffn: FFN) -> Matrices:
    """Views with a row for each neuron."""
    return ffn.gate.weight.data, ffn.up.weight.data, ffn.down.weight.data.T


def _decoded(dense: list[Matrices], bits: int) -> dict[str, list[Matrices]]:
    """What each layer's matrices decode to, by axis."""

    def along(weight: Tensor) -> Tensor:
        return Groupwise.encode(weight.contiguous(), bits, group_of(bits)).decode()

    found: dict[str, list[Matrices]] = {axis: [] for axis in AXES}
    with progress(f"quantising FFNs to {bits} bits", len(dense), "layers") as bar:
        for gate, up, down in dense:
            rows = along(gate), along(up), along(down)
            columns = along(gate.T).T, along(up.T).T, along(down.T).T
            found[RECORDS].append(decode(encode(gate, up, down, bits), gate.shape[1], bits))
            found[ALONG_NEURON].append(rows)
            found[ALONG_INPUTS].append((*rows[:2], columns[2]))
            found[ACROSS].append(columns)
            bar.update()
    return found


def _errors(dense: list[Matrices], found: list[Matrices]) -> dict[str, float]:
    """‖decoded − weight‖ / ‖weight‖ of each of the three matrices, over all layers."""
    errors = {}
    for part, name in enumerate(("gate_error", "up_error", "down_error")):
        lost = sum(float((b[part] - a[part]).square().sum()) for a, b in zip(dense, found, strict=True))
        errors[name] = (lost / sum(float(a[part].square().sum()) for a in dense)) ** 0.5
    return errors
