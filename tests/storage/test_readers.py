"""Every reader against plain slices of the files, and what happens when files change under it."""

import errno
import itertools
import os
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.conftest import SIZES, Part
from toolkit.errors import UserError, run_command
from toolkit.storage import descriptors
from toolkit.storage import direct as files
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import Chunks, in_line
from toolkit.storage.direct import BLOCK_BYTES, ChangedError, StoredFile
from toolkit.storage.readers import READERS, open_reader

HOST = ("threads", "aio")  # kvikio has its own tests


@pytest.fixture(params=HOST)
def name(request):
    return request.param


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.permutations([(shard, block) for shard, count in SIZES.items() for block in range(count)]),
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=12),
    chunk=st.integers(1, 40),
    lanes=st.integers(1, 5),
)
def test_any_chunks_go_to_their_places(name, stored, blocks, sizes, chunk, lanes):
    """Each reads blocks from anywhere to the next place or one beyond it, and nothing else is touched."""
    target, place, chunks = aligned_buffer(150 * BLOCK_BYTES), 0, []
    target[:] = 7
    wanted = target.reshape(-1, BLOCK_BYTES).copy()
    for (shard, first), (size, gap) in zip(blocks, sizes, strict=False):
        size = min(size, SIZES[shard] - first)
        content = np.fromfile(stored[shard].path, np.uint8).reshape(-1, BLOCK_BYTES)
        wanted[place : place + size] = content[first : first + size]
        chunks.append(Chunks(shard, *(np.array([number * BLOCK_BYTES]) for number in (first, size, place))))
        place += size + gap
    with READERS[name](stored, chunk_bytes=chunk * BLOCK_BYTES, depth=lanes) as reader:
        for _ in range(2):
            reader.read(chunks, target)
            assert (target.reshape(wanted.shape) == wanted).all()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(1, 4))
def test_blocks_in_line_fill_a_target_without_a_hole(parts, chunk):
    """Read by read into bytes that are each named by shard and offset."""
    target = {}
    for chunks in in_line([Part(*part) for part in parts]):
        cut = chunks.cut(chunk)
        assert (cut.sizes <= chunk).all()
        for offset, size, place in zip(cut.offsets, cut.sizes, cut.places, strict=True):
            target |= {place + at: (chunks.shard, offset + at) for at in range(size)}
    wanted = [(shard, offset + at) for shard, offset, nbytes in parts for at in range(nbytes)]
    assert [target[at] for at in sorted(target)] == wanted
    assert sorted(target) == [*range(len(wanted))]


@given(
    starts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), max_size=8),
    chunk=st.integers(1, 4),
)
def test_joined_and_cut_chunks_read_the_same_bytes(starts, chunk):
    def pairs(chunks):
        """From which byte of the file to which of the target, one by one."""
        found = zip(chunks.offsets, chunks.places, chunks.sizes, strict=True)
        return [(offset + at, place + at) for offset, place, size in found for at in range(size)]

    chunks = Chunks("a", *np.array([(o, n, p) for o, p, n in starts], np.int64).reshape(-1, 3).T)
    joined = chunks.joined()
    assert pairs(joined) == pairs(chunks) == pairs(chunks.cut(chunk))
    followers = zip(pairs(chunks), pairs(chunks)[1:], strict=False)
    breaks = sum(second != (first[0] + 1, first[1] + 1) for first, second in followers)
    assert len(joined.sizes) == (breaks + 1 if starts else 0)
    assert chunks.cut(chunk).sizes.max(initial=0) <= chunk


