"""SpQR's tiles, row densities and storages of outliers: hand-worked matrices and slow loops."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from tests import naive_spqr
from toolkit.errors import UserError
from toolkit.evidence.comparison import NOT_RUN, compare
from toolkit.kernels import csr
from toolkit.papers import spqr_density, spqr_storage, spqr_tile
from toolkit.quantization.spqr import SpQR


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(counts, columns=64):
    """So many outliers in each row, in its first columns."""
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    values = torch.ones(len(rows), dtype=torch.float16)
    return csr.encode("csr", (len(counts), columns), torch.from_numpy(rows), torch.from_numpy(places), values)


def title(axes):
    """Wherever the style puts it."""
    return axes.get_title() or axes.get_title(loc="left")


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


@pytest.mark.parametrize("place", [(2, 0), (0, 3), (-1, 0)])
def test_a_tile_that_is_not_whole(quantised, place):
    with pytest.raises(UserError, match="whole one inside"):
        spqr_tile.tile_at(random(0, 40, 48), quantised.words, quantised.outliers, *place)


def test_the_busiest_tile_is_counted():
    rows, columns = torch.tensor([0, 17, 18, 39]), torch.tensor([0, 20, 31, 5])
    found = csr.encode("csr", (40, 48), rows, columns, torch.ones(4, dtype=torch.float16))
    assert spqr_tile.busiest_tile(torch.empty(0), found) == (1, 1)


def test_every_bit_belongs_to_the_field_that_the_oracle_packs():
    fields = spqr_tile._field_of_bits()
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


def test_the_claims_of_the_tile_are_counted_and_its_figure_is_drawn(quantised):
    table = spqr_tile.storage_table(quantised, "llama2-7b")
    value = table.set_index("quantity")["value"]
    assert value["saved in llama2-7b"] == pytest.approx(32 * 8 * (4 * 256**2 + 3 * 256 * 688) / 1e6)
    assert value["bits a weight, words"] == pytest.approx(4 * 48 * 48 / (40 * 48))  # rows are padded to 48
    comparison = compare(table, "spqr/fig3_1").set_index("claim")
    assert set(comparison.index[comparison["verdict"] == NOT_RUN]) == {
        "fig3_1-shuffles",
        "fig3_1-shuffles-small-shares",
        "fig3_1-bits-low",
    }
    tile = spqr_tile.tile_at(random(0, 40, 48), quantised.words, quantised.outliers, 0, 0)
    figure = spqr_tile.tile_figure(tile, 3)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "".join(texts[bit * 16 + 3] for bit in reversed(range(64))) == f"{int(tile.words[3]):064b}"
    plt.close(figure)
    assert "a 3-bit weight takes" in spqr_tile.tile_sentence(table, tile, "toy")


def test_densities_by_hand():
    counts = np.array([0] * 10 + [1] * 9 + [11])
    found = spqr_density.spread(counts, 50, np.random.default_rng(0))
    assert (found["outliers"], found["share_percent"]) == (20, pytest.approx(2))
    assert (found["density_median"], found["density_most"]) == (1, 22)
    assert found["densest_tenth_percent"] == pytest.approx(100 * 12 / 20)  # two of twenty rows
    assert found["heaviest_over_chance"] > 2
    assert spqr_density.densest_tenth(np.zeros(20, int)) == 0


def test_outliers_at_random_look_like_chance():
    counts = np.random.default_rng(1).multinomial(4000, np.full(400, 1 / 400))
    found = spqr_density.spread(counts, 1000, np.random.default_rng(0))
    assert found["densest_tenth_percent"] == pytest.approx(found["densest_tenth_chance"], rel=0.1)
    assert found["heaviest_over_chance"] == pytest.approx(1, abs=0.25)


def test_rows_are_counted_by_layer_and_operation():
    matrices = [(1, "q_proj", outliers([1, 1])), (0, "q_proj", outliers([3, 0, 2])), (0, "k_proj", outliers([0, 1]))]
    found = [{"q_proj": [3, 0, 2], "k_proj": [0, 1]}, {"q_proj": [1, 1]}]
    assert spqr_density.densities_by_layer(matrices) == found


def test_the_error_of_the_worst_weights_is_that_of_a_loop():
    weight, inputs = random(1, 6, 20), random(2, 60, 20)
    gram = inputs.T @ inputs
    hessian = gram.double() + 0.1 * gram.diagonal().double().mean() * torch.eye(20, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    rounded = SpQR(outliers=0).round(weight).decode()
    errors = sorted(
        float(weight[i, j] - rounded[i, j]) ** 2 / float(inverse[j, j]) for i in range(6) for j in range(20)
    )
    expected = 100 * sum(errors[-12:]) / sum(errors)
    assert spqr_density.sensitive_share(weight, gram, 0.1) == pytest.approx(expected, rel=1e-4)


def test_a_summary_of_densities():
    found = [(0, op, outliers([8] + [1] * 19)) for op in ("q_proj", "k_proj")] + [(0, "up_proj", outliers([2] * 20))]
    table = spqr_density.density_table(found)
    sensitive = pd.DataFrame({"layer": 0, "op": ["q_proj"], "share": 0.01, "worst_percent": 40.0})
    summary = spqr_density.density_summary(table, sensitive)
    value = summary.set_index("quantity")["value"]
    assert value["concentration of Q and K over the others"] == pytest.approx((9 / 27) / (4 / 40))
    assert value["share of outliers"] == pytest.approx(100 * 94 / (3 * 20 * 64))
    comparison = compare(summary.assign(evidence="measured"), "spqr/fig3_3")
    assert (comparison["verdict"] != NOT_RUN).all()
    assert "q_proj" in spqr_density.density_sentence(table, summary, sensitive)
    figure = spqr_density.density_figure(table)
    assert [title(axes) for axes in figure.axes[:3]] == ["q_proj", "k_proj", "up_proj"]
    plt.close(figure)


def test_storages_by_hand():
    """Rows 0 to 15 have one outlier each but for the first with three; rows 16 and 17 have two."""
    sizes = spqr_storage.storage_sizes([(4, "q_proj", outliers([3] + [1] * 15 + [2, 2]))]).set_index("storage")
    assert sizes["outlier_bytes"].tolist() == [4 * 22] * 2
    assert sizes["padding_bytes"].to_dict() == {"csr": 0, "ptcsr": 4 * (16 * 3 + 16 * 2 - 22)}
    assert sizes["offset_bytes"].to_dict() == {"csr": 4 * 19, "ptcsr": 4 * 3}
    assert sizes.loc["csr", "bits_per_weight"] == pytest.approx(8 * 4 * (22 + 19) / (18 * 64))
    assert spqr_storage._words(np.array([3] + [1] * 15 + [2, 2])) == (22 + 19, 16 * 5 + 3)


def test_the_padding_of_a_model_follows_its_rows():
    flat, heavy = [
        [dict.fromkeys(spqr_storage.twin_shapes("llama2-7b"), density)] for density in ([1], [1] * 15 + [16])
    ]
    even, uneven = (
        spqr_storage.model_padding(densities, "llama2-7b", 0.01).groupby("spread")["padding_mb"].sum()
        for densities in (flat, heavy)
    )
    assert even["as quantised"] == pytest.approx(even["even"], rel=0.02)
    assert even["even"] == pytest.approx(uneven["even"], rel=0.02)
    # a row in sixteen has 16 of every 31 outliers, and pads fifteen to its length: 16 · 16 / 31 words for each outlier
    outlier_mb = 4 * 0.01 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) / 1e6
    assert uneven["as quantised"] == pytest.approx(outlier_mb * (256 / 31 - 1), rel=0.03)


def test_the_storages_are_drawn_word_by_word():
    found = outliers([3] + [1] * 15)
    sizes = spqr_storage.storage_sizes([(0, "q_proj", found), (1, "q_proj", found)])
    figure = spqr_storage.storage_figure(found, spqr_storage.typical_block(found), sizes)
    csr_texts, ptcsr_texts = ([text.get_text() for text in axes.texts] for axes in figure.axes[1:3])
    assert csr_texts == ["0", "0", "0", *map(str, range(1, 16))]
    assert len(ptcsr_texts) == 48
    assert [title(axes) for axes in figure.axes[1:3]] == [
        "CSR: 18 words, 17 offsets",
        "PTCSR: 48 words, 2 offsets",
    ]
    plt.close(figure)


def test_the_claims_of_storage_find_their_rows():
    sizes = spqr_storage.storage_sizes([(0, "q_proj", outliers([3] + [1] * 15))])
    padding = pd.DataFrame({"spread": ["even", "as quantised"], "padding_mb": [70.0, 190.0]})
    summary = spqr_storage.storage_summary(sizes, padding)
    comparison = compare(summary, "spqr/fig3_4").set_index("claim")
    assert (comparison["verdict"] != NOT_RUN).all()
    assert comparison.loc["fig3_4-padding", "ours"] == 190
    assert "padding would take 70 MB" in spqr_storage.storage_sentence(sizes, summary, "toy")
