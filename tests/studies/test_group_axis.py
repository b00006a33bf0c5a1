"""Groups along and across neurons: errors of a tiny model's FFNs, by the study's own parts."""

import torch

from toolkit.studies.group_axis import ACROSS, ALONG_INPUTS, ALONG_NEURON, AXES, RECORDS, _decoded, _errors


def test_what_each_axis_quantises():
    generator = torch.Generator().manual_seed(0)
    dense = [tuple(torch.randn(128, 64, generator=generator) * 0.02 for _ in range(3)) for _ in range(2)]
    found = _decoded(dense, 4)
    assert set(found) == set(AXES)
    for one, other, mixed in zip(found[ALONG_NEURON], found[ACROSS], found[ALONG_INPUTS], strict=True):
        assert all(map(torch.equal, mixed, (one[0], one[1], other[2])))
    errors = {axis: _errors(dense, of_axis) for axis, of_axis in found.items()}
    assert all(0.05 < error < 0.12 for of_axis in errors.values() for error in of_axis.values())
    for part, error in errors[RECORDS].items():  # 8 bits for scales cost little
        assert abs(error / errors[ALONG_NEURON][part] - 1) < 0.02


def test_the_error_by_hand():
    """3 and 4 instead of 0: all of the norm, 5 of 5; nothing lost in the other matrices."""
    weight, zeros = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    errors = _errors([(weight, weight, weight)], [(zeros, weight, weight)])
    assert errors == {"gate_error": 1.0, "up_error": 0.0, "down_error": 0.0}
