"""Makes the checkpoints beside it: run where compressed-tensors 0.14.0.1 is installed (see README.md)."""

import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
# per bf16 bit pattern: −0.0, +∞, a NaN with a payload, the smallest subnormal
SPECIALS = torch.tensor([-0x8000, 0x7F80, 0x7FC1, 0x0001], dtype=torch.int16).view(torch.bfloat16)


def model():
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=20,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rope_theta=12345.0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


@torch.no_grad()
def prune(model):
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter[torch.rand(parameter.shape) < 0.6] = 0
    first, second = model.model.layers
    first.self_attn.v_proj.weight.zero_()
    first.mlp.up_proj.weight[3:6] = 0
    second.mlp.down_proj.weight[2, :4] = SPECIALS
    second.self_attn.o_proj.weight.copy_(torch.randn(20, 20))  # dense, and so left out


def make_llama():
    pruned = model()
    prune(pruned)
    ignore = ["model.layers.1.self_attn.o_proj", "lm_head"]
    config = BitmaskConfig(targets=["Linear"], ignore=ignore, global_sparsity=0.5)
    compressor = ModelCompressor.from_pretrained_model(pruned, sparsity_config_or_format=config)
    folder = fresh("llama")
    save_file(dict(pruned.state_dict()), HERE / "llama.dense.safetensors")
    pruned.save_pretrained(folder, state_dict=compressor.compress(pruned), max_shard_size="5KB")
    compressor.update_config(folder)


def make_types():
    """Every element type that has kernels here, and vectors, which the package packs if told no targets."""
    dense = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.randn(6, 13) * 5
        values[torch.rand(6, 13) < 0.6] = 0
        values[4], values[1, 2] = 0, -0.0
        dense[f"{str(dtype).removeprefix('torch.')}.weight"] = values.to(dtype)
    dense["uint8.weight"] = torch.randint(0, 256, (6, 32), dtype=torch.uint8).clamp_min(128) - 128
    dense["norm.weight"] = torch.tensor([1.0, 0, 2, 0, 0, 0, 0, 0, 0, 3])
    dense["norm.bias"] = torch.arange(3.0)
    folder = fresh("types")
    compressor = ModelCompressor(sparsity_config=BitmaskConfig())
    save_file(dense, HERE / "types.dense.safetensors")
    save_file(compressor.sparsity_compressor.compress(dense), folder / "model.safetensors", {"format": "pt"})
    compressor.update_config(folder)


def fresh(name):
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
    return HERE / name


torch.manual_seed(0)
make_llama()
make_types()
