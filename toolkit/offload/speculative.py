"""Speculative decoding: several tokens are guessed, then checked in one pass (LLM in a flash, section 4.2, table 3).

The draft costs no memory and reads nothing: it is the same model with those neurons that memory holds anyway. The pass
that checks `ahead` guesses reads the neurons of all these tokens at once. So greedy decoding gives the same tokens.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import DynamicCache

from toolkit.errors import UserError
from toolkit.offload.by_neuron import ByNeuron
from toolkit.offload.model import OffloadedModel

AHEAD = 4  # guesses a pass: the paper's λ


@dataclass(frozen=True, eq=False)
class Speculated:
    """What `speculate` made.

    Args:
        tokens: the prompt and the text that follows it.
        passes: of the whole model, without the prompt's.
        proposed: guesses of the draft.
        accepted: guesses that the whole model would have chosen, too.
    """

    tokens: Int64[Tensor, "1 tokens"]
    passes: int
    proposed: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """The share of the guesses that were accepted; NaN without a guess."""
        return self.accepted / self.proposed if self.proposed else float("nan")


@torch.no_grad()
def speculate(
    target: OffloadedModel,
    prompt: Int64[Tensor, "1 given"],
    max_new_tokens: int,
    ahead: int = AHEAD,
    end: int | None = None,
) -> Speculated:
    """The likeliest next tokens of `target`, one text, up to and including the token `end`.

    Raises `UserError` for less than one token or guess, and what running the model raises.
    """
    for name, value in {"max_new_tokens": max_new_tokens, "ahead": ahead}.items():
        if value < 1:
            raise UserError(f"{name} {value}: expected 1 or more")
    neurons = _neurons(target)
    cache, passes, proposed, accepted = DynamicCache(config=target.model.config), 0, 0, 0
    text = prompt.to(target.device.torch_device)
    text = torch.cat([text, _choices(target, text, cache)[:, -1:]], dim=1)
    most = prompt.shape[1] + max_new_tokens
    while text.shape[1] < most and text[0, -1] != end:
        guesses = _guesses(target, neurons, text[:, -1:], cache, min(ahead, most - text.shape[1] - 1))
        choices = _choices(target, torch.cat([text[:, -1:], guesses], dim=1), cache)
        right = int((guesses == choices[:, :-1]).long().cumprod(1).sum())
        _cut(cache, text.shape[1] + right)
        neurons.keep(1 + right)
        new = _up_to(choices[:, : right + 1], end)
        text = torch.cat([text, new], dim=1)
        passes, proposed, accepted = passes + 1, proposed + guesses.shape[1], accepted + right
    return Speculated(text, passes, proposed, accepted)


def _neurons(target: OffloadedModel) -> ByNeuron:
    """The draft. Raises `UserError` if there is none, or if predictors would take the guesses for a prompt."""
    if not isinstance(neurons := target.strategy, ByNeuron):
        raise UserError(f"{target.store.folder}: holds no neurons, and the draft is what memory holds of them")
    if any(ffn.predictor is not None and ffn.predictor.stateful for ffn in neurons.ffns):
        raise UserError("predictors with a state: a guess may be wrong, and they would learn from it; take others")
    return neurons


def _guesses(
    target: OffloadedModel, neurons: ByNeuron, token: Tensor, cache: DynamicCache, count: int
) -> Int64[Tensor, "1 guesses"]:
    """What the neurons in memory say of the next tokens. The cache is as it was afterwards."""
    length, found = cache.get_seq_length(), []
    with neurons.drafting():
        for _ in range(count):
            token = _choices(target, token, cache)
            found.append(token)
    _cut(cache, length)
    return torch.cat(found, dim=1) if found else token[:, :0]


def _choices(target: OffloadedModel, tokens: Tensor, cache: DynamicCache) -> Int64[Tensor, "1 tokens"]:
    """The likeliest token after each of these."""
    return target.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits.argmax(-1)


def _cut(cache: DynamicCache, length: int) -> None:
    cache.crop(length - cache.get_seq_length())


def _up_to(tokens: Int64[Tensor, "1 tokens"], end: int | None) -> Int64[Tensor, "1 fewer"]:
    ends = (tokens[0] == end).nonzero() if end is not None else tokens[:0]
    return tokens[:, : int(ends[0]) + 1] if len(ends) else tokens
