"""Contestants that take token ids through a decoder, pass by pass: what they share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.measure.contestant import Contestant, Reference


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids for each pass, int64 [batch, tokens], and the logits of the last ones that each pass must give.

    With `cached`, each pass continues the text of those before it; otherwise each begins a new one.
    """

    inputs: Sequence[Tensor]
    reference: Reference
    cached: bool = True


@torch.no_grad()
def greedy_text(model: nn.Module, prompt: Tensor, passes: int, near: float) -> Text:
    """A prompt [batch, tokens], then the likeliest token of each pass, with the logits of so many passes."""
    inputs, logits, past = [prompt], [], None
    for _ in range(passes):
        output = model(inputs[-1], past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits.append(output.logits[:, -1])
        inputs.append(logits[-1].argmax(-1, keepdim=True))
    return Text(inputs[:-1], Reference("the model in memory", logits, near))


class Decoding(Contestant):
    """A contestant whose `model`, in the form of Hugging Face, gets the text. A token of the turn is one pass."""

    model: nn.Module

    def __init__(self, name: str, text: Text, labels: Mapping[str, object]):
        self.name, self.text, self.labels, self.reference = name, text, labels, text.reference

    @torch.no_grad()
    def token(self, number: int) -> Tensor:
        """One pass. Returns the logits of the last tokens, [batch, vocabulary]."""
        past = self._past if number else None
        output = self.model(self.text.inputs[number], past_key_values=past, use_cache=self.text.cached)
        self._past = output.past_key_values
        return output.logits[:, -1]
