"""Records of quantised neurons: their bytes by hand, what they decode to, and what is refused."""

import numpy as np
import pytest
import torch

from toolkit.errors import UserError
from toolkit.kernels.neurons.records import codes_start, group_of, groups, section_bytes
from toolkit.quantization.neuron_records import decode, encode, record_bytes

HIDDEN = 192


def matrices(neurons=20, hidden=HIDDEN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(neurons, hidden, generator=generator) * 0.02 for _ in range(3)]


def slow_decode(record, hidden, bits):
    """One weight at a time, as the layout says it."""
    found, nbytes = np.zeros((3, hidden)), section_bytes(hidden, bits)
    for part in range(3):
        section = record[part * nbytes : (part + 1) * nbytes]
        scale_step, scale_offset, zero_step, zero_offset = section[:8].view(np.float16).astype(np.float64)
        count, start = groups(hidden, bits), codes_start(hidden, bits)
        numbers = section[start:].view("<u2" if bits == 4 else "u1")
        for column in range(hidden):
            group = column // group_of(bits)
            scale = scale_step * section[8 + group] + scale_offset
            zero = zero_step * section[8 + count + group] + zero_offset
            number = int(numbers[column // 64 * 16 + column % 16])
            code = number >> bits * (column % 64 // 16) & 2**bits - 1
            found[part, column] = scale * (code - zero)
    return found


@pytest.mark.parametrize(
    ("hidden", "bits", "expected"),
    [(4096, 4, 6592), (4096, 2, 4672), (2048, 4, 3328), (576, 4, 960), (576, 2, 704), (64, 4, 192), (64, 2, 128)],
)
def test_bytes_of_a_record(hidden, bits, expected):
    """3 · (2048 + 64 + 64 + 8) = 6552, and 3 · (1024 + 256 + 256 + 8) = 4632, up to a multiple of 64."""
    by_hand = 3 * (-(-(8 + 2 * hidden // group_of(bits)) // 8) * 8 + hidden * bits // 8)
    assert record_bytes(hidden, bits) == -(-by_hand // 64) * 64
    assert record_bytes(hidden, bits) == expected


def test_a_record_by_hand():
    """64 weights, 4 bits: weight i has code i % 16, so number `lane` holds `lane` four times; scale 0.5, zero 8."""
    record = torch.zeros(1, record_bytes(64, 4), dtype=torch.uint8)
    record[0, :8] = torch.tensor([0.25, 0.0, 2.0, 1.0], dtype=torch.float16).view(torch.uint8)
    record[0, 8], record[0, 9] = 2, 3  # scale 0.25 · 2 + 0, zero 2 · 3 + 1 = 7
    record[0, 16:48] = torch.tensor([[lane * 17] * 2 for lane in range(16)]).flatten()
    gate, up, down = decode(record, 64, 4)
    assert gate[0].tolist() == [0.5 * (lane - 7) for lane in range(16)] * 4
    assert not up.any()
    assert not down.any()


@pytest.mark.parametrize("bits", [4, 2])
def test_decoded_weights_are_those_of_the_layout(bits):
    records = encode(*matrices(), bits)
    found = torch.stack(decode(records, HIDDEN, bits), 1)
    expected = np.stack([slow_decode(record, HIDDEN, bits) for record in records.numpy()])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_groups_of_equal_weights_do_not_spoil_their_row():
    """The package gives such groups a scale of 1, which would leave the others of the row few steps of scale."""
    given = matrices()
    found = decode(encode(*given), HIDDEN)
    plain = [(decoded - weight)[:, 64:].norm() for weight, decoded in zip(given, found, strict=True)]
    for weight in given:
        weight[:, :64] = 0
    given[0][1], given[1][2] = 0.5, 0
    found = decode(encode(*given), HIDDEN)
    others = torch.arange(len(given[0])) > 2
    for weight, decoded, error in zip(given, found, plain, strict=True):
        assert decoded[others, :64].abs().max() <= 1e-4
        assert (decoded - weight)[others, 64:].norm() <= 1.2 * error
    assert (found[0][1] - 0.5).abs().max() < 2e-3
    assert not found[1][2].any()


def test_bad_input():
    for change, names in (
        ({"bits": 3}, "unknown number of bits of a neuron's codes 3"),
        ({name: torch.ones(4, 96) for name in ("gate", "up", "down_transposed")}, "hidden is 96"),
        ({"down_transposed": torch.full((4, 64), torch.nan)}, "cannot quantise down_transposed"),
        ({"gate": torch.arange(256.0).view(4, 64) * 1e5}, "cannot quantise gate: a group's scale .* beyond fp16"),
    ):
        given = dict.fromkeys(("gate", "up", "down_transposed"), torch.ones(4, 64)) | change
        with pytest.raises(UserError, match=names):
            encode(**given)
