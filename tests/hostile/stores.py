"""Runs of stores that were altered at random and then signed again, so that no checksum saves the reader.

    HOSTILE_CASES=100000 python -m pytest tests/hostile

Each case is refused with a `UserError` of one line, or what it holds can be used: it decodes to the same bits whatever
lay in the memory before. Weights of stores are used unverified, too, where any `ValueError`, `IndexError` or
`RuntimeError` will do. A crash, another error, more than `SECONDS` or `MEMORY_BYTES` end the process.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from toolkit.errors import UserError
from toolkit.formats import QUANTISED, READABLE, Packed, encode, packed
from toolkit.formats.scaled import Scaled
from toolkit.storage import index, shards
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

SECONDS, MEMORY_BYTES = 60, 4 << 30  # of the processor, for a case; the first compiles kernels
WILD = [0, 1, -1, 7, 1 << 15, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40), 1 << 62, (1 << 63) - 1, -(1 << 63)]
TYPES = [torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]
TYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
SPECIAL = [float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 3e38, -3e38, 1e-45]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
IN_USE = (ValueError, IndexError, RuntimeError)


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


def weight(rng: random.Random, shape: tuple[int, int]) -> torch.Tensor:
    """Small, and 2:4, so that every format holds it."""
    dtype = rng.choice(DTYPES)
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    values[:, 1::4] = values[:, 2::4] = 0
    return values.to(dtype)


def packed_in(name: str, matrix: torch.Tensor, rng: random.Random) -> Packed:
    """The matrix in a format; a quantised one may have its columns in another order."""
    if name not in QUANTISED:
        return encode(name, matrix)
    found = encode(name, matrix.float())
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return dataclasses.replace(found, permutation=order) if rng.random() < 0.5 else found


def use(weight: Packed, strict: bool) -> None:
    """Decode a weight twice and multiply with it. `strict`: it was checked, so nothing may fail and all is written."""
    with contextlib.nullcontext() if strict else contextlib.suppress(*IN_USE):
        outs = [torch.full((weight.dense_bytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
        for out in outs:
            weight.unpack_into(packed.carve(out, weight.shape, weight.dtype)[0])
        assert not strict or torch.equal(*outs), "memory that was not written, or results that differ"
    with contextlib.nullcontext() if strict else contextlib.suppress(*IN_USE):
        weight.matvec(torch.ones(weight.shape[1]))


def make_store(folder: Path, rng: random.Random) -> None:
    """Two matrices in every format, and int8 with scales."""
    matrices = {"fc1": weight(rng, (5, 36)), "fc2": weight(rng, (33, 128))}
    ops = [Op(0, op, name, packed_in(name, matrix, rng)) for name in READABLE for op, matrix in matrices.items()]
    for name in ("endor", "csr"):
        ops += [Op.of(0, op, f"int8-{name}", Scaled.encode(name, matrix.float())) for op, matrix in matrices.items()]
    files = lambda place: (place / "config.json").write_text("{}")  # noqa: E731
    write_store(folder, ops, [("norm", torch.ones(7)), ("steps", torch.tensor(3))], {"name": "toy"}, files)


def harm(store: Path, run: dict, rng: random.Random) -> None:
    """Alter a tensor of an op on the disk, most often its offsets, and sign the run anew."""
    name = rng.choice([*run["pieces"], *[name for name in run["pieces"] if "offsets" in name] * 3])
    piece, path = run["pieces"][name], store / run["shard"]
    content = bytearray(path.read_bytes())
    block = content[run["offset"] : run["offset"] + run["nbytes"]]
    kind = shards.NAMES[piece["dtype"]]
    size = kind.itemsize * math.prod(piece["shape"])
    old = torch.frombuffer(block[piece["offset"] : piece["offset"] + size] or bytearray(8), dtype=kind)
    new = altered(old, rng).contiguous().view(-1).view(torch.uint8).numpy().tobytes()[:size]
    block[piece["offset"] : piece["offset"] + len(new)] = new
    content[run["offset"] : run["offset"] + run["nbytes"]] = block
    path.write_bytes(content)
    run["sha256"] = hashlib.sha256(block).hexdigest()


def attack_store(folder: Path, rng: random.Random, record: dict) -> str:
    """A store whose runs were altered; `record` is the sound index."""
    shutil.copytree(folder / "store", store := folder / "copy")
    record = copy.deepcopy(record)
    for _ in range(rng.choice([1, 2, 4])):
        harm(store, rng.choice(record["ops"]), rng)
    (store / index.FILE).write_text(json.dumps(record | {"sha256": index.digest(record)}))
    opened = Store.open(store)
    try:
        opened.verify()
        told = ""
    except UserError as error:
        told = str(error)
    sound = not told
    assert "\n" not in told
    for layer in opened.layers.values():
        with contextlib.nullcontext() if sound else contextlib.suppress(UserError):
            for found in layer.view(opened.shards[layer.shard].content(layer.offset, layer.nbytes)).values():
                use(found, strict=sound)
    return "verified" if sound else "not verified"


class Cases:
    """Stores: altered copies of one that is made anew at times."""

    def __init__(self, folder: Path):
        self.folder, self.record = folder, None

    def __call__(self, case: int, rng: random.Random) -> str:
        """Try a case, and say how it ended."""
        folder = self.folder
        if self.record is None or rng.random() < 0.02:
            shutil.rmtree(folder / "store", ignore_errors=True)
            make_store(folder / "store", rng)
            self.record = json.loads((folder / "store" / index.FILE).read_text())
            del self.record["sha256"]
        ended = attack_store(folder, rng, self.record)
        shutil.rmtree(folder / "copy")
        return ended


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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Cases(Path(place)))
