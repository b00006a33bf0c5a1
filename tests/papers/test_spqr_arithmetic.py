"""SpQR's table 1.1: operation counts by hand, against loops, and on rooflines whose ridge is easy to see."""

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.costs.hardware import Memory, profile

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


def test_a_mat_vec_counts_what_its_loop_does():
    inputs, outputs, ops, touched = 3, 5, 0, 0
    for _ in range(outputs):
        touched += 1  # the output
        for _ in range(inputs):
            ops, touched = ops + 2, touched + 1  # a multiply-add; a weight
    touched += inputs
    assert linear(inputs, outputs) == (ops, 2 * touched)


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


def test_decoding_llama_is_memory_bound_on_the_a6000():
    table = roofline(decode_operations(**LLAMA_2_7B), {"a6000": profile("spqr-a6000").device})
    assert set(table["limit"]) == {"memory"}
    assert table.set_index("operation")["attainable_ops_s"]["add"] == 192e9
