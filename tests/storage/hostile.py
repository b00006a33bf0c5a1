"""Files and stores that were altered at random and then signed again, so that no checksum saves the reader.

    HOSTILE_CASES=100000 python -m pytest tests/storage/test_hostile.py

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
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.errors import UserError
from toolkit.formats import QUANTISED, READABLE, Packed, encode, load, packed
from toolkit.formats.scaled import Scaled
from toolkit.storage import index
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store
from toolkit.tensor_files import checksum

SECONDS, MEMORY_BYTES = 60, 4 << 30  # of the processor, for a case; the first compiles kernels
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
SHAPES = [(1, 4), (5, 36), (33, 128), (3, 4128), (0, 8), (4, 0)]
WILD = [0, 1, -1, 7, 1 << 15, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40), 1 << 62, (1 << 63) - 1, -(1 << 63)]
WILD_SHAPES = [[0, 1 << 50], [1 << 40, 0], [1 << 62, 4], [-1, 4], [True, 4], [4.0, 4], [4], [0, 0], [1 << 31, 1 << 31]]
WILD_VALUES = [*WILD, 4096.0, 1e308, True, None, "", "\n", "é", [], {}, [[]], {"a": 1}, *WILD_SHAPES]
IN_USE = (ValueError, IndexError, RuntimeError)


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


def altered(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A tensor with some of its bytes, its length, its type or its shape changed."""
    kind = rng.choice(["element", "element", "element", "wrap", "bits", "swap", "cut", "type", "shape"])
    flat = tensor.clone().view(-1)
    if kind == "cut":
        return flat[: rng.randrange(len(flat) + 1)].clone()
    if kind == "type":
        return tensor.to(rng.choice([torch.int32, torch.int64, torch.uint8, torch.float32]))
    if kind == "shape" or not len(flat):
        return torch.empty(rng.choice([(0, 1 << 50), (1 << 40, 0), (0,), (1,), (0, 0), (1, 1)]), dtype=tensor.dtype)
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