def test_chunks_that_cannot_be_read_are_refused(name, stored):
    def chunks(offset, size, place, shard="a"):
        return [Chunks(shard, *(np.array([0, number]) for number in (offset, size, place)))]

    two, whole = aligned_buffer(2 * BLOCK_BYTES), (0, BLOCK_BYTES, 0)
    wrong = [
        (chunks(1, BLOCK_BYTES, 0), two, "no whole blocks"),
        (chunks(*whole), two[1:], "no whole blocks"),
        (chunks(0, BLOCK_BYTES, 2 * BLOCK_BYTES), two, "a buffer of 8192 bytes"),
        (chunks(*whole, shard="z"), two, "shard z"),
        (chunks(*whole), torch.zeros(BLOCK_BYTES, dtype=torch.uint8), "expected a NumPy array"),
    ]
    with READERS[name](stored) as reader:
        for reads, target, words in wrong:
            with pytest.raises(UserError, match=words):
                reader.submit(reads, target)


def test_a_read_that_fails_in_one_of_many_threads_stops_the_others(stored, tmp_path):
    """One error, once; the ranges that nobody had taken stay unread, and the reader goes on."""
    blocks = 20_000
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 100 * BLOCK_BYTES)
    target = aligned_buffer(BLOCK_BYTES)
    places = np.zeros(blocks, np.int64)
    beyond = Chunks("v", (50 + np.arange(blocks)) * BLOCK_BYTES, np.full(blocks, BLOCK_BYTES), places)
    with READERS["threads"]({"v": StoredFile.of(path)}, depth=32) as reader:
        taken = []
        fetch = reader._read_all
        reader._read_all = lambda *arguments: taken.append(fetch(*arguments))
        with pytest.raises(OSError, match="short read: 0 of 4096 bytes at offset"):
            reader.read([beyond], target)
        reader.read([beyond.at(slice(9))], target)
    assert len(taken) == 1  # the second one alone got through


def test_reads_happen_in_the_order_asked_for(name, stored):
    target = aligned_buffer(64 * BLOCK_BYTES)
    with READERS[name](stored) as reader:
        futures = [reader.submit(in_line([Part(shard, 0, SIZES[shard] * BLOCK_BYTES)]), target) for shard in "acb"]
        futures[-1].result()
        assert all(future.done() for future in futures)
    content = {shard: stored[shard].path.read_bytes() for shard in SIZES}
    assert target.tobytes() == content["b"] + content["c"][BLOCK_BYTES:]


def test_what_waits_when_a_reader_is_closed_is_dropped_and_nothing_stays_open(name, stored, monkeypatch):
    descriptors, go = os.listdir("/proc/self/fd"), threading.Event()
    fetch = READERS[name]._fetch

    def slow(self, *arguments):
        go.wait()
        fetch(self, *arguments)

    monkeypatch.setattr(READERS[name], "_fetch", slow)
    target = aligned_buffer(BLOCK_BYTES)
    reader = READERS[name](stored)
    first, second = (reader.submit(in_line([Part("b", 0, BLOCK_BYTES)]), target) for _ in range(2))
    closing = threading.Thread(target=reader.close)
    closing.start()
    while not second.cancelled():
        pass
    go.set()
    closing.join()
    first.result()
    assert target.tobytes() == stored["b"].path.read_bytes()
    with pytest.raises(CancelledError):
        second.result()
    with pytest.raises(RuntimeError, match="shutdown"):
        reader.submit(in_line([Part("b", 0, BLOCK_BYTES)]), target)
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("kind", ["refused", "ignored"])
def test_a_file_system_without_direct_reads_is_buffered_and_says_so(name, stored, o_direct, kind):
    o_direct(kind)
    target = aligned_buffer(37 * BLOCK_BYTES)
    with READERS[name](stored) as reader:
        assert reader.mode == "buffered"
        reader.read(in_line([Part("a", 0, 37 * BLOCK_BYTES)]), target)
    assert target.tobytes() == stored["a"].path.read_bytes()


def test_threads_are_the_quickest_reader_through_the_page_cache(store, o_direct):
    with open_reader(None, store) as reader:
        assert reader.name == "aio"
    o_direct("refused")
    with open_reader(None, store, depth=3) as reader:
        assert (reader.name, reader.depth) == ("threads", 3)


