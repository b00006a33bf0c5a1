"""GGUF files that run as they are, against transformers' model with the same weights decoded."""

import sys

import pytest
import torch

from toolkit import paths
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.policies.placement import LayerMap

sys.path.append(str(paths.root() / "benchmarks"))  # as the scripts there find their helpers
from gguf_files import CASES, WORDS, write

TOKENS = (torch.arange(40) * 37 % WORDS)[None]
EXACT = 1e-4  # of the logits' standard deviation, with weights decoded
LARGE = [name for name in CASES if "blocks" in name]
MIXTURES = [name for name in CASES if CASES[name].fields.get("num_experts_per_tok")]
ALIKE = ("llama", "qwen2", "qwen3moe", "gpt-oss")


@torch.no_grad()
def logits(model, tokens=TOKENS):
    """Logits [tokens, vocabulary] of a prompt, then of one token after the other."""
    prompt = model(tokens[:, :35], use_cache=True)
    found, cache = [prompt.logits[0]], prompt.past_key_values
    for at in range(35, tokens.shape[1]):
        found.append(model(tokens[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(found).float()


def difference(found, expected):
    """The largest one, in standard deviations of the logits."""
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
def test_a_file_of_each_architecture_runs_as_it_is(tmp_path, name):
    original = CASES[name].model()
    write(original, CASES[name], file := tmp_path / "model.gguf")
    with OffloadedModel.open(file) as opened:
        assert difference(logits(opened.model), logits(original)) < EXACT


@pytest.mark.parametrize("name", ALIKE)
def test_the_least_memory_gives_the_same_logits(tmp_path, name):
    """Nothing stays: layers, or experts, come from the disk again and again, of several files."""
    original = CASES[name].model()
    write(original, CASES[name], tmp_path / "model.gguf", pieces=7)
    file = sorted(tmp_path.glob("*.gguf"))[-1]
    with OffloadedModel.open(file) as whole:
        layers = len(whole.placement.tiers) if whole.placement else 0
        nothing = {"placement": LayerMap(0, 0, layers)} if layers else {"demand": Demand(window=0)}
        with OffloadedModel.open(file, **nothing) as opened:
            found = logits(opened.model)
            assert torch.equal(found, logits(whole.model))
            assert difference(found, logits(original)) < EXACT
            assert sum(it[2] for it in opened.timeline.nearest() if it[0] == "read") > whole.store.ops_bytes