def use(weight: Packed, strict: bool) -> None:
    """Decode a weight twice and multiply with it. `strict`: it was checked, so nothing may fail and all is written."""
    with contextlib.nullcontext() if strict else contextlib.suppress(*IN_USE):
        outs = [torch.full((weight.dense_bytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
        for out in outs:
            weight.unpack_into(packed.carve(out, weight.shape, weight.dtype)[0])
        assert not strict or torch.equal(*outs), "memory that was not written, or results that differ"
    with contextlib.nullcontext() if strict else contextlib.suppress(*IN_USE):
        weight.matvec(torch.ones(weight.shape[1]))


def one_line(error: UserError) -> None:
    """What the user sees is a line that a terminal can show."""
    assert "\n" not in str(error)
    assert 0 < len(str(error).encode()) < 2000


def attack_file(folder: Path, rng: random.Random) -> str:
    """A file of one packed matrix."""
    path = folder / "file.safetensors"
    packed_in(rng.choice([*READABLE]), weight(rng, rng.choice(SHAPES)), rng).save(path)
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata()
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.7:
            name = rng.choice([*tensors])
            tensors[name] = altered(tensors[name], rng)
        elif rng.random() < 0.6:
            metadata["shape"] = rng.choice([json.dumps(rng.choice(WILD_SHAPES)), "[" * 3000, "[1e999, 2]", "", "null"])
        else:
            key = rng.choice(["dtype", "format", "version"])
            metadata[key] = rng.choice(["int8", "float16", "float64", "1", "2", *READABLE])
    metadata["sha256"] = checksum(metadata, tensors)
    save_file(tensors, path, metadata)
    if rng.random() < 0.1:  # the library's own header
        data = bytearray(path.read_bytes())
        data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
        path.write_bytes(data)
    try:
        found = load(path)
    except UserError as error:
        one_line(error)
        return "refused"
    use(found, strict=True)
    return "used"


def make_store(folder: Path, rng: random.Random) -> None:
    """Two matrices in every format, and int8 with scales."""
    matrices = {"fc1": weight(rng, (5, 36)), "fc2": weight(rng, (33, 128))}
    ops = [Op(0, op, name, packed_in(name, matrix, rng)) for name in READABLE for op, matrix in matrices.items()]
    for name in ("endor", "csr"):
        ops += [Op.of(0, op, f"int8-{name}", Scaled.encode(name, matrix.float())) for op, matrix in matrices.items()]
    files = lambda place: (place / "config.json").write_text("{}")  # noqa: E731
    write_store(folder, ops, [("norm", torch.ones(7)), ("steps", torch.tensor(3))], {"name": "toy"}, files)


def places(value, at=()):
    """The path to every value in a record."""
    yield at
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*at, key))


def harm(store: Path, run: dict, rng: random.Random) -> None:
    """Alter a tensor of an op on the disk, most often its offsets, and sign the run anew."""
    name = rng.choice([*run["pieces"], *[name for name in run["pieces"] if "offsets" in name] * 3])
    piece, path = run["pieces"][name], store / run["shard"]
    content = bytearray(path.read_bytes())
    block = content[run["offset"] : run["offset"] + run["nbytes"]]
    kind = index.NAMES[piece["dtype"]]
    size = kind.itemsize * math.prod(piece["shape"])
    old = torch.frombuffer(block[piece["offset"] : piece["offset"] + size] or bytearray(8), dtype=kind)
    new = altered(old, rng).contiguous().view(-1).view(torch.uint8).numpy().tobytes()[:size]
    block[piece["offset"] : piece["offset"] + len(new)] = new
    content[run["offset"] : run["offset"] + run["nbytes"]] = block
    path.write_bytes(content)
    run["sha256"] = hashlib.sha256(block).hexdigest()


def attack_store(folder: Path, rng: random.Random, record: dict) -> str:
    """A store: contents of a run, entries of the index, or both. `record` is the sound index."""
    shutil.copytree(folder / "store", store := folder / "copy")
    record = copy.deepcopy(record)
    what = rng.choice(["contents", "contents", "index", "both"])
    for _ in range({"index": 0}.get(what, rng.choice([1, 2, 4]))):
        harm(store, rng.choice(record["ops"]), rng)
    if what != "contents":
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.choice([*places(record)][1:])
            inside = record
            with contextlib.suppress(KeyError, IndexError, TypeError):  # an entry that an alteration before removed
                for key in at[:-1]:
                    inside = inside[key]
                old = inside[at[-1]]
                near = [old + rng.choice([1, -1, 256, 4096, -4096])] if type(old) is int else []
                near += [old + rng.choice(["\n", "/../x", "\0", "\u2028"])] if isinstance(old, str) else []
                inside[at[-1]] = rng.choice(near or WILD_VALUES) if rng.random() < 0.5 else rng.choice(WILD_VALUES)
    (store / index.FILE).write_text(json.dumps(record | {"sha256": index._digest(record)}))
    try:
        opened = Store.open(store)
    except UserError as error:
        one_line(error)
        return "refused"
    try:
        opened.verify()
        sound = True
    except UserError as error:
        one_line(error)
        sound = False
    for layer in opened.layers.values():
        with contextlib.nullcontext() if sound else contextlib.suppress(UserError):
            for found in layer.view(opened.shards[layer.shard].content(layer.offset, layer.nbytes)).values():
                use(found, strict=sound)
        run = next(iter(layer.ops.values()))
        with contextlib.suppress(*IN_USE):  # formats that do not tell where their rows lie are among them
            known = run.row_index.tensors(_read(opened, run.row_index))
            some = run.rows(run.shape[0] // 3, run.shape[0] // 2 + 1, known)
            use(some.view(_read(opened, some)), strict=False)
    return "verified" if sound else "not verified"


def _read(store: Store, part) -> np.ndarray:
    found = [store.shards[place.shard].content(place.offset, place.nbytes) for place in part.ranges]
    return np.concatenate(found) if found else np.zeros(0, np.uint8)


def attack(seed: int, cases: int) -> Counter:
    """Try so many cases. A failure names the seed of its own case."""
    told = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder, record = Path(name), None
        for case in range(seed, seed + cases):
            rng = random.Random(case)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            print(case, end="\r", file=sys.stderr, flush=True)
            if case % 3:
                told["file " + attack_file(folder, rng)] += 1
                continue
            if record is None or rng.random() < 0.02:
                shutil.rmtree(folder / "store", ignore_errors=True)
                make_store(folder / "store", rng)
                record = json.loads((folder / "store" / index.FILE).read_text())
                del record["sha256"]
            told["store " + attack_store(folder, rng, record)] += 1
            shutil.rmtree(folder / "copy")
    signal.setitimer(signal.ITIMER_PROF, 0)
    return told


if __name__ == "__main__":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2]))))
