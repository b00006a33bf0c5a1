"""The experts of each decoder block as views: transformers' fused 3-D parameters, and those of a split model.

    for experts in decoder_experts(model):
        ids, weights = experts.route(x)
        gate, up, down_transposed = experts.matrices(ids[0, 0])

A walk over `nn.Linear` misses these matrices. Pruning in place and packing work on the views.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.blocks import decoder_blocks

RENORMALISED, SOFTMAX, ONES = "renormalised", "softmax", "ones"
DEPENDS = None  # on the router's `norm_topk_prob`
ROUTERS = {  # the class of a router: how weights follow from its scores
    "MixtralTopKRouter": RENORMALISED,
    "Qwen2MoeTopKRouter": DEPENDS,
    "Qwen3MoeTopKRouter": DEPENDS,
    "OlmoeTopKRouter": DEPENDS,
    "DeepseekV2TopkRouter": SOFTMAX,
    "SplitRouter": ONES,
}
SHARED = ("shared_experts", "shared_expert")  # names in a mixture of the FFN that every token uses
SHARED_GATE = "shared_expert_gate"


@dataclass(frozen=True, eq=False)
class SharedFFN:
    """The FFN of a mixture that every token uses: views of its weights."""

    gate: Float[Tensor, "neurons hidden"]
    up: Float[Tensor, "neurons hidden"]
    down: Float[Tensor, "hidden neurons"]
    share: Float[Tensor, "1 hidden"] | None = None
    """Its output is multiplied by sigmoid(share · x) (Qwen2-MoE); None: by 1."""


@dataclass(frozen=True, eq=False)
class Experts:
    """The mixture of one decoder block: views of its parameters, nothing copied.

    `form` says how weights follow from scores: "renormalised" (softmax over all, the top k scaled to a sum of 1:
    Mixtral, Qwen3-MoE), "softmax" (softmax over all, the top k as they are: OLMoE, DeepSeekMoE, Qwen2-MoE), or "ones"
    (a weight of 1 each: `toolkit.models.mixture`).
    """

    module: nn.Module
    """Takes and gives [..., hidden] in the block."""
    gate_up: Float[Tensor, "experts gate_and_up hidden"]
    """Rows of the gate, then rows of the up projection."""
    down: Float[Tensor, "experts hidden neurons"]
    router: Float[Tensor, "experts hidden"]
    per_token: int
    form: str
    shared: SharedFFN | None = None
    scale: float = 1.0
    """The factor of the routed experts' weights (DeepSeek-V2)."""
    float32_scores: bool = False
    """Whether the router's product is computed in float32, whatever the model's dtype (DeepSeek-V2)."""

    @property
    def count(self) -> int:
        """Routed experts."""
        return self.gate_up.shape[0]

    @property
    def neurons(self) -> int:
        """Neurons of one routed expert."""
        return self.down.shape[2]

    @property
    def hidden(self) -> int:
        """Width of the block's input and output."""
        return self.down.shape[1]

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens experts"]:
        """The router's product with its input, as the model computes it."""
        dtype = torch.float32 if self.float32_scores else self.router.dtype
        return functional.linear(x.to(dtype), self.router.to(dtype)).float()

    @torch.no_grad()
    def route(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Int64[Tensor, "tokens k"], Float32[Tensor, "tokens k"]]:
        """The experts of each token, in falling order of their scores, and the weights of their outputs."""
        scores = self.scores(x)
        ids = scores.topk(self.per_token, dim=-1).indices
        return ids, self.weigh(scores, ids)

    def weigh(
        self, scores: Float32[Tensor, "tokens experts"], ids: Int64[Tensor, "tokens k"]
    ) -> Float32[Tensor, "tokens k"]:
        """The weights of these experts' outputs, as if the router had chosen them."""
        if self.form == ONES:
            return torch.ones_like(ids, dtype=torch.float32)
        weights = scores.softmax(dim=-1).gather(-1, ids)
        if self.form == RENORMALISED:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale

    def matrices(
        self, expert: int
    ) -> tuple[Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"]]:
        """Gate, up and the transposed down projection of one expert, as views: row i belongs to neuron i.

        Raises `UserError` for an expert that the block does not have.
        """
        expert = int(expert)
        if not 0 <= expert < self.count:
            raise UserError(f"expert {expert}: the block has experts 0 to {self.count - 1}")
        gate, up = self.gate_up[expert].split(self.neurons)
        return gate, up, self.down[expert].T


def decoder_experts(model: nn.Module) -> list[Experts | None]:
    """The experts of each decoder block, in order; None for a dense block.

    Raises `UserError` for a mixture of another form than those of `ROUTERS`, such as DeepSeek-V3's.
    """
    return [block_experts(block, number) for number, block in enumerate(decoder_blocks(model))]


def mixtures_by_layer(model: nn.Module) -> dict[int, Experts]:
    """The mixtures of a model by the number of their block; dense blocks have none.

    Raises `UserError` as `decoder_experts` does, and for a model without one.
    """
    found = {number: experts for number, experts in enumerate(decoder_experts(model)) if experts is not None}
    if not found:
        raise UserError(
            f"{type(model).__name__} has no experts of a known form: choose a mixture of experts such as Mixtral"
        )
    return found


def block_experts(block: nn.Module, number: int = 0) -> Experts | None:
    """The experts of one decoder block. Raises `UserError`, with the block's number, as `decoder_experts` does."""
    found = list(_mixtures(block))
    if not found:
        return None
    if len(found) > 1:
        raise UserError(f"block {number} has {len(found)} mixtures of experts; expected one")
    (module,) = found
    router, experts = getattr(module, "gate", getattr(module, "router", None)), module.experts
    form = _form(router, number)
    _check_shapes(experts, router.weight, number)
    return Experts(
        module=module,
        gate_up=experts.gate_up_proj.data,
        down=experts.down_proj.data,
        router=router.weight.data,
        per_token=router.top_k,
        form=form,
        shared=_shared(module),
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
        float32_scores=type(router).__name__.startswith("Deepseek"),
    )


def _mixtures(block: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block that hold fused experts."""
    for module in block.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and any(p.ndim == 3 for p in experts.parameters(recurse=False)):
            yield module


def _form(router: nn.Module | None, number: int) -> str:
    name = type(router).__name__
    if name not in ROUTERS:
        raise UserError(f"block {number} routes by {name}; known are {', '.join(ROUTERS)}: choose a model with one")
    method = getattr(router, "topk_method", "greedy")
    if method != "greedy":
        raise UserError(f"block {number} routes by the method {method!r}; expected 'greedy'")
    return ROUTERS[name] or (RENORMALISED if router.norm_topk_prob else SOFTMAX)


def _check_shapes(experts: nn.Module, router: Tensor, number: int) -> None:
    """Raise `UserError` unless the fused parameters have the shapes that `Experts` describes."""
    gate_up, down = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    fits = (
        all(p is not None and p.ndim == 3 and p.is_floating_point() for p in (gate_up, down))
        and gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
        and router.shape == (len(down), down.shape[1])
    )
    if not fits:
        raise UserError(
            f"block {number}: its fused experts ({type(experts).__name__}) are no gate_up_proj (experts × 2 neurons × "
            "hidden) and down_proj (experts × hidden × neurons) of floating-point numbers beside their router"
        )


def _shared(module: nn.Module) -> SharedFFN | None:
    ffn = next((getattr(module, name) for name in SHARED if getattr(module, name, None) is not None), None)
    if ffn is None:
        return None
    share = getattr(module, SHARED_GATE, None)
    parts = (ffn.gate_proj.weight.data, ffn.up_proj.weight.data, ffn.down_proj.weight.data)
    return SharedFFN(*parts, share=None if share is None else share.weight.data)
