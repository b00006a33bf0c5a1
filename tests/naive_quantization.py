"""Slow, obvious quantisation: Python numbers, one channel after the other, and the families' own names of things."""

import torch

LLAMA = {
    "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
}
OPT = {
    "self_attn_layer_norm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "final_layer_norm": ["fc1"],
}
READERS = {"llama": LLAMA, "mistral": LLAMA, "opt": OPT, "qwen3": LLAMA}  # norm -> linears, in a block


def blocks(model):
    """The prefix of each block's names, and the block."""
    part = "model.decoder.layers" if "OPT" in type(model).__name__ else "model.layers"
    return [(f"{part}.{number}", block) for number, block in enumerate(model.get_submodule(part))]


def int8(weight):
    """Integers and scales of a matrix, element by element; scales are numbers of the matrix's type."""
    values, scales = [], []
    for row in weight.tolist():
        scale = torch.tensor(max(map(abs, row)) / 127).to(weight.dtype).item() or 1.0
        values.append([min(max(round(value / scale), -127), 127) for value in row])
        scales.append(scale)
    return torch.tensor(values, dtype=torch.int8), torch.tensor(scales, dtype=weight.dtype)


def factors(model, family, windows, alpha):
    """Equation 4 for every norm, from all that its linears are given when the whole model runs."""
    found = {}
    for prefix, block in blocks(model):
        for norm, names in READERS[family].items():
            linears = [block.get_submodule(name) for name in names]
            seen = inputs(model, linears[0], windows)
            found[f"{prefix}.{norm}"] = torch.tensor(
                [
                    max(abs(x) for x in channel) ** alpha
                    / max(abs(w) for linear in linears for w in linear.weight[:, j].tolist()) ** (1 - alpha)
                    for j, channel in enumerate(seen.T.tolist())
                ]
            )
    return found


def inputs(model, linear, windows):
    """Every token that a linear is given."""
    seen = []
    handle = linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    for window in windows:
        model(window[None])
    handle.remove()
    return torch.cat(seen)
