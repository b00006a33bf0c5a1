"""Every family by every method of packing: right, or refused in one line. `pytest -s` prints the table.

Families of `ALIKE` are left to `-m slow`, which has all.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.families import FAMILIES, load_family
from toolkit.errors import UserError
from toolkit.formats import decode, encode
from toolkit.formats.spqr import SpQRMatrix
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.offload.logit_check import check_logits
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

HEAD = partial(encode, "dense")  # the output head is in parts, streamed or held


def endor(model: nn.Module, folder: Path) -> None:
    pack_model(model, folder, head=HEAD)


def neurons(model: nn.Module, folder: Path) -> None:
    pack_model(model, folder, Neurons([0.1] * len(decoder_blocks(model))), head=HEAD)


def experts(model: nn.Module, folder: Path) -> None:
    pack_model(model, folder, WholeExperts(), head=HEAD)


def experts_4_bits(model: nn.Module, folder: Path) -> None:
    pack_model(model, folder, WholeExperts(4))


def spqr(model: nn.Module, folder: Path) -> None:
    """Without calibration. The model gets the decoded weights, as `load_changed` has it."""
    packed = {}
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            matrix = packed[linear.weight.data_ptr()] = SpQRMatrix.encode(linear.weight)
            linear.weight.copy_(decode(matrix))
    pack_model(model, folder, Linears({"spqr": lambda weight: packed[weight.data_ptr()]}))


DTYPES = (torch.bfloat16, torch.float32)
LINEARS = (endor, spqr)
METHODS = (neurons, experts, experts_4_bits)
MIXTURES = {
    "Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "GptOss", "GraniteMoE", "PhiMoE", "GLM4-MoE", "DeepSeek-V3",
    "Ernie 4.5 MoE", "MiniMax", "Qwen3-Next",
}  # fmt: skip
NO_DECODERS = {"BERT", "RoBERTa", "BART"}
# more than two or three linears, or an activation with weights; biases beside a gate; experts in a form of their own
NOT_BY_NEURON = {
    "BitNet", "Apertus", "Mamba", "Llama, with biases", "JetMoE", "DBRX", "Gemma3n, sparse", "DeepSeek-V4", "Inkling 2",
}  # fmt: skip
CLAMPED = {"GptOss"}  # experts without separate neurons
# blocks as another family's, up to the order and size of their parts
ALIKE = {
    "Gemma", "OLMo", "Granite", "SmolLM3", "Persimmon", "StableLM", "Falcon, as 40b", "CodeGen", "Starcoder2", "GLM4",
    "Cohere", "OLMoE", "PhiMoE", "GLM4-MoE", "Arcee", "Nemotron", "RoBERTa",
}  # fmt: skip


def outcomes(first: int, place: Path) -> Iterator[tuple[str, str, float | str]]:
    """Each family and method with its error in standard deviations of the logits, or why it is refused."""
    for number, family in enumerate(FAMILIES):
        if not first and family in ALIKE:
            continue
        try:
            model = load_family(family, place / str(number), DTYPES[(number + first) % 2])
        except UserError as error:
            yield family, "load_model", str(error)
            continue
        for method in (LINEARS[(number // 2 + first) % 2], *METHODS):
            yield family, method.__name__, outcome(method, model, place / f"{number}-{method.__name__}")


def outcome(method, model: nn.Module, folder: Path) -> float | str:
    try:
        method(model, folder)
        return check_logits(folder, model)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_family_is_right_or_refused(tmp_path, one_thread, first):
    """Families have the two types, and the two formats of linears, in turns; `-m slow` runs each in the others."""
    tried = FAMILIES.keys() if first else FAMILIES.keys() - ALIKE
    right: dict[str, set[str]] = {method.__name__: set() for method in LINEARS + METHODS}
    for family, method, result in outcomes(first, tmp_path):
        refused = isinstance(result, str)
        print(f"{family:22}{method:16}{result if refused else f'right, within {result:.1g} σ'}")
        if refused:
            assert "\n" not in result
            assert "other logits" not in result, (family, method, result)
        else:
            right[method].add(family)
    decoders = tried - NO_DECODERS
    assert right["endor"] | right["spqr"] == decoders
    assert right["neurons"] == decoders - MIXTURES - NOT_BY_NEURON
    assert right["experts"] == MIXTURES & tried
    assert right["experts_4_bits"] == MIXTURES & tried - CLAMPED
