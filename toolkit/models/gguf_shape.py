"""The sizes of the model in a GGUF file, by its header.

gguf_shape(read_header(Path("model.gguf")))
"""

from collections.abc import Mapping

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.models.gguf_header import LAYERS, GgufHeader
from toolkit.models.shape_of import BlockSizes, assemble

FFN = "ffn_"  # how the names of the tensors of an FFN begin
FUSED_GATE = ("phi3", "chatglm", "glm4")  # architectures whose up projection holds the gate's rows, too


def gguf_shape(header: GgufHeader) -> ModelShape:
    """The sizes of the model in a file. Raises `UserError`, which names the architecture, as `assemble` does."""
    try:
        return _shape(header)
    except Exception as error:  # whatever fails in a foreign file
        reason = error if isinstance(error, UserError) else "its sizes do not fit together"
        raise UserError(f"{header.file}: architecture {header.architecture!r:.99}: {reason}") from error


def _shape(header: GgufHeader) -> ModelShape:
    embedding = header.tensors.get("token_embd.weight")
    heads, count = header.size("attention.head_count"), header.size("block_count")
    if embedding is None or not heads or not count:
        raise UserError("expected a token embedding, and how many heads and blocks there are")
    hidden = embedding.shape[1]
    matrices: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in header.tensors.items():
        part, _, rest = name.removeprefix(LAYERS).partition(".")
        if name.startswith(LAYERS) and part.isdecimal():
            matrices.setdefault(int(part), {})[rest.removesuffix(".weight")] = tensor.shape
    if sorted(matrices) != list(range(count)):
        raise UserError(f"expected tensors of blocks 0 to {count - 1}")
    fused = header.architecture in FUSED_GATE
    return assemble(
        [_block(matrices[number], fused) for number in sorted(matrices)],
        [tensor.shape for tensor in header.tensors.values()],
        hidden=hidden,
        vocabulary=embedding.shape[0],
        tied="output.weight" not in header.tensors,
        heads=heads,
        per_token=header.size("expert_used_count") or 0,
    )


def _block(matrices: Mapping[str, tuple[int, ...]], fused: bool) -> BlockSizes:
    attention = tuple(it[:2] for name, it in matrices.items() if len(it) == 2 and not name.startswith(FFN))
    down, shared = matrices.get("ffn_down_exps"), matrices.get("ffn_down_shexp", (0, 0))
    if down:
        return BlockSizes(attention, experts=down[0], expert_ffn=down[2], shared_ffn=shared[1])
    if "ffn_down" not in matrices:
        raise UserError("a block has no ffn_down")
    return BlockSizes(attention, matrices["ffn_down"][1], fused or "ffn_gate" in matrices)
