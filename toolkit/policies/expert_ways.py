"""Ways of bringing a token through a mixture of experts that does not fit the GPU (CORM, figure 8, table 1)."""

from dataclasses import dataclass, replace

from toolkit.errors import unknown

BITS = (2, 4, 16)


@dataclass(frozen=True)
class ExpertWay:
    """The parts of a token's experts that a way loads, when, and the parts that it keeps.

    Args:
        name: as the figures have it.
        sparse: only an expert's active neurons are loaded, unless loading it whole is quicker (section 4.1).
        mixed: experts that are seldom used are stored in 2 bits (section 4.1).
        prefetch: experts, and with `sparse` their neurons, are predicted a layer ahead and loaded while the layer
            before is computed (section 4.2).
        cached: each layer keeps its last used experts, and with `sparse` the neurons that were loaded (section 4.3).
        exact: what was mispredicted is loaded when its layer needs it; else the token goes on with what was predicted.
        resident: all experts stay on the GPU, and nothing is loaded.
        bits: of a weight of experts that are not `mixed`: a number of `BITS`.

    Raises `UserError` for other bits.
    """

    name: str
    sparse: bool = False
    mixed: bool = False
    prefetch: bool = False
    cached: bool = False
    exact: bool = False
    resident: bool = False
    bits: int = 4

    def __post_init__(self):
        """Refuse bits that experts are not stored in."""
        if self.bits not in BITS:
            raise unknown("bits of an expert's weight", self.bits, BITS)


ON_DEMAND = ExpertWay("B")
SPARSE = replace(ON_DEMAND, name="+S", sparse=True, mixed=True)
PREFETCHED = replace(SPARSE, name="+P", prefetch=True)
CORM = replace(PREFETCHED, name="+C", cached=True)
BREAKDOWN = {way.name: way for way in (ON_DEMAND, SPARSE, PREFETCHED, CORM)}  # each adds to the one before (figure 8)
RIVALS = {
    "mixtral-offload": ExpertWay("mixtral-offload", prefetch=True, cached=True, exact=True),  # section 5.1
    "offloading": ExpertWay("offloading", bits=16),  # table 1, whose 3.9 s fit fp16
    "quantisation": ExpertWay("quantisation", resident=True, bits=2),  # table 1
    "resident": ExpertWay("resident", resident=True),  # all experts in INT4 on the GPU: not in the paper
}
EXPERT_WAYS = BREAKDOWN | RIVALS
