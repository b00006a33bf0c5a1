"""The work of a mixture of experts beside its matrix products, in fp32, on one or more tokens.

Shazeer et al., "Outrageously Large Neural Networks", 2017. Vectors are NumPy arrays, which the functions read and write
in place; nothing is checked, as in `toolkit.kernels.single_token`.
"""

import numba

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.exponential import exp
from toolkit.kernels.single_token import SUMS


@compiled
def route(scores, renormalised, experts, weights):
    """The experts of each token and the weights of their outputs, both [tokens, used], by scores [tokens, experts].

    They are those with the highest scores, the highest first; of equal ones the first. A weight is the expert's share
    in the softmax of all scores; `renormalised` weights of a token add up to 1.
    """
    used = experts.shape[1]
    for token in range(len(scores)):
        for rank in range(used):
            best = -1
            for expert in range(scores.shape[1]):
                taken = False
                for earlier in range(rank):
                    taken |= experts[token, earlier] == expert
                if not taken and (best < 0 or scores[token, expert] > scores[token, best]):
                    best = expert
            experts[token, rank] = best
        highest, total = scores[token, experts[token, 0]], numba.float32(0)
        if renormalised:
            for rank in range(used):
                total += exp(scores[token, experts[token, rank]] - highest)
        else:
            for expert in range(scores.shape[1]):
                total += exp(scores[token, expert] - highest)
        for rank in range(used):
            weights[token, rank] = exp(scores[token, experts[token, rank]] - highest) / total


@compiled(fastmath=SUMS)
def mix(outputs, places, weights, out):
    """The weighted sum of each token's outputs into out [tokens, size], in the order of `places` [tokens, used].

    A place is a row of `outputs`.
    """
    for token in range(len(places)):
        for i in range(out.shape[1]):
            out[token, i] = 0
        for rank in range(places.shape[1]):
            place, weight = places[token, rank], weights[token, rank]
            for i in range(out.shape[1]):
                out[token, i] += weight * outputs[place, i]


@compiled
def add_gated(x, score, more):
    """Add x [tokens, size] · sigmoid(score [tokens, 1]) to `more`, in place."""
    for token in range(len(x)):
        share = numba.float32(1) / (numba.float32(1) + exp(-score[token, 0]))
        for i in range(x.shape[1]):
            more[token, i] += share * x[token, i]
