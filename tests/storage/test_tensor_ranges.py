"""Matrices that lie at any byte of a file come by reads of whole blocks, each where it is looked for."""

import numpy as np
import pytest
import torch

from toolkit.formats.parted import Parted
from toolkit.formats.twins import random_blocks
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import ChangedError, StoredFile
from toolkit.storage.file_ops import FileOp
from toolkit.storage.readers import READERS
from toolkit.storage.readers.base import HostReader
from toolkit.storage.tensor_ranges import GAP_BYTES, FileLayer, TensorRange

BLOCK = 4096
KIND, ROW = "Q8_0", 34  # a row of 32 columns
PLACES = {"a": (32, 40), "b": (32 + 40 * ROW, 3), "c": (BLOCK * 3 + 64, 100), "d": (4 * GAP_BYTES + 96, 7)}  # and rows
END = 4 * GAP_BYTES + 96 + 7 * ROW  # the file ends with d, within a block


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tensors"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, END, np.uint8).tobytes())
    return path


def op(name, path, source=None):
    offset, rows = PLACES[name]
    return FileOp(0, name, torch.float32, (TensorRange(str(path), offset, rows * ROW, KIND, (rows, 32)),), source)


@pytest.mark.parametrize("reader", [name for name, kind in READERS.items() if issubclass(kind, HostReader)])
def test_each_matrix_has_its_bytes_and_neighbours_are_one_read(file, reader):
    layer = FileLayer.of({name: op(name, file) for name in "dbca"})  # in any order
    (chunks,) = layer.chunks
    assert chunks.offsets.tolist() == [0, 4 * GAP_BYTES]
    assert chunks.sizes.tolist() == [4 * BLOCK, BLOCK]
    assert layer.nbytes == 5 * BLOCK
    buffer, content = aligned_buffer(layer.nbytes), file.read_bytes()
    with READERS[reader]({str(file): StoredFile.of(file)}) as opened:
        opened.read(layer.chunks, buffer)
    for name, weight in layer.view(buffer).items():
        offset, rows = PLACES[name]
        assert weight.shape == (rows, 32)
        assert weight.data.numpy().tobytes() == content[offset : offset + rows * ROW]


@pytest.mark.parametrize("reader", [name for name, kind in READERS.items() if issubclass(kind, HostReader)])
@pytest.mark.parametrize("end", [END - 1, BLOCK])
def test_a_file_that_is_cut_while_it_is_open_is_found(file, reader, end):
    layer = FileLayer.of({name: op(name, file) for name in PLACES})
    with READERS[reader]({str(file): StoredFile.of(file)}) as opened:
        with open(file, "r+b") as stream:
            stream.truncate(end)
        with pytest.raises(ChangedError, match="replaced, cut or written to"):
            opened.read(layer.chunks, aligned_buffer(layer.nbytes))


def test_rows_of_parts_come_in_an_order_of_their_own():
    """Two parts of different types; row 0 of the matrix is row 3 of the parts, which is the first of the second."""
    parts = random_blocks("Q8_0", 3, 64, seed=1), random_blocks("Q4_0", 2, 64, seed=2)
    source = np.array([3, 0, 4, 1, 2])
    weight, x = Parted(parts, source), torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    dense = torch.cat([part.decode() for part in parts])[source]
    assert weight.shape == (5, 64)
    assert weight.nbytes == 3 * 68 + 2 * 36
    assert torch.equal(weight.decode(), dense)
    assert torch.equal(weight.matvec(x), torch.cat([part.matvec(x) for part in parts], 1)[:, source])
    assert torch.equal(weight.matvec(x[0]), weight.matvec(x)[0])
    assert weight.product(x[0], torch.empty(5)) is None


def test_the_product_of_one_part_is_put_into_order():
    part, source = random_blocks("Q6_K", 4, 256), np.array([2, 0, 3, 1])
    x, out = torch.randn(256, generator=torch.Generator().manual_seed(0)), torch.empty(4)
    product = Parted((part,), source).product(x, out)
    for task in (*product.before, product.task, *product.after):
        task()
    assert torch.equal(out, part.matvec(x)[source])
