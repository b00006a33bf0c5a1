"""The sizes of a model that is at hand, read off its matrices; the model may be on the device "meta".

    shape = shape_of(model)

Models beyond `ModelShape` are refused: every matrix of the model is a part of it, or the model is of another kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod

from torch import nn

from toolkit.errors import UserError
from toolkit.models.architectures import FFN_NAMES, ModelShape
from toolkit.models.blocks import decoder_blocks
from toolkit.models.experts import Experts, block_experts
from toolkit.models.ffn import ffn_of

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "dense"}
POSITIONS = {"embed_positions", "wpe", "position_embd"}  # learned ones, which `ModelShape` leaves out


@dataclass(frozen=True)
class BlockSizes:
    """A decoder block: the weights of its attention, and the widths of its FFN, or of an expert and the shared FFN."""

    attention: int
    ffn: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0


def shape_of(model: nn.Module) -> ModelShape:
    """The sizes of a decoder as transformers makes it, or of one of `toolkit.models.mixture`.

    Raises `UserError` for a model with other matrices than `ModelShape` knows, or whose blocks differ.
    """
    config, blocks = model.config.get_text_config(), decoder_blocks(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    found = [_block(block, number) for number, block in enumerate(blocks)]
    heads = config.num_attention_heads
    shape = assemble(
        [sizes for sizes, _ in found],
        family=_family(blocks),
        hidden=config.hidden_size,
        vocabulary=len(embedding),
        tied=head is embedding,
        heads=heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        per_token=next((mixture.per_token for _, mixture in found if mixture), 0),
    )
    check_whole(shape, {name: tuple(weight.shape) for name, weight in model.named_parameters()})
    return shape


def check_whole(shape: ModelShape, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UserError` unless the matrices among a model's tensors are those of the shape, norms and positions apart.

    A gate of a single row (Qwen2-MoE's of its shared expert) counts as little as a norm.
    """
    matrices = (
        it for name, it in tensors.items() if len(it) > 1 and min(it) > 1 and not POSITIONS & {*name.split(".")}
    )
    whole, expected = sum(map(prod, matrices)), sum(shape.parameters.values())
    if whole != expected:
        raise UserError(
            f"its matrices have {whole:,} weights; embedding, head and blocks of its sizes would have {expected:,}: it "
            "has parts that are unknown here"
        )


def assemble(
    blocks: Sequence[BlockSizes],
    *,
    family: str,
    hidden: int,
    vocabulary: int,
    tied: bool,
    heads: int,
    head_size: int,
    per_token: int = 0,
) -> ModelShape:
    """The shape of a model with these blocks. The number of key and value heads follows from the attention's weights.

    Raises `UserError` for blocks that differ, but for dense ones before those with experts, and for sizes that do not
    fit together.
    """
    dense_layers = next((number for number, block in enumerate(blocks) if block.experts), len(blocks))
    first, last = blocks[0], blocks[-1]
    expected = [first] * dense_layers + [last] * (len(blocks) - dense_layers)
    for number, (block, other) in enumerate(zip(blocks, expected, strict=True)):
        if block != other or block.attention != last.attention:
            told = ", ".join(f"{it.name} {getattr(block, it.name)}" for it in fields(block) if getattr(block, it.name))
            raise UserError(f"block {number} ({told}) differs from the others; expected blocks of the same sizes")
    key_value_heads, rest = divmod(last.attention, 2 * hidden * head_size)
    key_value_heads -= heads
    if rest or not 1 <= key_value_heads <= heads:
        raise UserError(
            f"its attention has {last.attention:,} weights, which no number of key and value heads explains"
        )
    shared, rest = divmod(last.shared_ffn, last.expert_ffn or 1)
    if rest:
        raise UserError(
            f"its shared expert has {last.shared_ffn} neurons, no multiple of an expert's {last.expert_ffn}"
        )
    mixture = last.experts > 0
    if type(per_token) is not int or not mixture <= per_token <= last.experts:
        raise UserError(f"a token uses {per_token!r:.40} of {last.experts} experts; expected a whole number of them")
    return ModelShape(
        layers=len(blocks),
        hidden=hidden,
        ffn=last.expert_ffn if mixture else last.ffn,
        heads=heads,
        vocabulary=vocabulary,
        key_value_heads=key_value_heads,
        head_size=head_size,
        family=family,
        tied=tied,
        experts=last.experts,
        experts_per_token=per_token,
        shared_experts=shared,
        dense_layers=dense_layers if mixture else 0,
        dense_ffn=first.ffn if mixture else 0,
    )


def _block(block: nn.Module, number: int) -> tuple[BlockSizes, Experts | None]:
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    mixture = block_experts(block, number)
    if mixture:
        inside = set(mixture.module.modules())
        shared = mixture.shared.down.shape[1] if mixture.shared else 0
        widths = {"experts": mixture.count, "expert_ffn": mixture.neurons, "shared_ffn": shared}
    else:
        ffn = ffn_of(block, number)
        inside, widths = {ffn.gate, ffn.up, ffn.down}, {"ffn": ffn.neurons}
    attention = {name: module for name, module in linears.items() if module not in inside}
    if strange := [name for name in attention if name.rpartition(".")[2] not in ATTENTION]:
        raise UserError(f"block {number} has {strange[0]}, which is of another attention than queries, keys and values")
    return BlockSizes(sum(module.weight.numel() for module in attention.values()), **widths), mixture


def _family(blocks: nn.ModuleList) -> str:
    """Whose names the matrices of the FFNs have. All known mixtures have those of Llama."""
    names = {name.rpartition(".")[2] for name, module in blocks.named_modules() if isinstance(module, nn.Linear)}
    return next((family for family, ffn in FFN_NAMES.items() if set(ffn) <= names), "llama")
