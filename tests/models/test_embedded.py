"""The models whose parts lie under `data/models/`."""

import pytest
import torch

from toolkit import paths
from toolkit.errors import UserError
from toolkit.models import load_model
from toolkit.models.adapters import merge
from toolkit.models.experts import decoder_experts
from toolkit.models.named import EXPERTS
from toolkit.quality import load_tokens
from toolkit.sparsity import thresholds_of
from toolkit.sparsity.thresholds import run_decoder, watched

MOST_BYTES = 12e6


def folder_of(name, *files):
    """A model's folder, which has these files beside its card and its curve, and is small."""
    folder = paths.root() / "data" / "models" / name
    assert {file.name for file in folder.iterdir()} >= {*files, "curve.csv", "README.md", "recipe.py"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES
    assert f"# {name}" in (folder / "README.md").read_text()
    return folder


@torch.no_grad()
def test_a_sparse_model_has_the_share_of_zeros_in_its_name():
    name = "smollm2-135m-sparse90"
    folder, (model, tokenizer) = folder_of(name, "adapters.safetensors"), load_model(name)
    counts = []
    tokens = load_tokens("wiki-slice", tokenizer, "evaluation")[:256]
    with watched(model, lambda _, outputs: counts.append((outputs == 0).double().mean().item())):
        run_decoder(model, tokens)
    assert len(counts) == len(thresholds_of(model))
    assert sum(counts) / len(counts) == pytest.approx(int(name.rpartition("sparse")[2]) / 100, abs=0.03)
    with pytest.raises(UserError, match="made for another model"):
        merge(model, folder / "adapters.safetensors")


UPCYCLED = "smollm2-135m-moe-upcycled"


@torch.no_grad()
def test_the_upcycled_model_is_a_mixtral_with_other_perplexities():
    folder_of(UPCYCLED, EXPERTS, "quality.csv")
    model, tokenizer = load_model(UPCYCLED)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert {experts.gate.form for experts in decoder_experts(model)} == {"renormalised"}
    tokens = load_tokens("wiki-slice", tokenizer, "evaluation")[:64]
    dense, _ = load_model("smollm2-135m")
    ours, theirs = (it(tokens[None], labels=tokens[None]).loss.item() for it in (model, dense))
    assert ours < theirs
