"""The contract of all readers of GGUF files: each architecture has the logits of the model that it was written of.

The files come from `benchmarks/gguf_files.py`, which follows llama.cpp's converter and shares no table with them.
"""

import pytest
import torch

from tests.models.test_gguf_logits import LARGE
from tests.models.test_gguf_logits import opened as dequantised
from tests.offload.test_decoder import TOKENS, opened
from tests.offload.test_decoder import logits as logits_without_torch
from tests.offload.test_gguf_file import CASES, EXACT, difference, logits, write
from toolkit.models.gguf_header import read_header
from toolkit.offload.decoder import decoder as decoders
from toolkit.offload.decoder import steps
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.model import OffloadedModel

WITHOUT_TORCH = {
    *("llama", "llama, tied", "llama, biases", "llama, linear", "llama, yarn", "llama, llama 3", "mistral, window"),
    *("qwen2", "qwen2, yarn", "qwen3", "gemma3", "gemma3, global × 8"),
    *("mixtral", "qwen2moe", "qwen3moe", "qwen3moe, linear", "olmoe", "gpt-oss"),
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
@torch.no_grad()
def test_every_reader_gives_the_logits_of_the_original(tmp_path, name, monkeypatch):
    """Dequantised, as the file is, and, of some architectures, without torch; other models are left to torch."""
    monkeypatch.setattr(decoders, "BATCH_BYTES", 1)  # prompts are two batches
    monkeypatch.setattr(decoders, "FEWEST", 12)
    monkeypatch.setattr(steps, "AT_ONCE", 8)
    monkeypatch.setattr(steps, "UP_AT_ONCE", 8)
    original = CASES[name].model()
    write(original, CASES[name], file := tmp_path / "model.gguf")
    tokens = torch.tensor([TOKENS])
    expected = original(tokens).logits[0]
    assert difference(dequantised(file)(tokens).logits[0], expected) < EXACT
    with OffloadedModel.open(file) as as_it_is:
        assert difference(logits(as_it_is.model), logits(original)) < EXACT
    if architecture_of(read_header(file)) is None:
        assert name not in WITHOUT_TORCH
        return
    with opened(file) as decoder:
        assert difference(logits_without_torch(decoder), expected) < EXACT
