"""The sparse models whose adapters lie under `data/models/`."""

import pytest
import torch

from toolkit import paths
from toolkit.activations import thresholds_of
from toolkit.activations.thresholds import run_decoder, watched
from toolkit.errors import UserError
from toolkit.models import load_model
from toolkit.models.adapters import merge
from toolkit.models.loading import SPARSE
from toolkit.text import load_tokens

MOST_BYTES = 25e6


@pytest.mark.parametrize("name", SPARSE)
@torch.no_grad()
def test_it_has_the_share_of_zeros_in_its_name(name):
    model, tokenizer = load_model(name)
    counts = []
    tokens = load_tokens("wiki-slice", tokenizer, "evaluation")[:256]
    with watched(model, lambda _, outputs: counts.append((outputs == 0).double().mean().item())):
        run_decoder(model, tokens)
    assert len(counts) == len(thresholds_of(model))
    assert sum(counts) / len(counts) == pytest.approx(int(name.rpartition("sparse")[2]) / 100, abs=0.03)


@pytest.mark.parametrize("name", SPARSE)
def test_its_folder_is_whole_and_small(name):
    folder = paths.root() / "data" / "models" / name
    assert {file.name for file in folder.iterdir()} >= {"adapters.safetensors", "curve.csv", "README.md"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES
    assert f"# {name}" in (folder / "README.md").read_text()
    with pytest.raises(UserError, match="has activation thresholds already"):
        merge(load_model(name)[0], folder / "adapters.safetensors")
