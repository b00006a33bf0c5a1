import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.naive_cost_model import pipelined, ticks
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Curve, Links, Memory, Profile, Storage
from toolkit.models.shapes import random_pruned
from toolkit.offload.methods import METHODS
from toolkit.offload.ways import PATHS, Way
from toolkit.papers.endor.cost_model import PlacedLayer, Weight, predict, weights, with_rates

GB = 1_000_000_000
# seconds a GB: read 4, copy 2, direct read 3; decoding 1 on the device, 5 or 6 on the CPU; products 1 and 2
MACHINE = Profile(
    "toy",
    "a toy",
    None,
    storage=Storage("disk", 1e12, 0.25),
    dram=Memory("cpu", 1e11, 0.5, decode_gb_s={"endor": 1 / 5, "zstd": 1 / 6}),
    device=Memory("gpu", 1e10, 1.0, decode_gb_s={"endor": 1.0}),
    links=Links(storage_to_dram_gb_s=0.25, dram_to_device_gb_s=0.5, storage_to_device_gb_s=1 / 3),
)
PROBED = replace(MACHINE, device=None, links=Links(storage_to_dram_gb_s=0.25))  # what the probe knows without a GPU
SLOW = replace(  # to begin with: as many seconds a request more
    MACHINE,
    dram=replace(MACHINE.dram, decode_fixed_s={"endor": 1, "zstd": 2}, matvec_fixed_s={"dense": 1}),
    device=replace(MACHINE.device, decode_fixed_s={"endor": 2}, matvec_fixed_s={"dense": 1, "endor": 3}),
    links=replace(MACHINE.links, storage_to_dram_fixed_s=1, dram_to_device_fixed_s=2, storage_to_device_fixed_s=4),
)
HALF = Weight("half", 2 * GB, GB)
FULL = Weight("full", 2 * GB, 2 * GB)


def times(timeline):
    return [(span.op, span.stage, round(span.start_s, 9), round(span.end_s, 9)) for span in timeline.spans]


def test_sequential_by_hand():
    layer = PlacedLayer((HALF, Weight("twice", 4 * GB, 2 * GB)), "storage", overhead_s=0.5)
    assert times(predict(MACHINE, [layer], Way("endor"))) == [
        *(("half", "read", 0, 4), ("half", "copy", 4, 6), ("half", "decode", 6, 8), ("half", "compute", 8, 10)),
        *(
            ("twice", "read", 10, 18),
            ("twice", "copy", 18, 22),
            ("twice", "decode", 22, 26),
            ("twice", "compute", 26, 30),
        ),
        ("rest", "other", 30, 30.5),
    ]


def test_pipelined_by_hand():
    """Three layers; the third's read waits until the first has left its buffer, at 10 s.

    read      00001111  2222
    copy          00  11    22
    device          00001111  2222      decoding and products share the processor
    """
    layers = [PlacedLayer((HALF,), "storage") for _ in range(3)]
    assert times(predict(MACHINE, layers, Way("endor", policy="pipelined"))) == [
        *(("half", "read", 0, 4), ("half", "copy", 4, 6), ("half", "decode", 6, 8), ("half", "compute", 8, 10)),
        *(("half", "read", 4, 8), ("half", "copy", 8, 10), ("half", "decode", 10, 12), ("half", "compute", 12, 14)),
        *(("half", "read", 10, 14), ("half", "copy", 14, 16), ("half", "decode", 16, 18), ("half", "compute", 18, 20)),
    ]
    assert predict(MACHINE, layers, Way("endor", policy="pipelined"), slots=3).total_s == 18
    assert predict(MACHINE, layers, Way("endor", policy="pipelined"), slots=1).total_s == 30


