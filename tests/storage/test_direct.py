from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from toolkit.storage import chunks
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.chunks import read_ranges
from toolkit.storage.direct import BLOCK_BYTES, open_file

SIZE = 64 * BLOCK_BYTES


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").write_bytes(np.random.default_rng(0).bytes(SIZE))
    return tmp_path / "data"


def ranges(*rows):
    return np.array(rows, np.int64).reshape(len(rows), 3).T


@pytest.mark.parametrize("nbytes", [0, 4097, HUGE_PAGE_BYTES + 1])
def test_buffers_are_aligned_zeroed_and_writable(nbytes):
    buffer = aligned_buffer(nbytes)
    assert buffer.shape == (nbytes,)
    assert buffer.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not buffer.any()
    buffer[:] = 7


def test_beyond_the_end_or_without_a_file(path):
    with (
        open_file(path) as file,
        pytest.raises(OSError, match=f"short read: 4096 of 8192 bytes at offset {SIZE - 4096}"),
    ):
        read_ranges(file.descriptor, *ranges((0, 4096, 0), (SIZE - 4096, 8192, 0)), aligned_buffer(8192))
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_ranges(-1, *ranges((0, 4096, 0)), aligned_buffer(4096))


def test_a_read_that_a_signal_cut_short_is_done_again(path, monkeypatch):
    def interrupted(descriptor, offsets, sizes, places, target, taken):
        taken[0] += 1
        return int(taken[0]) - 1

    monkeypatch.setattr(chunks, "_compiled", lambda: interrupted)
    target = aligned_buffer(4 * BLOCK_BYTES)
    with open_file(path) as file:
        read_ranges(file.descriptor, *ranges(*((k, BLOCK_BYTES, k) for k in range(0, 4 * BLOCK_BYTES, 4096))), target)
    assert target.tobytes() == path.read_bytes()[: 4 * BLOCK_BYTES]


def test_threads_share_ranges_without_reading_one_twice(path):
    rng, content = np.random.default_rng(2), path.read_bytes()
    for threads in (1, 2, 5):
        order = rng.permutation(64) * BLOCK_BYTES
        target, taken = aligned_buffer(SIZE), np.zeros(1, np.int64)
        sizes = np.full(64, BLOCK_BYTES)
        with open_file(path) as file, ThreadPoolExecutor(threads) as pool:
            arguments = (file.descriptor, order, sizes, order, target, taken)
            list(pool.map(lambda _: read_ranges(*arguments), range(threads)))  # noqa: B023 (called at once)
        assert target.tobytes() == content
        assert taken[0] == 64 + threads  # each thread asks once more than it finds


def test_nothing_is_compiled_after_the_warm_up(path):
    chunks.warm_up()
    before = len(chunks._compiled().signatures)
    every_second = np.repeat(np.arange(0, SIZE, BLOCK_BYTES), 2)[::2]
    sizes, target = np.full(len(every_second), BLOCK_BYTES), aligned_buffer(SIZE)
    with open_file(path) as file:
        read_ranges(file.descriptor, every_second, sizes, every_second, target, np.zeros(1, np.int64))
    assert target.tobytes() == path.read_bytes()
    assert len(chunks._compiled().signatures) == before == 1


def test_ranges_outside_the_target_or_not_as_many_of_each():
    for bad in [(0, 4096, 4096), (0, -1, 0), (0, 1, -1)]:
        with pytest.raises(ValueError, match="a range does not lie within the target's 4096 bytes"):
            read_ranges(-1, *ranges(bad), aligned_buffer(4096))
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="1 offsets, 2 sizes and 1 places"):
        read_ranges(-1, one, two, one, aligned_buffer(4096))


@pytest.mark.parametrize("size", [0, 4097])
def test_files_of_any_size_open(tmp_path, size):
    (tmp_path / "data").write_bytes(bytes(size))
    with open_file(tmp_path / "data") as file:
        assert file.size_bytes == size
        assert file.mode in ("direct", "buffered")
