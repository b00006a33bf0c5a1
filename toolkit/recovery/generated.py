"""Text that a model writes itself, to be distilled on: beginnings from a corpus, carried on by sampling.

Where a corpus is so small that adapters learn it by heart, this gives as much fresh text as is wanted, and the teacher
is at home in it (LLM-QAT: Liu et al., 2023). Parts of it are kept in the cache.
"""

import hashlib
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit import sources, tensor_files
from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.models.adapters import fingerprint
from toolkit.progress import progress

KIND, FILE = "text that a model wrote", "tokens.safetensors"
SEQUENCES, LENGTH, BEGINNING = 128, 256, 32  # of a part; a sequence's tokens, and those of them from the corpus


def own_text(model: nn.Module, tokens: Int64[Tensor, " n"], count: int) -> Int64[Tensor, " count"]:
    """So many tokens that a model writes on from random places of a text, sampled from its whole distribution.

    Raises `UserError` for a text without a beginning in it.
    """
    if len(tokens) <= BEGINNING:
        raise UserError(f"{len(tokens)} tokens hold no beginning of {BEGINNING}: give more text")
    numbers = range(-(-count // (SEQUENCES * LENGTH)))
    text = hashlib.sha256(tokens.numpy()).hexdigest()
    key = {"model": fingerprint(model), "text_sha256": text, "dtype": str(model.dtype), "device": model.device.type}
    parts = []
    with progress("writing text to train on", len(numbers), "parts") as bar:
        for number in numbers:
            make = partial(_write, model, tokens, number)
            folder = cached("own_text", key | {"number": number}, sources.dependencies(__name__), make)
            parts.append(tensor_files.load(folder / FILE, KIND)[1]["tokens"])
            bar.update()
    return torch.cat(parts)[:count]


def _write(model: nn.Module, tokens: Int64[Tensor, " n"], number: int, folder: Path) -> None:
    """One part, from random numbers of its own."""
    generator = torch.Generator().manual_seed(number)
    places = torch.randint(0, len(tokens) - BEGINNING, (SEQUENCES, 1), generator=generator)
    beginnings = tokens[places + torch.arange(BEGINNING)].to(model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(number)
        written = model.generate(
            beginnings,
            attention_mask=torch.ones_like(beginnings),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=LENGTH - BEGINNING,  # an end of text does not end a sequence
            max_new_tokens=LENGTH - BEGINNING,
            pad_token_id=0,
        )
    tensor_files.save(folder / FILE, KIND, {}, {"tokens": written.flatten()})