# method, path, where the weight lies, what computes: its spans, with their seconds
BY_HAND = {
    ("dense", "host", "storage", "gpu"): "read storage 8, copy dram 4, compute device 2",
    ("dense", "direct", "storage", "gpu"): "read storage 6, compute device 2",
    ("dense", "host", "dram", "gpu"): "copy dram 4, compute device 2",
    ("dense", "host", "device", "gpu"): "compute device 2",
    ("dense", "host", "dram", "cpu"): "compute dram 4",
    ("zstd", "host", "storage", "gpu"): "read storage 4, decode dram 12, copy dram 4, compute device 2",
    ("zstd", "host", "dram", "gpu"): "decode dram 12, copy dram 4, compute device 2",
    ("zstd", "host", "storage", "cpu"): "read storage 4, decode dram 12, compute dram 4",
    ("endor_cpu", "host", "storage", "gpu"): "read storage 4, decode dram 10, copy dram 4, compute device 2",
    ("endor", "host", "storage", "gpu"): "read storage 4, copy dram 2, decode device 2, compute device 2",
    ("endor", "direct", "storage", "gpu"): "read storage 3, decode device 2, compute device 2",
    ("endor", "direct", "dram", "gpu"): "copy dram 2, decode device 2, compute device 2",
    ("endor", "host", "device", "gpu"): "compute device 2",  # what lives on the device is dense
    ("endor", "host", "storage", "cpu"): "read storage 4, decode dram 10, compute dram 4",
    ("endor", "host", "dram", "cpu"): "decode dram 10, compute dram 4",
    ("endor_packed", "host", "storage", "gpu"): "read storage 4, copy dram 2, compute device 1",
    ("endor_packed", "direct", "storage", "gpu"): "read storage 3, compute device 1",
    ("endor_packed", "host", "device", "gpu"): "compute device 1",
    ("endor_packed", "host", "dram", "cpu"): "compute dram 2",
}


def test_the_way_of_a_weight_by_hand():
    for (method, path, placement, device), expected in BY_HAND.items():
        weight = FULL if method == "dense" else HALF
        timeline = predict(MACHINE, [PlacedLayer((weight,), placement)], Way(method, path, device=device))
        assert ", ".join(f"{s.stage} {s.tier} {round(s.seconds, 9):g}" for s in timeline.spans) == expected


def test_the_bytes_of_a_span_are_the_ones_it_moves():
    nbytes = {s.stage: s.nbytes / GB for s in predict(MACHINE, [PlacedLayer((HALF,), "storage")], Way("zstd")).spans}
    assert nbytes == {"read": 1, "decode": 2, "copy": 2, "compute": 2}


def test_unified_memory_is_not_copied_to_itself():
    machine = with_rates(profile("flash-m1-max"), "device", decode_gb_s={"endor": 100})
    stages = [s.stage for s in predict(machine, [PlacedLayer((HALF,), "storage")], Way("endor")).spans]
    assert stages == ["read", "decode", "compute"]


def test_a_probed_profile_is_enough_for_the_cpu():
    bare = replace(PROBED, dram=Memory("cpu", 1e11, 0.5))
    layers = [PlacedLayer((FULL,), "storage"), PlacedLayer((FULL,), "dram")]
    assert predict(bare, layers, Way("dense", device="cpu")).total_s == 8 + 4 + 4
    assert predict(bare, [PlacedLayer((HALF,), "storage")], Way("endor_packed", device="cpu")).total_s == 4 + 2
    tuned = with_rates(bare, "dram", decode_gb_s={"endor": 4}, matvec_gb_s={"dense": 1, "endor": 0.25})
    assert predict(tuned, layers, Way("dense", device="cpu")).total_s == 8 + 2 + 2
    assert predict(tuned, [PlacedLayer((HALF,), "storage")], Way("endor", device="cpu")).total_s == 4 + 0.5 + 2
    assert predict(tuned, [PlacedLayer((HALF,), "storage")], Way("endor_packed", device="cpu")).total_s == 4 + 4


def test_a_curve_takes_the_place_of_a_rate_and_a_fixed_time():
    curve = Curve((GB, 2 * GB, 4 * GB), (7.0, 8.0, 9.0))
    machine = with_rates(SLOW, "dram", decode_curves={"endor": curve}, matvec_curves={"endor": curve})
    layer = [PlacedLayer((HALF, Weight("twice", 4 * GB, 2 * GB)), "dram")]
    assert predict(machine, layer, Way("endor_packed", device="cpu")).total_s == 7 + 8
    assert predict(machine, layer, Way("endor", device="cpu")).total_s == (8 + 5) + (9 + 9)  # dense products: a rate
    other = with_rates(PROBED, "dram", decode_curves={"csr": curve})
    assert predict(other, layer, Way("zstd", device="cpu")) == predict(PROBED, layer, Way("zstd", device="cpu"))
    bare = replace(PROBED, dram=Memory("cpu", 1e11, 0.5, decode_curves={"endor": curve}))
    assert predict(bare, layer[:1], Way("endor", device="cpu")).busy_s("decode") == 8 + 9


