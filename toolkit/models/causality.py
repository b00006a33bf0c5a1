"""Whether a model is a decoder: its logits depend on no later token. Neither its class nor its config tells."""

import torch
from torch import nn

from toolkit.errors import UserError

ROUNDING = 0.05  # of the logits' standard deviation


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raise `UserError` if the tokens after the first one change its logits, as they do in BERT."""
    tokens = torch.tensor([[1, 2, 3, 4, 5], [1, 6, 7, 8, 9]]) % model.config.get_text_config().vocab_size
    one, other = model(tokens).logits[:, 0].float()
    if (one - other).square().mean().sqrt() > ROUNDING * one.std():
        name = type(model).__name__
        raise UserError(f"{name} is no decoder: its logits depend on later tokens; choose a decoder-only model")
