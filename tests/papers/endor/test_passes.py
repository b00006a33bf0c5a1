import itertools
import time

import numpy as np
import pytest
import torch

from toolkit import paths
from toolkit.errors import UserError
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.measure.turns import take_turns
from toolkit.offload.methods import METHODS
from toolkit.offload.ways import POLICIES, Way, all_ways
from toolkit.papers.endor import operations
from toolkit.papers.endor.operations import PLACEMENTS, layer_passes, twin_stores
from toolkit.storage.store import Store

SHAPES = {"fc1": (96, 64), "fc2": (64, 96), "q_proj": (5, 64)}
FORMS = ["dense", "zstd", "endor"]
ON_CPU = [way.method for way in all_ways(device="cpu")]


def placed(method, placement="storage", policy="sequential"):
    return Way(method, policy=policy, device="cpu"), placement


def turns(stores, cases, repetitions=1, **named):
    return take_turns(layer_passes(stores, cases), repetitions, **named)


@pytest.fixture
def stores(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    with twin_stores(SHAPES, torch.float16, 0.5, FORMS) as opened:
        yield opened


@pytest.mark.parametrize("method", ON_CPU)
def test_every_case_takes_its_stages_in_order(stores, method):
    turns(stores, [placed(method)])  # compiles kernels, which is a stage of its own
    for placement, policy in itertools.product(PLACEMENTS, POLICIES):
        spans = turns(stores, [placed(method, placement, policy)])
        assert set(spans["op"]) == set(SHAPES)
        assert set(spans["mode"]) <= ({"direct", "buffered"} if placement == "storage" else {"memory"})
        stages = ["read"] * (placement == "storage") + ["decode"] * bool(METHODS[method].decoded_in) + ["compute"]
        for op, (rows, columns) in SHAPES.items():
            of_op = spans[spans["op"] == op]
            assert of_op["stage"].tolist() == stages
            assert (of_op["end_s"].to_numpy()[:-1] <= of_op["start_s"].to_numpy()[1:]).all()
            is_dense = (of_op["stage"] == "decode") | ((of_op["stage"] == "compute") & (method == "dense"))
            assert set(of_op.loc[is_dense, "nbytes"]) <= {rows * columns * 2}
        if placement == "storage":
            stored = stores[0].layer(0, METHODS[method].format).nbytes
            assert spans.loc[spans["stage"] == "read", "nbytes"].sum() == stored


def test_turns_read_from_all_places_one_after_the_other(stores, monkeypatch):
    """All contestants of a repetition read from the same one."""
    opened, really = [], operations.open_reader
    passes = layer_passes(stores, [placed("dense"), placed("endor")])
    monkeypatch.setattr(
        operations, "open_reader", lambda way, store, form: opened.append(store) or really(way, store, form)
    )
    take_turns(passes, repetitions=4)
    assert len({store.folder for store in stores}) == operations.PLACES == 3
    assert opened == [stores[number] for number in (0, 0, 1, 1, 2, 2, 0, 0)]


@pytest.mark.parametrize(("policy", "ahead"), [("sequential", False), ("pipelined", True)])
def test_only_a_pipeline_reads_ahead(stores, monkeypatch, policy, ahead):
    really = Dense.matvec
    monkeypatch.setattr(Dense, "matvec", lambda weight, x: time.sleep(0.1) or really(weight, x))
    spans = turns(stores, [placed("endor", policy=policy)]).set_index(["op", "stage"])
    assert (spans["start_s"]["fc2", "read"] < spans["end_s"]["fc1", "compute"]) == ahead


@pytest.fixture
def seen(monkeypatch):
    """The weights that products were taken with."""
    weights = []
    for kind in (Dense, Endor, Scaled):

        def matvec(weight, x, really=kind.matvec):
            weights.append(weight)
            return really(weight, x)

        monkeypatch.setattr(kind, "matvec", matvec)
    return weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_the_products_operand_is_the_pruned_weight_and_nothing_is_left(tmp_path, monkeypatch, seen, dtype):
    """With its scale where it is in int8."""
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    expected = operations.random_pruned(SHAPES["q_proj"], 0.5, dtype, seed=2)
    with twin_stores(SHAPES, dtype, 0.5, FORMS) as stores:
        for method in ON_CPU:
            seen.clear()
            turns(stores, [placed(method)])
            if dtype == torch.float16:
                assert torch.equal(seen[-1].decode(), expected), method
                continue
            *_, scaled = (operand for operand in seen if isinstance(operand, Scaled))
            assert torch.equal(scaled.packed.decode(), expected), method
            assert torch.equal(scaled.decode(), expected.half() / 1024), method
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["dense", "endor_packed"])
def test_a_wrong_product_is_refused_in_any_turn(stores, monkeypatch, method):
    """The third product of a turn is wrong in the second repetition."""
    kind = Endor if method == "endor_packed" else Dense
    contestants, count, really = layer_passes(stores, [placed(method)]), itertools.count(1), kind.matvec
    monkeypatch.setattr(kind, "matvec", lambda weight, x: really(weight, x) + 100 * (next(count) == 6))
    with pytest.raises(UserError, match=f"{method}, sequential, storage, gives another output than the weights made"):
        take_turns(contestants, repetitions=2)


def test_bytes_that_are_not_those_written_are_not_timed(tmp_path, monkeypatch):
    """The lowest bit of the layer's middle byte is flipped on the disk, in the last of the places."""
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    really_open = Store.open

    def open_damaged(folder):
        if not folder.name.endswith(str(operations.PLACES - 1)):
            return really_open(folder)
        run = really_open(folder).layer(0, "endor").ops["fc1"]
        piece = max(run.pieces.values(), key=lambda piece: piece.end - piece.offset)
        data = np.memmap(folder / run.shard, np.uint8, "r+")
        data[run.offset + (piece.offset + piece.end) // 2] ^= 1
        data.flush()
        return really_open(folder)

    monkeypatch.setattr(Store, "open", open_damaged)
    with pytest.raises(UserError, match="fc1"), twin_stores(SHAPES, torch.float16, 0.5, FORMS):
        pytest.fail("a damaged store was handed out")
    assert list(tmp_path.iterdir()) == []
