"""The sizes of a model that is at hand, read off its tensors; the model may be on the device "meta".

shape = shape_of(model)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.models.blocks import decoder_blocks, decoder_linears
from toolkit.models.experts import block_experts
from toolkit.models.ffn import ffn_of

Matrix = tuple[int, int]  # outputs × inputs


@dataclass(frozen=True)
class BlockSizes:
    """A decoder block: its matrices outside the FFN, and the widths of its FFN, or of an expert and the shared FFN."""

    attention: tuple[Matrix, ...]
    ffn: int = 0
    gated: bool = True
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    own_experts: bool = False


def shape_of(model: nn.Module) -> ModelShape:
    """The sizes of a decoder of `load_model`, or of its outline. Raises `UserError` for blocks that differ too much."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    blocks = decoder_blocks(model)
    mixtures = (block_experts(block, number) for number, block in enumerate(blocks))
    per_token = next((mixture.per_token for mixture in mixtures if mixture), 0)
    tensors = {id(tensor): tuple(tensor.shape) for tensor in model.state_dict(keep_vars=True).values()}
    config = model.config.get_text_config()
    return assemble(
        [_block(block, number) for number, block in enumerate(blocks)],
        tensors.values(),
        hidden=embedding.shape[1],
        vocabulary=len(embedding),
        tied=head is embedding,
        heads=config.num_attention_heads if hasattr(config, "num_attention_heads") else 1,
        per_token=per_token,
    )


def assemble(
    blocks: Sequence[BlockSizes],
    tensors: Collection[tuple[int, ...]],
    *,
    hidden: int,
    vocabulary: int,
    tied: bool,
    heads: int,
    per_token: int = 0,
) -> ModelShape:
    """The shape of a model with these blocks; the rest of its `tensors`, given by shapes, are `other` weights.

    Blocks with attention of several kinds count as many with their mean. Raises `UserError` for other blocks that
    differ, but for dense ones before those with experts, and for sizes that do not fit together.
    """
    dense_layers = next((number for number, block in enumerate(blocks) if block.experts), len(blocks))
    first, last = blocks[0], blocks[-1]
    for number, block in enumerate(blocks):
        like = first if number < dense_layers else last
        if replace(block, attention=()) != replace(like, attention=()):
            raise UserError(f"block {number} has another FFN than block {blocks.index(like)}; expected blocks alike")
    if type(per_token) is not int or not bool(last.experts) <= per_token <= last.experts:
        raise UserError(f"a token uses {per_token!r:.40} of {last.experts} experts; expected a whole number of them")
    mixture = last.experts > 0
    shape = ModelShape(
        layers=len(blocks),
        hidden=hidden,
        ffn=last.expert_ffn if mixture else last.ffn,
        heads=heads,
        vocabulary=vocabulary,
        key_value_heads=heads,
        head_size=hidden // heads,
        family="llama" if last.gated else "opt",
        tied=tied,
        experts=last.experts,
        experts_per_token=per_token,
        shared_experts=last.shared_ffn // last.expert_ffn if mixture else 0,
        dense_layers=dense_layers if mixture else 0,
        dense_ffn=first.ffn if mixture else 0,
        own_experts=last.own_experts,
        own_attention=_attention([block.attention for block in blocks], hidden),
    )
    other = sum(map(prod, tensors)) - sum(shape.parameters.values())
    if other < 0:
        raise UserError(f"its tensors have {-other:,} weights fewer than blocks of its sizes would have")
    matrices = sum(len(block.attention) + 3 * max(1, block.experts) for block in blocks)
    return replace(shape, other=other, others=max(1, len(tensors) - matrices))


def _attention(of_blocks: Sequence[tuple[Matrix, ...]], hidden: int) -> tuple[Matrix, ...]:
    if len({tuple(sorted(matrices)) for matrices in of_blocks}) == 1:
        return tuple(sorted(of_blocks[0]))
    weights = sum(prod(matrix) for matrices in of_blocks for matrix in matrices)
    return ((weights // len(of_blocks) // hidden, hidden),)


def _block(block: nn.Module, number: int) -> BlockSizes:
    linears, mixture = decoder_linears(block), block_experts(block, number)
    if mixture:
        experts = set(mixture.linears.modules())
        beside = {name: it for name, it in linears.items() if it not in experts}
        shared = [name for name in beside if "shared" in name]
        width = sum(beside[name].weight.numel() for name in shared) // (3 * mixture.hidden)
        attention = tuple(tuple(it.weight.shape) for name, it in beside.items() if name not in shared)
        return BlockSizes(attention, 0, True, mixture.count, mixture.neurons, width, mixture.activation is None)
    try:
        ffn = ffn_of(block, number)
    except UserError:  # its matrices are streamed all the same
        return BlockSizes(tuple(tuple(it.weight.shape) for it in linears.values()))
    attention = tuple(tuple(it.weight.shape) for it in linears.values() if it not in ffn.linears)
    return BlockSizes(attention, ffn.neurons, ffn.gate is not None)
