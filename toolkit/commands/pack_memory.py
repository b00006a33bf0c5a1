"""The memory and the disk that `pack` needs, before it begins."""

import sys
from argparse import Namespace
from collections import Counter

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.files import check_space
from toolkit.memory_limits import bytes_of

BLOCKS = 1.5  # a block as it is read, and what is written of it
MATRICES = 4.5  # copies of the largest matrix in float32
CLOSE = 1.1  # of free memory may be needed: the needs are an upper bound
GATES = 4  # tensors as wide as an FFN that a block has for a window
SHARED = 2  # linears of one width in a block that share an input: gate and up projection, or queries, keys and values


def check_needs(options: Namespace, model, layout, gram: bool) -> None:
    """Say what packing takes. Raises `UserError` if `--memory` or the disk is too small, with the least that works."""
    present = memory_limits.anonymous_bytes()
    needed = needed_bytes(model, options.windows, options.sequence_length, gram, present)
    written = written_bytes(model, layout)
    check_space(options.out.parent, written)
    print(
        f"{options.out}: takes up to {needed / 1e9:.1f} GB of memory, and {written / 1e9:.1f} GB of disk",
        file=sys.stderr,
    )
    limit = bytes_of("--memory", options.memory)
    for words, most in ((f"--memory {options.memory}", limit), ("the memory that is free", CLOSE * _available())):
        if most is not None and most < needed:
            advice = "fewer --windows or a shorter --sequence-length take less"
            raise UserError(f"{words}: {options.method} needs {_up(needed)}; {advice}")


def needed_bytes(model, windows: int, length: int, gram: bool, present: int) -> int:
    """The most memory that packing takes: the process, a block, its statistics, and the hidden states.

    The process has `present` bytes. Beside weights it takes what `run` takes, since the folder is run in the end.
    """
    from toolkit.models import decoder_blocks, decoder_linears
    from toolkit.offload.logit_check import PROMPT, REST
    from toolkit.offload.overhead import Overhead, TextRoom

    config, itemsize = model.config.get_text_config(), model.dtype.itemsize
    blocks = decoder_blocks(model)
    linears = [decoder_linears(block).values() for block in blocks]
    block = max(sum(tensor.nbytes for tensor in block.state_dict().values()) for block in blocks)
    matrix = max(linear.weight.numel() for every in linears for linear in every)
    widest = max(max(linear.weight.shape) for every in linears for linear in every)
    hidden = windows * length * config.hidden_size * itemsize
    changing = 4 * MATRICES * matrix
    if gram:
        sizes = max((Counter(linear.in_features for linear in every) for every in linears), key=_grams)
        changing += 4 * (_grams(sizes) + max(sizes) ** 2)  # the largest one's factor
    running = GATES * length * widest * itemsize
    process = present + Overhead.of(config, TextRoom(PROMPT, REST), compiles=True).nbytes
    return round(process + BLOCKS * block + hidden + max(changing, running))


def written_bytes(model, layout) -> int:
    """The bytes of the packed folder, about."""
    every = sum(parameter.nbytes for parameter in model.parameters())
    return layout.expected_bytes(model) + every - sum(weight.nbytes for weight in layout.weights(model))


def _grams(sizes: Counter) -> int:
    """The numbers of all Gram matrices of a block, by how many linears have so many inputs."""
    return sum(-(-count // SHARED) * size**2 for size, count in sizes.items())


def _available() -> int:
    """The memory that the process may have, with what it has already."""
    return memory_limits.free_bytes() + memory_limits.anonymous_bytes()


def _up(nbytes: int) -> str:
    return f"{-(-nbytes // 10**7) / 100:.2f} GB"
