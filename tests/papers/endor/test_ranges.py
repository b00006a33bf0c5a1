import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.machines.machine import Links, Memory, Profile, Software, Source, Storage
from toolkit.models.workload import Workload
from toolkit.offload.ways import POLICIES, Way
from toolkit.papers.endor.cost_model import PlacedLayer, Weight, predict
from toolkit.papers.endor.tables import corners, layer_table, numbers_that_matter, operation_table

GB = 1_000_000_000
RANGES = {
    "links.storage_to_dram_gb_s": (1.0, 4.0),
    "links.dram_to_device_gb_s": (5.0, 20.0),
    "dram.decode_gb_s.zstd": (0.5, 2.0),
    "device.decode_gb_s.endor": (25.0, 100.0),
    "software.layer_s": (0.01, 0.04),
}
MACHINE = Profile(
    "toy",
    "a toy",
    None,
    storage=Storage("disk", 1e12, 4.0),
    dram=Memory("cpu", 1e11, 50.0, decode_gb_s={"endor": 4.0, "zstd": 1.0}),
    device=Memory("gpu", 1e10, 500.0, decode_gb_s={"endor": 50.0}),
    links=Links(storage_to_dram_gb_s=2.0, dram_to_device_gb_s=10.0, storage_to_device_gb_s=3.0),
    software=Software("toy", 0.02),
    sources={name: Source("assumed", "a test", *ends) for name, ends in RANGES.items()}
    | {"dram.decode_gb_s.endor": Source("paper", "no range"), "dram.bandwidth_gb_s": Source("assumed", "", 10.0, None)},
)
WEIGHTS = {
    "dense": PlacedLayer((Weight("op", 10 * GB, 10 * GB),), "storage"),
    "endor": PlacedLayer((Weight("op", 10 * GB, 6 * GB),), "storage"),
}


def layers_of(method):
    return lambda machine: [WEIGHTS[method]]


def test_only_numbers_with_both_ends_that_a_way_uses_matter():
    assert MACHINE.ranges() == RANGES
    links = ["links.storage_to_dram_gb_s", "links.dram_to_device_gb_s"]
    assert numbers_that_matter(MACHINE, layers_of("dense"), Way("dense")) == links
    assert numbers_that_matter(MACHINE, layers_of("endor"), Way("endor")) == [*links, "device.decode_gb_s.endor"]
    assert numbers_that_matter(MACHINE, layers_of("endor"), Way("endor_packed", "direct")) == []
    assert numbers_that_matter(MACHINE, layers_of("endor"), Way("endor_cpu", device="cpu")) == links[:1]
    assert len(corners(MACHINE, links)) == 4


def test_seconds_and_speedups_by_hand():
    """A weight of 9216 × 36864 fp16, 0.679 GB dense; Endor's is 0.5636 of that."""
    ways = [Way("dense"), Way("endor"), Way("endor_packed", "direct")]
    table = operation_table(MACHINE, Workload("opt-66b"), ["fc1"], choices=ways)
    total = table[table["stage"] == "total"].set_index("method")
    dense_gb, packed_gb = (total["nbytes"][name] / GB for name in ("dense", "endor"))
    dense_gb, packed_gb = dense_gb / 2, packed_gb / 2  # read, then copied

    def dense(read, copy):
        return dense_gb / read + dense_gb / copy + dense_gb / 500

    def endor(read, copy, decode):
        return packed_gb / read + packed_gb / copy + dense_gb / decode + dense_gb / 500

    assert total["seconds_low"]["dense"] == pytest.approx(dense(4, 20))
    assert total["seconds_high"]["dense"] == pytest.approx(dense(1, 5))
    assert total["seconds_low"]["endor"] == pytest.approx(endor(4, 20, 100))
    assert total["seconds_high"]["endor"] == pytest.approx(endor(1, 5, 25))
    # a slow link makes the most of fewer bytes: the best corner has slow links and a quick decoder
    assert total["speedup_high"]["endor"] == pytest.approx(dense(1, 5) / endor(1, 5, 100))
    assert total["speedup_low"]["endor"] == pytest.approx(dense(4, 20) / endor(4, 20, 25))
    assert total["time_over_dense_high"]["endor"] == pytest.approx(1 / total["speedup_low"]["endor"])
    # its own time has no range, the dense one beside it has
    assert total.loc["endor_packed", ["seconds_low", "seconds_high"]].isna().all()
    assert total["speedup_high"]["endor_packed"] == pytest.approx(dense(1, 5) / total["seconds"]["endor_packed"])
    assert total["speedup_low"]["dense"] != total["speedup_low"]["dense"]  # dense over itself is 1 at every corner


def test_what_a_layer_takes_beside_its_weights_has_a_range_too():
    table = layer_table(MACHINE, Workload("opt-66b"), ["device"], [Way("dense")]).set_index("stage")
    assert (table["seconds_low"]["other"], table["seconds_high"]["other"]) == (0.01, 0.04)
    assert table["seconds_high"]["total"] - table["seconds_low"]["total"] == pytest.approx(0.03)


values = st.fixed_dictionaries({name: st.floats(*ends) for name, ends in RANGES.items()})
tiers = st.lists(st.sampled_from(MACHINE.tiers), min_size=1, max_size=3)


def layers_in(tiers, method):
    weights = WEIGHTS["dense" if method == "dense" else "endor"].weights
    return [PlacedLayer(weights, tier, overhead_s=0.5) for tier in tiers]


@settings(max_examples=25, deadline=None)
@given(values, tiers, st.sampled_from([*POLICIES]), st.sampled_from(["endor", "zstd", "endor_packed"]))
def test_no_machine_within_the_ranges_is_outside_the_corners(drawn, tiers, policy, method):
    def totals(machine):
        ways = [Way(name, policy=policy) for name in ("dense", method)]
        return [predict(machine, layers_in(tiers, way.method), way).total_s for way in ways]

    dense, other = totals(MACHINE.with_values(drawn))
    at_corners = [totals(MACHINE.with_values(corner)) for corner in corners(MACHINE, RANGES)]
    assert len(at_corners) == 32
    assert min(t for _, t in at_corners) * (1 - 1e-9) <= other <= max(t for _, t in at_corners) * (1 + 1e-9)
    if policy == "sequential":
        speedups = [d / t for d, t in at_corners]
        assert min(speedups) * (1 - 1e-9) <= dense / other <= max(speedups) * (1 + 1e-9)
