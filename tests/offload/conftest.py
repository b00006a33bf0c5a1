"""Tiny random decoders of several families, pruned and packed."""

import dataclasses
import errno
import gc
import os

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import processes
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.sparsity import prune
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.readers.base import HostReader

LAYERS = 4
COMMON = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
GATED = COMMON | {"intermediate_size": 70, "num_key_value_heads": 2, "initializer_range": 0.2}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, GATED | {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, GATED | {"sliding_window": 5}),
    "opt": (OPTForCausalLM, OPTConfig, COMMON | {"ffn_dim": 70, "word_embed_proj_dim": 48, "init_std": 0.2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GATED | {"head_dim": 12}),
}
# the texts of the tests are longer than its window, and its heads are not hidden / heads wide
GEMMA3 = (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GATED
    | {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 5, "query_pre_attn_scalar": 9, "eos_token_id": None}
    | {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
)


def pruned(family: str | tuple, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Half of its weights are zeros; biases and norms are none. `family` is a name or an entry as in `FAMILIES`."""
    model, config, sizes = FAMILIES[family] if isinstance(family, str) else family
    torch.manual_seed(0)
    made = model(config(**sizes)).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or not parameter.any():
            parameter.normal_()
    prune(made, "magnitude")
    for parameter in made.parameters():  # alone: buffers stay in float32, as in a model that is loaded
        parameter.data = parameter.data.to(dtype)
    return made


def opened(folder, **settings) -> OffloadedModel:
    """`OffloadedModel.open`, whose `demand` has those of the settings that are fields of `Demand`."""
    fields = {field.name for field in dataclasses.fields(Demand)} & settings.keys()
    demand = {"demand": Demand(**{name: settings.pop(name) for name in fields})} if fields else {}
    return OffloadedModel.open(folder, **demand, **settings)


@torch.no_grad()
def in_parts(model, tokens, parts, cache=None):
    """The logits of texts whose parts, so many tokens each, are passed one after the other."""
    found = []
    for part in tokens.split(list(parts), dim=1):
        passed = model(part, past_key_values=cache, use_cache=True)
        found, cache = [*found, passed.logits], passed.past_key_values
    return torch.cat(found, 1)


def run_and_kill(folder, ready):
    """Kill a process that generates from a packed folder. It has added no file to the folder and removed none.

    `ready` is the path of a file that it writes.
    """
    code = f"""if True:
        import torch
        from pathlib import Path
        from toolkit.offload.model import OffloadedModel
        with OffloadedModel.open({str(folder)!r}) as model:
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, do_sample=False, pad_token_id=0)
            Path({str(ready)!r}).touch()
            while True:
                model.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    """
    before = sorted(os.listdir(folder))
    run = processes.start(code)
    processes.wait_for(ready, run)
    run.kill()
    run.join()
    assert sorted(os.listdir(folder)) == before


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """`packed(family, dtype, variants)`: a pruned model, and the folder that it is packed in, made once."""
    made = {}

    def make(family="llama", dtype=torch.float32, variants=("endor", "zstd", "dense")):
        key = (family, dtype, variants)
        if key not in made:
            folder = tmp_path_factory.mktemp(family) / "store"
            model = pruned(family, dtype)
            pack_model(model, folder, Linears(variants), family)
            made[key] = model, folder
        return made[key]

    return make


@pytest.fixture
def uncollected():
    """Nothing is collected in the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fails_at(monkeypatch):
    """Has the n-th read from here on fail, and no other: `fails_at(3)`."""

    def arm(number):
        fetch, calls = HostReader._fetch, []

        def fails_once(self, *arguments):
            calls.append(arguments)
            if len(calls) == number:
                raise OSError(errno.EIO, "bad sector")
            fetch(self, *arguments)

        monkeypatch.setattr(HostReader, "_fetch", fails_once)

    return arm
