"""The output head in parts: a matrix of a vocabulary is many times as large as any other, too large for one buffer."""

from torch import nn

from toolkit.models.blocks import decoder_blocks, decoder_linears
from toolkit.models.on_demand import is_on_demand
from toolkit.models.plain import linear

HEAD = "head"  # the op of a part
TILE = 16  # rows of a part are whole tiles of every format


def linears_by_layer(model: nn.Module, head_rows: int | None) -> list[dict[str, nn.Linear]]:
    """The linears of each decoder block by name, then each part of the head, if it has parts of so many rows."""
    layers = [decoder_linears(block) for block in decoder_blocks(model)]
    return [*layers, *({HEAD: part} for part in head_parts(model, head_rows))] if head_rows else layers


def untied_head(model: nn.Module) -> nn.Module:
    """Give a model a head of its own where it is the embedding, in place; return the model."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        weight = head.weight.detach()
        head.weight = nn.Parameter(weight if is_on_demand(model) else weight.clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False
    return model


def rows_of_part(model: nn.Module) -> int:
    """Rows of a part of the head, so that it has no more weights than the largest matrix of the decoder blocks."""
    every = (it for block in decoder_blocks(model) for it in decoder_linears(block).values())
    largest = max(linear.weight.numel() for linear in every)
    return max(largest // model.get_output_embeddings().weight.shape[1] // TILE, 1) * TILE


def head_parts(model: nn.Module, rows: int) -> list[nn.Linear]:
    """Linears over so many rows of the head each, the last one over the rest. Their weights are views of the head's."""
    head, parts = model.get_output_embeddings(), []
    for start in range(0, head.weight.shape[0], rows):
        bias = None if head.bias is None else head.bias.detach()[start : start + rows]
        parts.append(linear(head.weight.detach()[start : start + rows], bias))
    return parts
