"""Slow, obvious statistics of activations, with sets of neurons. `active` is [sequences][tokens][neurons]."""


def sets(active):
    return [[{i for i, fires in enumerate(token) if fires} for token in sequence] for sequence in active]


def used(active, k, neurons):
    """The mean and the largest share of neurons over all windows of k tokens."""
    shares = [
        len(set().union(*sequence[start : start + k])) / neurons
        for sequence in sets(active)
        for start in range(len(sequence) - k + 1)
    ]
    return sum(shares) / len(shares), max(shares)


def shared(active, distance):
    """Shared neurons over the later token's, and over either's, over all pairs."""
    pairs = [pair for sequence in sets(active) for pair in zip(sequence, sequence[distance:], strict=False)]
    both = sum(len(one & other) for one, other in pairs)
    return both / sum(len(other) for _, other in pairs), both / sum(len(one | other) for one, other in pairs)


def together(active, i, j):
    """The share of neuron i's tokens that neuron j has, too."""
    tokens = [token for sequence in sets(active) for token in sequence if i in token]
    return sum(j in token for token in tokens) / len(tokens) if tokens and i != j else 0.0


class Window:
    """A sliding window of whole sets: the current token's and those of the tokens before it, as many as fit."""

    def __init__(self, tokens, rows):
        self.tokens, self.rows, self.past, self.held = tokens, rows, [], set()

    def step(self, active):
        self.past = [set(active), *self.past][: self.tokens]
        # neurons that a shrunken window gave up do not come back until a token needs them
        past = [self.past[0], *(one & self.held for one in self.past[1:])]
        while len(set().union(*past)) > self.rows:
            past.pop()
        before, self.held = self.held, set().union(*past)
        return before - self.held, self.held - before
