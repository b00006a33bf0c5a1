"""How surprised a model is by a text that goes on after a prompt."""

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError


@torch.inference_mode()
def continuation_perplexity(model: nn.Module, tokens: Int64[Tensor, " length"], prompt_tokens: int) -> float:
    """The perplexity of the tokens behind the first `prompt_tokens`, each read after all that come before it.

    `tokens` is the prompt and its continuation, whoever wrote them. Raises `UserError` unless both have a token.
    """
    if not 1 <= prompt_tokens < len(tokens):
        raise UserError(f"prompt of {prompt_tokens} tokens: expected 1 to {len(tokens) - 1}, of {len(tokens)} in all")
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[None], use_cache=False).logits[0, prompt_tokens - 1 : -1]
    return functional.cross_entropy(logits.float(), tokens[prompt_tokens:]).double().exp().item()
