import numpy as np
import pytest

from toolkit.papers.hermes.tally import pick, tally


@pytest.mark.parametrize("units", [0, 1, 5, 1001])
@pytest.mark.parametrize(("places", "level"), [(2, np.uint8), (127, np.int64)])
def test_as_a_loop_counts(units, places, level):
    generator = np.random.default_rng(units)
    place = generator.integers(0, places, units).astype(np.int8)
    levels = generator.integers(0, 6, units).astype(level)
    counts = tally(place, levels, places, 6)
    expected = np.zeros((places, 6), dtype=np.int64)
    for kind in zip(place, levels, strict=True):
        expected[kind] += 1
    assert (counts == expected).all()

    quota, left, wanted = (counts + 1) // 2, (counts + 1) // 2, []
    for unit, kind in enumerate(zip(place, levels, strict=True)):
        if left[kind]:
            left[kind] -= 1
            wanted.append(unit)
    assert pick(place, levels, quota).tolist() == wanted
    assert (quota == (counts + 1) // 2).all()