def test_one_buffered_file_makes_the_reader_buffered(name, stored, monkeypatch):
    bypasses = iter([True, False, True])
    monkeypatch.setattr(files, "bypasses_cache", lambda *_: next(bypasses))
    with READERS[name](stored) as reader:
        assert reader.mode == "buffered"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(np.random.default_rng(5).bytes(64 * BLOCK_BYTES))
    os.utime(path, ns=(10**18, 10**18))
    return path


HARM = {
    "replaced": lambda path: os.replace(_copy(path), path),
    "written to": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "removed": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, 200_000),
    "longer": lambda path: os.truncate(path, 65 * BLOCK_BYTES),
}


def _copy(path):
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_changes_before_or_under_a_reader(name, victim, harm):
    chunks, target = in_line([Part("v", 0, 64 * BLOCK_BYTES)]), aligned_buffer(64 * BLOCK_BYTES)
    file, descriptors = StoredFile.of(victim), os.listdir("/proc/self/fd")
    with READERS[name]({"v": file}, chunk_bytes=BLOCK_BYTES) as reader:
        reader.read(chunks, target)
        HARM[harm](victim)
        with pytest.raises(ChangedError, match=rf"{victim}: .* while it was in use"):
            reader.read(chunks, target)
    with pytest.raises(ChangedError, match=str(victim)):
        READERS[name]({"v": file})
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_disk_that_fails_is_named_and_the_reader_goes_on(name, stored, monkeypatch, capsys):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    target = aligned_buffer(64 * BLOCK_BYTES)
    with READERS[name](stored, chunk_bytes=BLOCK_BYTES) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(type(reader), "_fetch", fails)
            assert run_command(partial(reader.read, in_line([Part("a", 0, BLOCK_BYTES)]), target)) == 2
        assert f"error: {stored['a'].path}: the disk cannot read or write it" in capsys.readouterr().err
        with pytest.raises(OSError, match="short read: 0 of 4096 bytes at offset"):
            reader.read(in_line([Part("a", 30 * BLOCK_BYTES, 30 * BLOCK_BYTES)]), target)  # beyond the end
        held = descriptors.opened(stored["a"])
        really, held.number = held.number, os.open("/", os.O_RDONLY)
        with pytest.raises(ChangedError):  # another file behind the descriptor
            reader.read(in_line([Part("a", 0, BLOCK_BYTES)]), target)
        os.close(held.number)
        held.number = really
        reader.read(in_line([Part("a", 0, BLOCK_BYTES)]), target)
    assert target[:BLOCK_BYTES].tobytes() == stored["a"].path.read_bytes()[:BLOCK_BYTES]


def test_readers_share_few_descriptors(name, stored, monkeypatch):
    """Also where there are fewer than files, and of two readers that read in turns."""
    monkeypatch.setattr(descriptors, "_limit", lambda: 2)
    before, target = len(os.listdir("/proc/self/fd")), aligned_buffer(BLOCK_BYTES)
    with READERS[name](stored) as first, READERS[name](stored) as second:
        for reader, shard in itertools.product((first, second, first), sorted(SIZES)):
            reader.read(in_line([Part(shard, 0, BLOCK_BYTES)]), target)
            assert target.tobytes() == stored[shard].path.read_bytes()[:BLOCK_BYTES]
            assert len(os.listdir("/proc/self/fd")) - before <= 2 + 2  # each reader refers to its last one
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of earlier tests may have closed some


def test_an_error_waits_for_the_other_threads(stored, monkeypatch):
    """They still write into the target."""
    done = []

    def slow(*arguments):
        if threading.current_thread().name.startswith("storage-pread"):
            time.sleep(0.05)
            done.append(True)
        else:
            raise OSError("this one fails at once")

    with READERS["threads"](stored, chunk_bytes=BLOCK_BYTES, depth=4) as reader:
        monkeypatch.setattr("toolkit.storage.readers.threads.read_ranges", slow)
        with pytest.raises(OSError, match="fails at once"):
            reader.read(in_line([Part("c", 0, 64 * BLOCK_BYTES)]), aligned_buffer(64 * BLOCK_BYTES))
        assert len(done) == 3
