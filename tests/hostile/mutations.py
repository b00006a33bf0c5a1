"""Alterations of files at random, for fuzzers: wild numbers and texts, tensors of other types and shapes, bytes.

Files of tensors are signed again after they were altered, so that no checksum saves the reader. Every draw is from a
`random.Random`, so the number of a case is enough to repeat it.
"""

import contextlib
import json
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.errors import UserError
from toolkit.tensor_files import CHECKSUM, checksum

SECONDS, MEMORY_BYTES = 60, 4 << 30  # of the processor, for a case; the first compiles kernels
WILD = [0, 1, -1, 7, 1 << 15, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40), 1 << 62, (1 << 63) - 1, -(1 << 63)]
WILD_SHAPES = [[0, 1 << 50], [1 << 40, 0], [1 << 62, 4], [-1, 4], [True, 4], [4.0, 4], [4], [0, 0], [1 << 31, 1 << 31]]
WILD_VALUES = [*WILD, 4096.0, 1e308, True, None, "", "\n", "é", [], {}, [[]], {"a": 1}, *WILD_SHAPES]
WILD_VALUES += [10**400, float("nan"), float("inf"), "\ud800", "[" * 3000, "x" * 100_000]
WILD_TEXTS = ["", "null", "3", "-1", "[1e999, 2]", "NaN", "[]", "{}", "[null]", "é", "\n", "[" * 100_000, '"\\ud800"']
TYPES = [torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]
TYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
SPECIAL = [float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 3e38, -3e38, 1e-45]


def altered(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A tensor with some of its bytes or numbers, its length, its type or its shape changed."""
    kinds = ["element", "element", "element", "wrap", "bits", "swap", "cut", "type", "shape", "rank"]
    kind = rng.choice(kinds + ["special"] * 3 * tensor.is_floating_point())
    flat = tensor.clone().view(-1)
    if kind == "cut":
        return flat[: rng.randrange(len(flat) + 1)].clone()
    if kind == "type":
        return tensor.to(rng.choice(TYPES))
    if kind == "rank":
        return rng.choice([flat, tensor[None], tensor[..., None], tensor.T.contiguous() if tensor.ndim == 2 else flat])
    if kind == "shape" or not len(flat):
        shapes = [(0, 1 << 50), (1 << 40, 0), (0,), (1,), (0, 0), (1, 1), (), (1,) * 30]
        return torch.zeros(rng.choice(shapes), dtype=tensor.dtype)
    if kind == "special":
        places = [rng.randrange(len(flat)) for _ in range(rng.choice([1, 1, len(flat)]))]
        wide = flat.double()
        wide[places] = rng.choice(SPECIAL)
        return wide.to(tensor.dtype).view(tensor.shape)
    numbers = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    if kind == "bits":
        data = flat.view(torch.uint8)
        for _ in range(rng.choice([1, 1, 3, 30])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "swap":
        one, other = rng.randrange(len(flat)), rng.randrange(len(flat))
        numbers[[one, other]] = numbers[[other, one]]
    else:
        places = [rng.randrange(len(flat)) for _ in range(rng.choice([1, 1, 2]))]
        numbers[places] = torch.tensor([rng.choice(WILD) for _ in places]).to(numbers.dtype)
        if kind == "wrap" and len(flat) > 3:  # steps that are not negative, once they have wrapped
            numbers[1:4] = torch.tensor([1 << 62, (1 << 63) - 1, -(1 << 63) + 1]).to(numbers.dtype)
    return flat.view(tensor.shape)


def places(value: object, at: tuple = ()) -> Iterator[tuple]:
    """The path to every value in a record."""
    yield at
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*at, key))


def alter_record(record: dict | list, rng: random.Random) -> None:
    """Change one value somewhere in a record, to one that is near it or a wild one; or remove it."""
    at = rng.choice([*places(record)][1:] or [None])
    inside = record
    with contextlib.suppress(KeyError, IndexError, TypeError):  # an entry that an alteration before removed
        for key in at[:-1]:
            inside = inside[key]
        old = inside[at[-1]]
        near = [old + rng.choice([1, -1, 256, 4096, -4096])] if type(old) is int else []
        near += [old + rng.choice(["\n", "/../x", "\0", "\u2028"])] if isinstance(old, str) else []
        inside[at[-1]] = rng.choice(near or WILD_VALUES) if rng.random() < 0.5 else rng.choice(WILD_VALUES)
        if rng.random() < 0.1:
            del inside[at[-1]]


def altered_text(text: str, rng: random.Random, words: list[str]) -> str:
    """Another text in its place: JSON with one value changed, one of some words, or a wild one."""
    with contextlib.suppress(ValueError, RecursionError):
        if rng.random() < 0.6 and isinstance(record := json.loads(text), dict | list):
            alter_record(record, rng)
            return json.dumps(record)
    return rng.choice(words + WILD_TEXTS)


def alter_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> None:
    """Change one tensor, or which tensors there are."""
    if not tensors:
        return
    one, other, kind = rng.choice(sorted(tensors)), rng.choice(sorted(tensors)), rng.random()
    if kind < 0.8:
        tensors[one] = altered(tensors[one], rng)
    elif kind < 0.9:
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif kind < 0.95:
        del tensors[one]
    else:
        tensors[rng.choice(["", one + ".", "." + one, "-1.x", "9" * 5000 + ".x", "é"])] = tensors[one].clone()


def alter_file(path: Path, rng: random.Random, words: list[str]) -> None:
    """Alter a file that `toolkit.tensor_files` wrote, and sign it anew; now and then its bytes as well.

    `words` are texts that its header may have in place of one.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata()
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.7:
            alter_tensors(tensors, rng)
        elif rng.random() < 0.9:
            name = rng.choice(sorted(metadata.keys() - {CHECKSUM}))
            metadata[name] = altered_text(metadata[name], rng, words)
        else:
            del metadata[rng.choice(sorted(metadata))]
    metadata[CHECKSUM] = checksum(metadata, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    if rng.random() < 0.1:
        path.write_bytes(garbled(path.read_bytes(), rng))


def garbled(data: bytes, rng: random.Random) -> bytes:
    """Bytes cut short, with one changed (most often one of the first 300), or with others behind them."""
    changed, kind = bytearray(data), rng.choice(["first", "first", "any", "cut", "longer"])
    if kind == "cut":
        return data[: rng.randrange(len(data))]
    if kind == "longer":
        return data + rng.randbytes(rng.choice([1, 8, 5000]))
    changed[rng.randrange(min(len(data), 300) if kind == "first" else len(data))] = rng.randrange(256)
    return bytes(changed)


def one_line(error: UserError, names: str = "") -> None:
    """What the user sees is a line that a terminal can show, with a name in it."""
    assert "\n" not in str(error)
    assert 0 < len(str(error).encode()) < 2000
    assert names in str(error), f"does not name the file: {error}"


def main(try_case: Callable[[int, random.Random], str]) -> None:
    """Try the cases that the command line names, its first and how many; print how often each ended in which way.

    A case that raises an error fails, and its number and traceback go to standard error. A crash, more than `SECONDS`
    or `MEMORY_BYTES` end the process, or fail the case; the last number of standard error is that of its case.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    first, count = map(int, sys.argv[1:3])
    ends = Counter()
    for case in range(first, first + count):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        print(case, end="\r", file=sys.stderr, flush=True)
        try:
            ends[try_case(case, random.Random(case))] += 1
        except Exception:
            ends["failed"] += 1
            print(f"case {case}\n{traceback.format_exc()}", file=sys.stderr)
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(ends))
