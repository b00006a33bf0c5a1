"""Slow, obvious residency policies with sets and lists: the oracles of `toolkit.policies`."""

from itertools import combinations


class Lru:
    """A list of units, the one used longest ago first."""

    def __init__(self, rows):
        self.rows, self.order = rows, []

    def step(self, needed):
        before = set(self.order)
        self.order = [unit for unit in self.order if unit not in needed] + sorted(needed)
        while len(self.order) > self.rows:
            self.order.pop(0)
        return before - set(self.order), set(self.order) - before


def fewest_loads(future, rows):
    """The fewest loads with which any choice of what stays serves these tokens: all choices are tried."""
    states = {frozenset(): 0}  # what is held after the tokens so far -> the fewest loads
    for needed in map(frozenset, future):
        after = {}
        for held, loads in states.items():
            idle = sorted(held - needed)
            loads += len(needed - held)
            for count in range(min(len(idle), rows - len(needed)) + 1):
                for staying in combinations(idle, count):
                    state = needed | set(staying)
                    after[state] = min(loads, after.get(state, loads))
        states = after
    return min(states.values())


class TwoLevel:
    """Experts in memory as a dictionary of sets of neurons, the expert used longest ago first."""

    def __init__(self, neurons, slots):
        self.neurons, self.slots, self.held = neurons, slots, {}

    def step(self, needed):
        """The experts that a token evicts and the neurons that it loads, given the neurons that it needs."""
        before = set(self.held)
        self.held |= {expert: self.held.pop(expert, set()) for expert in sorted(needed)}
        while len(self.held) > self.slots:
            del self.held[next(iter(self.held))]
        load = {}
        for expert, some in needed.items():
            wanted = set(range(self.neurons)) if some is None else set(some)
            if wanted - self.held[expert]:
                load[expert] = sorted(wanted - self.held[expert])
            self.held[expert] |= wanted
        return sorted(before - set(self.held)), load
