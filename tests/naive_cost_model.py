"""The cost model again: pipelined, tick by tick, every resource looks each tick for what it may work on."""


def relative_errors(fixed_s, s_per_gb, sizes_gb, times_s):
    """How far a line is off the times, as shares of them, added up."""
    return sum(abs(fixed_s + s_per_gb * size - time) / time for size, time in zip(sizes_gb, times_s, strict=True))


def ticks(nbytes, fixed, each):
    """Whole ticks of a stage, with `each` for every GB that has begun."""
    while nbytes > 0:
        fixed, nbytes = fixed + each, nbytes - 10**9
    return fixed


def pipelined(layers, buffers):
    """{(layer, operation, step): (start, end)} in whole ticks.

    layers: per layer a list of operations, each a list of (resource, ticks) with ticks of 1 or more. A resource serves
    its steps in the order of layers, operations and steps. A layer that is not transferred (no "read" or "copy") needs
    no buffer.
    """
    steps = [
        ((number, op, place), resource, ticks)
        for number, ops in enumerate(layers)
        for op, way in enumerate(ops)
        for place, (resource, ticks) in enumerate(way)
    ]
    moved = [number for number, ops in enumerate(layers) if any(r in ("read", "copy") for way in ops for r, _ in way)]
    queues = {resource: [step for step in steps if step[1] == resource] for _, resource, _ in steps}
    started, done, now = {}, {}, 0

    def layer_done(number):
        return all(key in done for key, _, _ in steps if key[0] == number)

    def may_start(key):
        number, op, place = key
        if place > 0:
            return (number, op, place - 1) in done
        rank = moved.index(number) if number in moved else -1
        return rank < buffers or layer_done(moved[rank - buffers])

    while len(done) < len(steps):
        for key, _, ticks in steps:
            if key in started and key not in done and started[key] + ticks == now:
                done[key] = now
        for queue in queues.values():
            waiting = [step for step in queue if step[0] not in done]
            if waiting and waiting[0][0] not in started and may_start(waiting[0][0]):
                started[waiting[0][0]] = now
        now += 1
    return {key: (started[key], done[key]) for key in done}
