"""SpQR's forward passes and twins on times made by hand, and modelled fig4_3."""

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.costs.hardware import profile
from toolkit.papers.spqr.passes import ModelTwin
from toolkit.papers.spqr.speedups import without_kernels

fig4_3 = functions_of("spqr/fig4_3")
SECONDS = {"dense": [[4, 5, 9], [8, 8, 8]], "spqr_packed": [[2, 2, 2], [2, 4, 4]], "spqr_ptcsr_packed": [[5] * 3] * 2}
LINEAR_BYTES = {"dense": 200, "spqr_packed": 54, "spqr_ptcsr_packed": 60}
TWIN_SECONDS = {("dram", "spqr"): [2, 4, 2], ("dram", "llama.cpp Q3_K"): [3, 3, 5], ("storage", "spqr"): [8, 8, 9]}
GPUS = ["spqr-a100", "spqr-rtx4060-mobile"]


@pytest.fixture
def tokens():
    return pd.DataFrame(
        {"method": method, "repetition": number, "token": token, "seconds": float(value), "linear_bytes": nbytes}
        for (method, repetitions), nbytes in zip(SECONDS.items(), LINEAR_BYTES.values(), strict=True)
        for number, values in enumerate(repetitions, 1)
        for token, value in enumerate(values)
    ).assign(weights=100, disturbed=False, weight_bytes=lambda table: table["linear_bytes"] + 50)


@pytest.fixture
def table(tokens):
    machines = {name: profile(name) for name in GPUS}
    bits = fig4_3.stored_bits(tokens)
    modelled = fig4_3.modelled_passes(bits, "llama2-7b", machines, GPUS[0])
    return pd.concat([modelled, fig4_3.measured_passes(tokens, "toy")], ignore_index=True)


def test_passes_by_hand(table):
    mine = table[table["profile"] == "this-machine"].set_index("method")
    assert mine.loc["dense", ["seconds_low", "mean_s", "seconds"]].tolist() == [4, 7, 8]
    packed = mine.loc["spqr_packed"]
    assert [packed["speedup_low"], packed["speedup"], packed["speedup_high"]] == [2, 2.25, 2.5]  # 5 / 2 and 8 / 4
    assert packed["byte_limit"] == pytest.approx(250 / 104)
    assert (packed["bits_per_weight"], packed["dense_bits"]) == (4.32, 16)
    assert packed["gb_s"] == pytest.approx(104 / 2e9)


WEIGHTS, HEAD = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096


def test_bytes_over_bandwidth_by_hand(tokens):
    assert fig4_3.stored_bits(tokens).to_dict() == {"dense": 16, "spqr_packed": 4.32, "spqr_ptcsr_packed": 4.8}
    bare = without_kernels({name: profile(name) for name in GPUS})
    null = fig4_3.modelled_passes({**fig4_3.stored_bits(tokens), "dense": 32}, "llama2-7b", bare, GPUS[0])
    null = null.set_index(["profile", "method"])["seconds_low"]
    assert null["spqr-a100", "dense"] == pytest.approx(2 * (WEIGHTS + HEAD) / 1555e9)  # 16 bits there, whatever here
    assert null["spqr-rtx4060-mobile", "spqr_packed"] == pytest.approx((0.54 * WEIGHTS + 2 * HEAD) / 256e9)
    assert ("spqr-rtx4060-mobile", "dense") not in null.index  # it does not fit


def test_a_pass_is_its_products_one_after_the_other(table):
    """32 layers of 7 products and the head, each with a launch; the A100 waits for instructions, not for bytes."""
    modelled = table[table["profile"] == "spqr-a100"].set_index("method")["seconds_low"]
    launches, head_s = (32 * 7 + 1) * 5e-6, 2 * HEAD / (0.85 * 1555e9)
    assert modelled["dense"] == pytest.approx(launches + head_s + 2 * WEIGHTS / (0.85 * 1555e9))
    for method in ("spqr_packed", "spqr_ptcsr_packed"):
        assert modelled[method] == pytest.approx(launches + head_s + WEIGHTS / 16 * 2.13 / 152.3e9)


def test_twins_by_hand():
    """Turn by turn llama.cpp takes 3 / 2, 3 / 4 and 5 / 2 times as long."""
    turns = pd.DataFrame(
        {"way": way, "place": place, "repetition": number, "seconds": float(seconds)}
        for (place, way), values in TWIN_SECONDS.items()
        for number, seconds in enumerate(values, 1)
    ).assign(
        layer_bytes=50, weights=100, head_bytes=10, read_bytes=48, mode="memory", disturbed=[*[True] * 3, *[False] * 6]
    )
    table = fig4_3.twin_passes(turns, ModelTwin("toy", 5))
    spqr, rival, streamed = table.to_dict("records")
    assert [spqr["seconds_low"], spqr["seconds"], spqr["seconds_high"]] == [2, 2, 4]
    assert table["disturbed"].tolist() == [1, 0, 0]
    assert [spqr["over_rival"], rival["over_rival"]] == [1.5, 1]
    assert pd.isna(streamed["over_rival"])
    assert spqr["bits_per_weight"] == 4
    assert spqr["gb_s"] == pytest.approx(60 / 2e9)
    assert streamed["gb_s"] == pytest.approx(48 / streamed["seconds"] / 1e9)  # without the head
    assert set(table["evidence"]) == {"measured"}
