"""Slow, obvious counts of where zeros fall: one cell after the other."""


def zeros_by_block(mask, block):
    tall, wide = block
    shares = []
    for top in range(0, len(mask), tall):
        row = []
        for left in range(0, len(mask[0]), wide):
            cells = [cell for line in mask[top : top + tall] for cell in line[left : left + wide]]
            row.append(sum(cells) / len(cells))
        shares.append(row)
    return shares


def ell_padding(mask):
    lengths = [sum(not zero for zero in row) for row in mask]
    slots = sum(max(lengths) for _ in lengths)
    return (slots - sum(lengths)) / sum(lengths) if sum(lengths) else 0.0


def lost_to_two_four(mask):
    kept = lost = 0
    for row in mask:
        for left in range(0, len(row), 4):
            alive = sum(not zero for zero in row[left : left + 4])
            kept, lost = kept + alive, lost + max(alive - 2, 0)
    return lost / kept if kept else 0.0


def overlap(first, second):
    """Agreement and Jaccard index of the zeros."""
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    both, either = sum(a and b for a, b in pairs), sum(a or b for a, b in pairs)
    return sum(a == b for a, b in pairs) / len(pairs), both / either if either else 1.0
