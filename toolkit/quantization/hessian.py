"""The factor of the inverse Hessian, with as much damping as it takes."""

import logging

from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.pruning.sparsegpt import inverse_factor

LEAST, MOST = 1e-3, 10.0  # damping that is tried where the one asked for is not enough

log = logging.getLogger(__name__)


def damped_factor(gram: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """The result of `inverse_factor`; damping is raised tenfold as long as the Hessian is not positive definite.

    Rounding can make the Hessian of correlated inputs indefinite. A warning tells the damping that was taken. Raises
    `UserError` for statistics that are not finite, or if a damping of `MOST` is not enough.
    """
    if not gram.isfinite().all():
        raise UserError("the calibration statistics are not finite; load the model in bfloat16 or float32")
    taken = damping
    while True:
        try:
            factor = inverse_factor(gram, taken)
        except UserError:
            if taken >= MOST:
                raise
            taken = max(10 * taken, LEAST)
            continue
        if taken != damping:
            words = "the Hessian of %d inputs is not positive definite with damping %g: damping %g was taken"
            log.warning(words, len(gram), damping, taken)
        return factor
