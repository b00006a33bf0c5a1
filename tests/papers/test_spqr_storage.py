"""SpQR's tiles and storages of outliers: hand-worked matrices and slow loops."""

import numpy as np
import pytest

from tests import naive_spqr
from tests.notebook_code import functions_of
from tests.quantization.test_outliers import outliers, random
from toolkit.quantization.spqr import SpQR

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
