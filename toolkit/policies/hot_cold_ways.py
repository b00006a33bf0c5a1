"""Systems that share a model's neurons between a GPU and a larger memory (HERMES, sections V-A2 and V-C)."""

from dataclasses import dataclass

from toolkit.errors import unknown

COLD = ("pcie", "cpu", "dimms", "gpus")
HOT = ("nothing", "layers", "random", "frequent")
UNPINNED_GB_S = 10.19  # of Accelerate's copies over PCIe 4.0 (ENDOR, section 3.4)
RANK = 1000  # of Deja Vu's predictors (Liu et al., ICML 2023, section 4)
ADJUSTS = ("", "token", "layer", "both")


@dataclass(frozen=True)
class HotColdWay:
    """The units that a system computes with, and where.

    Args:
        sparse: only active neurons are computed; else all.
        cold: what is not on the GPU is copied to it by `pcie`, or computed by the host's `cpu` or by near-data `dimms`;
            with `gpus` the machine's device is several, which hold the model together and share each product.
        hot: what stays on the GPU: nothing, whole layers, random neurons, or those most frequently active.
        adjusts: which states tell the neurons that are swapped while tokens are generated: those that follow the last
            tokens, those that follow the layer before, or the sum of both (section IV-C). Empty: none are swapped.
        remaps: DIMMs exchange neurons once a window (section IV-D).
        overlaps: copies run beside products.
        predictor_rank: of a trained low-rank predictor on the GPU, which names the active FFN neurons; 0 for none.
        link_gb_s: what copies reach where that is less than the machine's link.

    Raises `UserError` for an unknown word.
    """

    sparse: bool
    cold: str
    hot: str = "layers"
    adjusts: str = ""
    remaps: bool = False
    overlaps: bool = True
    predictor_rank: int = 0
    link_gb_s: float = float("inf")

    def __post_init__(self):
        """Refuse unknown words."""
        for name, known in {"cold": COLD, "hot": HOT, "adjusts": ADJUSTS}.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)


SYSTEMS = {
    "accelerate": HotColdWay(sparse=False, cold="pcie", overlaps=False, link_gb_s=UNPINNED_GB_S),
    "flexgen": HotColdWay(sparse=False, cold="pcie"),
    "deja_vu": HotColdWay(sparse=True, cold="pcie", hot="nothing", overlaps=False, predictor_rank=RANK),
    "sparse_offload": HotColdWay(sparse=True, cold="pcie", hot="frequent", overlaps=False, predictor_rank=RANK),
    "hermes_host": HotColdWay(sparse=True, cold="cpu", hot="frequent", adjusts="both"),
    "hermes_base": HotColdWay(sparse=False, cold="dimms"),
    "hermes": HotColdWay(sparse=True, cold="dimms", hot="frequent", adjusts="both", remaps=True),
    "tensorrt": HotColdWay(sparse=False, cold="gpus"),
}
ABLATION = {  # each step of section V-C; the last is `SYSTEMS["hermes"]`
    "random": HotColdWay(sparse=True, cold="dimms", hot="random"),
    "partition": HotColdWay(sparse=True, cold="dimms", hot="frequent"),
    "token_adjustment": HotColdWay(sparse=True, cold="dimms", hot="frequent", adjusts="token"),
    "layer_adjustment": HotColdWay(sparse=True, cold="dimms", hot="frequent", adjusts="layer"),
    "adjustment": HotColdWay(sparse=True, cold="dimms", hot="frequent", adjusts="both"),
    "hermes": SYSTEMS["hermes"],
}
