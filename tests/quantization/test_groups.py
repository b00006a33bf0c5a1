"""Round-to-nearest and GPTQ against hand-worked groups, exact grids and a slow one that shrinks the inverse Hessian."""

import math

import pytest
import torch

from tests import naive_gptq as naive
from toolkit.errors import UserError
from toolkit.quantization.gptq import GPTQ
from toolkit.quantization.groups import Groups, pack, unpack
from toolkit.quantization.rtn import RoundToNearest


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gram_of(seed, columns, dtype=torch.float64):
    inputs = random(seed, 3 * columns, columns, dtype=dtype)
    return inputs.T @ inputs


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


@pytest.mark.parametrize("reorder", [False, True])
def test_a_weight_on_its_grid_is_kept_exactly(reorder):
    codes = torch.randint(0, 8, (20, 48), generator=torch.Generator().manual_seed(3))
    codes[:, ::16], codes[:, 1::16] = 0, 7  # each group reaches both ends of its grid
    weight = (codes - 3) / 64
    assert torch.equal(GPTQ(3, 16, reorder=reorder)(weight, torch.eye(48)).decode(), weight)
    assert torch.equal(RoundToNearest(3, 16)(weight).decode(), weight)


def test_activation_order_quantises_the_columns_that_matter_first():
    weight, inputs = random(0, 32, 64, dtype=torch.float32), random(1, 300, 64, dtype=torch.float32)
    inputs *= torch.linspace(0.1, 3, 64)
    gram = inputs.T @ inputs
    quantised = GPTQ(3, 16, reorder=True)(weight, gram)
    order = quantised.permutation.long()
    assert sorted(order.tolist()) == list(range(64))
    assert gram.diagonal()[order].diff().max() <= 0
    by_hand = GPTQ(3, 16)(weight[:, order], gram[order][:, order])
    assert torch.equal(quantised.decode()[:, order], by_hand.decode())


def test_columns_without_input_and_matrices_of_one_value():
    weight, gram = random(0, 20, 32, dtype=torch.float32), gram_of(1, 32, torch.float32)
    gram[:, 5] = gram[5] = 0
    found = GPTQ()(weight, gram).decode()[:, 5]
    assert found.abs().max() <= weight.abs().max() / 7  # zero, as near as the group's steps come to it
    for value in (0.0, 0.75, -3.0, 1e-9):
        constant = torch.full((20, 32), value)
        for quantise in (GPTQ(), RoundToNearest()):
            torch.testing.assert_close(
                quantise(constant, gram_of(1, 32, torch.float32)).decode(), constant, rtol=2e-3, atol=6e-8
            )


def test_what_cannot_be_quantised_is_refused():
    for make in (GPTQ, RoundToNearest):
        for settings in ({"bits": 9}, {"group": 0}):
            with pytest.raises(UserError, match=rf"{next(iter(settings))}.* {next(iter(settings.values()))}"):
                make(**settings)
    weight = torch.zeros(4, 16)
    weight[1, 2] = 70000.0
    for quantise in (GPTQ(), RoundToNearest()):
        with pytest.raises(UserError, match="not finite or too large for fp16"):
            quantise(weight, torch.eye(16))
