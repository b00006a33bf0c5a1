"""The feed-forward network (FFN) of each decoder block: its linear layers by their role."""

from dataclasses import dataclass

from torch import nn

from toolkit.errors import UserError
from toolkit.models.blocks import decoder_blocks, decoder_linears

# the last part of the names of gate, up and down projection; None where there is no gate
FORMS = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma
    (None, "up_proj", "down_proj"),  # Nemotron, Arcee
    (None, "fc1", "fc2"),  # OPT, Phi
    (None, "fc_in", "fc_out"),  # GPT-J, CodeGen
    (None, "c_fc", "c_proj"),  # Starcoder2, GPT-Neo
    (None, "dense_h_to_4h", "dense_4h_to_h"),  # Falcon, Persimmon
)


@dataclass(frozen=True)
class FFN:
    """`down(act(up(x)))`, or `down(act(gate(x)) · up(x))` with a gate (SwiGLU). Neuron i is column i of `down`."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None = None

    @property
    def neurons(self) -> int:
        """Intermediate neurons: the inputs of the down projection."""
        return self.down.in_features


def decoder_ffns(model: nn.Module) -> list[FFN]:
    """The FFN of each decoder block, in order.

    Raises `UserError` for a block whose linears have none of the names in `FORMS`, or more than one FFN (experts), and
    as `decoder_blocks` and `decoder_linears` do.
    """
    return [ffn_of(block, number) for number, block in enumerate(decoder_blocks(model))]


def ffn_of(block: nn.Module, number: int) -> FFN:
    """The FFN of one decoder block. Raises `UserError`, with the block's number, as `decoder_ffns` does."""
    found: dict[str, list[nn.Linear]] = {}
    for name, linear in decoder_linears(block).items():
        found.setdefault(name.rpartition(".")[2], []).append(linear)
    for gate, up, down in FORMS:
        names = [name for name in (up, down, gate) if name]
        if found.keys() >= set(names):
            if any(len(found[name]) > 1 for name in names):
                raise UserError(f"block {number} has {len(found[up])} FFNs (experts); choose a model with one a block")
            return FFN(*(found[name][0] for name in names))
    known = "; ".join(", ".join(name for name in form if name) for form in FORMS)
    raise UserError(
        f"block {number} has no known FFN among {', '.join(found)}; expected linears named {known}: add the names to "
        "FORMS in toolkit/models/ffn.py"
    )
