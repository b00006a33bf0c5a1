"""Round-to-nearest and GPTQ against hand-worked groups and a slow one that shrinks the inverse Hessian."""

import math

import pytest
import torch

from tests import naive_gptq as naive
from tests.quantization.conftest import gram_of, random
from toolkit.errors import UserError
from toolkit.quantization.gptq import GPTQ
from toolkit.quantization.groups import Groups, pack, unpack
from toolkit.quantization.rtn import RoundToNearest


def codes_of(matrix):
    return unpack(matrix.packed, matrix.bits, math.prod(matrix.shape)).view(matrix.shape)


def test_codes_are_packed_without_a_gap():
    assert pack(torch.tensor([5, 1, 7], dtype=torch.uint8), 3).tolist() == [0b11001101, 0b1]
    assert pack(torch.tensor([[1, 2], [3, 0]], dtype=torch.uint8), 2).tolist() == [0b00111001]


def test_two_groups_worked_by_hand():
    weight = torch.tensor([[-1.0, 0.0, 0.6, 2.0, 0.0, 0.0], [3.0, 1.4, 0.0, 1.6, 3.0, -3.0]])
    found = RoundToNearest(bits=2, group=4)(weight)
    assert found.scales.tolist() == [[1.0, 1.0], [1.0, 2.0]]  # steps of 1 from -1, 0; steps of 2 from -3
    assert found.zeros.tolist() == [[1.0, 0.0], [0.0, 1.5]]
    assert codes_of(found).tolist() == [[0, 1, 2, 3, 0, 0], [3, 1, 0, 2, 3, 0]]
    assert found.decode().tolist() == [[-1.0, 0.0, 1.0, 2.0, 0.0, 0.0], [3.0, 1.0, 0.0, 2.0, 3.0, -3.0]]


def test_every_byte_is_counted():
    weight, gram = random(0, 24, 40, dtype=torch.float32), gram_of(1, 40, torch.float32)
    plain, ordered = GPTQ(3, 16)(weight, gram), GPTQ(3, 16, reorder=True)(weight, gram)
    assert plain.nbytes == 24 * 40 * 3 // 8 + 24 * 3 * 2 * 2 + 2 * 4  # codes; scales and zero points; bits and group
    assert ordered.nbytes == plain.nbytes + 40 * 4
    for matrix in (plain, ordered):
        assert torch.equal(Groups.of_tensors((24, 40), matrix.tensors).decode(), matrix.decode())


@pytest.mark.parametrize(("shape", "bits", "group"), [((1, 5), 3, 32), ((6, 40), 4, 64), ((16, 70), 2, 16)])
def test_a_matrix_is_quantised_as_the_slow_oracle_does_it(shape, bits, group):
    weight, gram = random(sum(shape), *shape) * 0.05, gram_of(7, shape[1])
    quantised = GPTQ(bits, group, block_size=64)(weight, gram)
    codes, expected = naive.gptq(weight.numpy(), gram.numpy(), bits, group, 0.01)
    assert codes_of(quantised).tolist() == codes.tolist()
    torch.testing.assert_close(quantised.decode().numpy().astype("float64"), expected, rtol=1e-6, atol=1e-9)
    rounded = RoundToNearest(bits, group)(weight.float())
    codes, expected = naive.round_to_nearest(weight.float().double().numpy(), bits, group)
    assert codes_of(rounded).tolist() == codes.tolist()
    torch.testing.assert_close(rounded.decode().numpy().astype("float64"), expected, rtol=1e-6, atol=1e-9)


def test_settings_are_checked():
    for make in (GPTQ, RoundToNearest):
        for settings in ({"bits": 9}, {"group": 0}):
            with pytest.raises(UserError, match=rf"{next(iter(settings))}.* {next(iter(settings.values()))}"):
                make(**settings)
