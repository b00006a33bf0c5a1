from dataclasses import dataclass

import numpy as np
import pytest
import torch

from toolkit.formats import encode
from toolkit.storage.direct import BLOCK_BYTES, StoredFile
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

FORMATS = ("endor", "csr", "zstd", "dense")
SHAPES = {"attn.q": (33, 70), "mlp.up": (130, 33), "mlp.down": (1, 130)}
LAYERS = 2
SIZES = {"a": 37, "b": 1, "c": 64}  # of three plain files, in blocks


@dataclass(frozen=True)
class Part:
    """A store for readers."""

    shard: str
    offset: int
    nbytes: int


def sparse(shape, dtype=torch.float16, seed=0):
    """Whole numbers, half of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-100, 100, shape, generator=generator)
    return (values * (torch.rand(shape, generator=generator) < 0.5)).to(dtype)


def make_ops(layers=2, variant="endor"):
    """One op a layer."""
    return (Op(layer, "fc", variant, encode("endor", sparse((40, 64)))) for layer in range(layers))


def names(folder):
    """Its contents."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="session")
def weights():
    return {(layer, op): sparse(shape, seed=layer) for layer in range(LAYERS) for op, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def rest():
    return {"embedding": torch.randn(50, 7).bfloat16(), "norm": torch.ones(7), "steps": torch.tensor(3)}


@pytest.fixture
def ops(weights):
    """The arguments of `write_store`; made anew for each test."""
    return (
        Op(layer, op, name, encode(name, weights[layer, op]), {"scale": torch.full((3,), float(layer))})
        for layer in range(LAYERS)
        for name in FORMATS
        for op in SHAPES
    )


@pytest.fixture
def folder(tmp_path, ops, rest):
    """A store's folder."""
    write_store(tmp_path / "store", ops, rest.items(), {"name": "twin"}, lambda place: _config(place))
    return tmp_path / "store"


@pytest.fixture
def store(folder):
    return Store.open(folder)


def _config(place):
    (place / "config.json").write_text("{}")


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """Three files of random bytes, which no test may change."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for shard, blocks in SIZES.items():
        (folder / shard).write_bytes(rng.bytes(blocks * BLOCK_BYTES))
    return {shard: StoredFile.of(folder / shard) for shard in SIZES}
