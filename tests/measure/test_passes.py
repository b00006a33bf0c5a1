import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from toolkit import paths
from toolkit.errors import UserError
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.measure import passes
from toolkit.measure.passes import PLACEMENTS, timed_passes, twin_store
from toolkit.policies.methods import METHODS
from toolkit.policies.ways import POLICIES, Way, all_ways
from toolkit.storage.store import Store

SHAPES = {"fc1": (96, 64), "fc2": (64, 96), "q_proj": (5, 64)}
FORMS = ["dense", "zstd", "endor"]
ON_CPU = [way.method for way in all_ways(device="cpu")]


def placed(method, placement="storage", policy="sequential"):
    return Way(method, policy=policy, device="cpu"), placement


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    with twin_store(SHAPES, torch.float16, 0.5, FORMS) as opened:
        yield opened


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("method", ON_CPU)
def test_every_case_takes_its_stages_in_order(store, method, placement, policy):
    [(case, number, mode, timeline), *_] = timed_passes(store, [placed(method, placement, policy)], repetitions=1)
    assert (case, number) == (placed(method, placement, policy), 0)
    assert mode in ("direct", "buffered")
    stages = ["read"] * (placement == "storage") + ["decode"] * bool(METHODS[method].decoded_in) + ["compute"]
    assert timeline.evidence == "measured"
    for op, (rows, columns) in SHAPES.items():
        spans = [span for span in timeline.spans if span.op == op]
        assert [span.stage for span in spans] == stages
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
        dense = [
            span.nbytes for span in spans if span.stage == "decode" or (span.stage, method) == ("compute", "dense")
        ]
        assert set(dense) <= {rows * columns * 2}


def test_reads_are_of_the_stored_bytes(store):
    for method in ON_CPU:
        _, _, _, timeline = next(timed_passes(store, [placed(method)], repetitions=1))
        read = sum(span.nbytes for span in timeline.spans if span.stage == "read")
        assert read == store.layer(0, METHODS[method].format).nbytes


def test_repetitions_are_the_outer_loop_with_one_before_them(store):
    cases = [placed("dense"), placed("endor")]
    found = [(way.method, number) for (way, _), number, _, _ in timed_passes(store, cases, repetitions=2)]
    assert found == [(method, number) for number in range(3) for method in ("dense", "endor")]


@pytest.mark.parametrize(("policy", "ahead"), [("sequential", False), ("pipelined", True)])
def test_only_a_pipeline_reads_ahead(store, monkeypatch, policy, ahead):
    monkeypatch.setattr(Dense, "matvec", lambda weight, x: time.sleep(0.2))
    _, _, _, timeline = next(timed_passes(store, [placed("endor", policy=policy)], repetitions=1))
    second_read = next(span for span in timeline.spans if (span.op, span.stage) == ("fc2", "read"))
    first_product = next(span for span in timeline.spans if (span.op, span.stage) == ("fc1", "compute"))
    assert (second_read.start_s < first_product.end_s) == ahead


@pytest.fixture
def seen(monkeypatch):
    """The weights that products were taken with."""
    found = []
    for kind in (Dense, Endor, Scaled):
        monkeypatch.setattr(kind, "matvec", lambda weight, x: found.append(weight))
    return found


def test_the_products_operand_is_the_pruned_weight(store, seen):
    for case in (placed("dense"), placed("zstd"), placed("endor"), placed("endor_packed", "dram")):
        seen.clear()
        next(timed_passes(store, [case], repetitions=1))
        assert torch.equal(seen[-1].decode(), passes.random_pruned(SHAPES["q_proj"], 0.5, torch.float16, seed=2))


def test_int8_products_are_taken_with_scales(tmp_path, monkeypatch, seen):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    with twin_store(SHAPES, torch.int8, 0.5, FORMS) as store:
        for method in ON_CPU:
            next(timed_passes(store, [placed(method)], repetitions=1))
            weight = passes.random_pruned(SHAPES["q_proj"], 0.5, torch.int8, seed=2)
            assert torch.equal(seen[-1].packed.decode(), weight)
            assert torch.equal(seen[-1].decode(), weight.half() / 1024)


def test_nothing_is_left_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    with twin_store(SHAPES, torch.int8, 0.5, FORMS) as store:
        assert store.folder.is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMS)
def test_bytes_that_are_not_those_written_are_not_timed(tmp_path, monkeypatch, form):
    """The lowest bit of the layer's middle byte is flipped on the disk."""
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    really_open = Store.open

    def open_damaged(folder):
        store = really_open(folder)
        run = store.layer(0, form).ops["fc1"]
        piece = max(run.pieces.values(), key=lambda piece: piece.end - piece.offset)
        data = np.memmap(folder / run.shard, np.uint8, "r+")
        data[run.offset + (piece.offset + piece.end) // 2] ^= 1
        data.flush()
        return really_open(folder)

    monkeypatch.setattr(Store, "open", open_damaged)
    with pytest.raises(UserError, match="fc1"), twin_store(SHAPES, torch.float16, 0.5, FORMS):
        pytest.fail("a damaged store was handed out")
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_no_repetition_are_refused(store):
    with pytest.raises(UserError, match="unknown placement 'device'"):
        next(timed_passes(store, [placed("endor", "device")], repetitions=1))
    with pytest.raises(UserError, match="repetitions=0: expected 1 or more"):
        next(timed_passes(store, [placed("dense")], repetitions=0))
