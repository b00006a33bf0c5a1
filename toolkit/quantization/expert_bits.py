"""Which experts are stored in fewer bits: those that a text uses least (CORM, section 4.1)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from toolkit.errors import UserError

LOW_BITS = 2


def bits_by_usage(usage: Sequence[Float64[np.ndarray, " experts"]], low_share: float, bits: int = 4) -> list[list[int]]:
    """The bits of each expert of each layer: 2 for the share of a layer's experts that are used least, else `bits`.

    Args:
        usage: of each layer, how often each expert is used; only the order counts. The first of equal ones is low.
        low_share: of a layer's experts, rounded to whole experts.
        bits: of all others.

    Raises `UserError` for a share outside 0 to 1.
    """
    if not 0 <= low_share <= 1:
        raise UserError(f"{low_share} of the experts in {LOW_BITS} bits: expected a share from 0 to 1")
    chosen = []
    for of_layer in usage:
        low = np.argsort(of_layer, kind="stable")[: round(low_share * len(of_layer))]
        chosen.append([LOW_BITS if expert in low else bits for expert in range(len(of_layer))])
    return chosen
