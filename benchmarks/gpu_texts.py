"""The texts of `gpu.py`: a random twin of a small model, packed in three ways, as `run --device cuda` runs it."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.formats import QUANTISED
from toolkit.formats.twins import random_spqr
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.offload.model import OffloadedModel, unpack_model
from toolkit.offload.placement import LayerMap
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

LAYERS, TOKENS = 30, 32  # of SmolLM2-135M; new tokens
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 256}
SMOLLM2 |= {"vocab_size": 49_152, "tie_word_embeddings": True}
WAYS = {"endor": ("endor", "endor_packed"), "spqr": ("spqr", "spqr_packed"), "dense": ("dense",)}
CLOSE = 0.1  # a logit's largest error, in standard deviations of the logits: a wrong weight gives more than 1


@dataclass
class Text:
    """Text of a packed model as `run --device cuda` makes it, beside the dense model on the same device."""

    name: str
    shape: str
    folder: Path
    dense: torch.nn.Module
    method: str
    placement: LayerMap | None
    device: str
    tokens: int

    def row(self, _) -> dict:
        """The largest error of a logit, in the logits' standard deviations; tokens that agree; tokens a second.

        Equal logits must give equal tokens.
        """
        prompt = torch.arange(1, 9, device=self.device)[None]
        settings = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens, "do_sample": False, "pad_token_id": 0}
        with (
            torch.no_grad(),
            OffloadedModel.open(self.folder, self.method, device=self.device, placement=self.placement) as ours,
        ):
            expected, found = (model(prompt).logits.double() for model in (self.dense, ours.model))
            error = float((found - expected).abs().max() / expected.std())
            whole = self.dense.generate(prompt, **settings)
            ours.generate(prompt, **settings)  # compiles
            begun = time.perf_counter()
            text = ours.generate(prompt, **settings)
            seconds = time.perf_counter() - begun
        same = float((text == whole)[:, prompt.shape[1] :].double().mean())
        right = error <= CLOSE and (same == 1 or error > 0)
        speed = {} if self.device == "cpu" else {"tokens_s": self.tokens / seconds}
        return {"right": right, "error": error, "same_tokens": same, **speed}


def texts(device: str, simulated: bool) -> Iterator[Text]:
    """Random twins of SmolLM2-135M, each packed in one way, whole in the GPU's memory and brought layer by layer."""
    layers, tokens = (2, 4) if simulated else (LAYERS, TOKENS)
    through = LayerMap(0, layers - layers // 2, layers // 2)  # half of them from DRAM, half from disk
    for packing, methods in WAYS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / packing
            _pack(packing, folder, layers, simulated)
            dense = unpack_model(Store.open(folder), packing).to(device)
            for method, placement in product(methods, (None, through)):
                where = "whole" if placement is None else "half from DRAM, half from disk"
                yield Text(f"text, {method}", where, folder, dense, method, placement, device, tokens)


def _pack(packing: str, folder: Path, layers: int, simulated: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(TOY if simulated else SMOLLM2), num_hidden_layers=layers)).half().eval()
    for block in decoder_blocks(model) if packing == "endor" else ():
        for linear in decoder_linears(block).values():
            linear.weight.data[torch.rand_like(linear.weight) < 0.5] = 0
    seeds = count()
    forms = {"spqr": lambda weight: random_spqr(QUANTISED["spqr"], tuple(weight.shape), weight.dtype, seed=next(seeds))}
    pack_model(model, folder, Linears(forms if packing == "spqr" else (packing,)), "twin")