def test_weights_have_the_bytes_that_packing_gives():
    shape = (48, 2304)
    for dtype in (torch.float16, torch.int8):
        (weight,) = weights({"op": shape}, "endor", str(dtype).removeprefix("torch."))
        packed = encode("endor", random_pruned(shape, 0.5, dtype))
        assert (weight.stored_bytes, weight.dense_bytes) == (packed.nbytes, 48 * 2304 * dtype.itemsize)


# whole GB, so whole seconds, which the tick-by-tick oracle can follow
sizes = st.integers(1, 3).map(lambda size: Weight("op", size * GB, size * GB))
layers = st.lists(
    st.builds(
        PlacedLayer,
        st.lists(sizes, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["device", "dram", "storage"]),
        st.integers(0, 2).map(float),
    ),
    min_size=1,
    max_size=6,
)
chosen = st.sampled_from(
    [(m, p) for m, p in itertools.product(METHODS, PATHS) if p == "host" or METHODS[m].decoded_in != "dram"]
)


def resource(span):
    return span.stage if span.stage in ("read", "copy") else span.tier


def by_operation(timeline):
    """Spans by layer, in each by operation: a new one begins after a product, and so does a layer's rest."""
    grouped = {}
    for span in timeline.spans:
        ops = grouped.setdefault(span.layer, [[]])
        if ops[-1] and ops[-1][-1].stage == "compute":
            ops.append([])
        ops[-1].append(span)
    return list(grouped.values())


# `SLOW` again, and without what is fixed `MACHINE`: (fixed seconds, seconds a GB) of each stage on a GPU
COSTS = {
    "read host": (1, 4),
    "read direct": (4, 3),
    "copy": (2, 2),
    "decode dram endor": (1, 5),
    "decode dram zstd": (2, 6),
    "decode device endor": (2, 1),
    "compute dense": (1, 1),
    "compute endor": (3, 1),
}


def cost(span, method, path):
    """Its name in `COSTS`."""
    form = METHODS[method].format
    used = "dense" if METHODS[method].decoded_in else form
    names = {"read": path, "copy": "", "decode": f"{span.tier} {form}", "compute": used}
    return f"{span.stage} {names[span.stage]}".strip()


@given(layers, chosen, st.integers(1, 4), st.booleans())
def test_pipelined_is_what_the_oracle_finds_tick_by_tick(drawn, way, buffers, slow):
    timeline = predict(SLOW if slow else MACHINE, drawn, Way(*way, "pipelined"), slots=buffers)
    grouped = by_operation(timeline)

    def taken(span):
        if span.stage == "other":
            return round(span.seconds)
        fixed, each = COSTS[cost(span, *way)]
        return ticks(span.nbytes, fixed if slow else 0, each)

    expected = pipelined([[[(resource(s), taken(s)) for s in op] for op in ops] for ops in grouped], buffers)
    found = {
        (number, op, place): (round(span.start_s), round(span.end_s))
        for number, ops in enumerate(grouped)
        for op, spans in enumerate(ops)
        for place, span in enumerate(spans)
    }
    assert found == expected


def test_what_the_profile_lacks_is_named():
    for machine, placement, way, lacks in (
        (PROBED, "storage", Way("dense"), "toy gives no bandwidth from dram to device"),
        (MACHINE, "device", Way("dense", device="cpu"), "a layer in 'device' with a way that computes in 'dram'"),
    ):
        with pytest.raises(UserError, match=lacks):
            predict(machine, [PlacedLayer((HALF,), placement)], way)
    with pytest.raises(UserError, match="the size of format 'zstd' depends on the values"):
        weights({"op": (1000, 1000)}, "zstd", sparsity=0.7)
