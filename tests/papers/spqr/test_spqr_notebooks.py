"""SpQR's notebooks: operations, tiles and storages against slow loops, passes and twins on times made by hand."""

import numpy as np
import pandas as pd
import pytest

from tests import naive_spqr
from tests.notebook_code import functions_of
from tests.quantization.test_outliers import outliers, random
from toolkit.machines.hardware import Memory, profile
from toolkit.papers.spqr.forward_pass import ModelTwin
from toolkit.papers.spqr.speedups import without_kernels
from toolkit.quantization.spqr import SpQR

tab1_1 = functions_of("spqr/tab1_1")
decode_operations, linear, roofline = tab1_1.decode_operations, tab1_1.linear, tab1_1.roofline

LLAMA_2_7B = {"hidden": 4096, "ffn": 11008, "heads": 32, "context": 2048}
# by hand: 2 × 4096² = 33,554,432 operations on as many bytes of weights, and 16 KiB of vectors; and so on
BY_HAND = {
    "q": (33_554_432, 33_554_432 + 16_384),
    "gate": (90_177_536, 90_177_536 + 2 * 4096 + 2 * 11008),
    "down": (90_177_536, 90_177_536 + 2 * 4096 + 2 * 11008),
    "qk": (16_777_216, 16_777_216 + 2 * 4096 + 2 * 65_536),
    "sv": (16_777_216, 16_777_216 + 2 * 4096 + 2 * 65_536),
    "softmax": (327_680, 262_144),
    "norm": (28_672, 16_384),
    "add": (4_096, 16_384),
}


def test_llama_2_7b_by_hand():
    table = decode_operations(**LLAMA_2_7B).set_index("operation")
    for name, numbers in BY_HAND.items():
        assert tuple(table.loc[name, ["ops", "moved_bytes"]]) == numbers, name


def rows(**mat_vecs):
    table = pd.DataFrame.from_dict(mat_vecs, orient="index", columns=["ops", "moved_bytes"])
    return table.assign(intensity=table["ops"] / table["moved_bytes"]).rename_axis("operation").reset_index()


def test_roofline_on_both_sides_of_its_ridge():
    gpu = Memory("toy", 1.0, 1000.0, {"fp16": 2.0})  # ridge at 2 operations a byte
    operations = rows(packed=linear(4000, 4000, weight_bits=3), dense=linear(4000, 4000))
    packed, dense = roofline(operations, {"toy": gpu}).to_dict("records")
    assert (packed["limit"], packed["attainable_ops_s"]) == ("compute", 2e12)
    assert dense["limit"] == "memory"
    assert dense["attainable_ops_s"] == pytest.approx(dense["intensity"] * 1e12)
    assert dense["seconds"] == pytest.approx(dense["moved_bytes"] / 1e12)  # memory-bound: the time of its bytes


spqr_tile, spqr_storage = functions_of("spqr/fig3_1"), functions_of("spqr/fig3_4")


@pytest.fixture(scope="module")
def quantised():
    return SpQR(outliers=0.02).round(random(0, 40, 48))


def test_a_tile_is_what_the_matrix_has_there(quantised):
    weight = random(0, 40, 48)
    tile = spqr_tile.tile_at(weight, quantised.words, quantised.outliers, 1, 2)
    assert np.array_equal(tile.decoded, quantised.decode()[16:32, 32:48].numpy())
    assert np.array_equal(tile.original, weight[16:32, 32:48].numpy())
    dense = naive_spqr.dequantise([int(word) for word in tile.words], 16, 16)
    assert np.array_equal(tile.dense, dense.astype(np.float32))
    for row in range(16):
        scale, zero = spqr_tile.row_statistics(tile, row)
        codes = tile.codes.weights[row].numpy()
        expected = [float(np.float16(scale) * (np.float16(int(code)) - np.float16(zero))) for code in codes]
        assert tile.dense[row].tolist() == expected


def test_every_bit_belongs_to_the_field_that_the_oracle_packs():
    fields = spqr_tile.field_of_bits()
    zeros = [[0] * 16 for _ in range(16)]
    for name, (weights, scales, zero_points) in {
        "weights": (7, 0, 0),
        "scale": (0, 7, 0),
        "zero point": (0, 0, 7),
    }.items():
        parts = [
            [[value] * width for _ in range(16)] for value, width in ((weights, 16), (scales, 1), (zero_points, 1))
        ]
        (word, *_) = naive_spqr.pack(*parts, [[[0.0] * 4]])
        assert {fields[bit] for bit in range(64) if word >> bit & 1} == {name}
    (word, *_) = naive_spqr.pack(zeros, [[0]] * 16, [[0]] * 16, [[[65504.0] * 4]])
    assert {fields[bit] for bit in range(64) if word >> bit & 1} == {"second-order share"}
    assert fields.count("unused") == 2


def test_storages_by_hand():
    """Rows 0 to 15 have one outlier each but for the first with three; rows 16 and 17 have two."""
    sizes = spqr_storage.storage_sizes([(4, "q_proj", outliers([3] + [1] * 15 + [2, 2]))]).set_index("storage")
    assert sizes["outlier_bytes"].tolist() == [4 * 22] * 2
    assert sizes["padding_bytes"].to_dict() == {"csr": 0, "ptcsr": 4 * (16 * 3 + 16 * 2 - 22)}
    assert sizes["offset_bytes"].to_dict() == {"csr": 4 * 19, "ptcsr": 4 * 3}
    assert sizes.loc["csr", "bits_per_weight"] == pytest.approx(8 * 4 * (22 + 19) / (18 * 64))
    assert spqr_storage.words(np.array([3] + [1] * 15 + [2, 2])) == (22 + 19, 16 * 5 + 3)


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
