from dataclasses import make_dataclass

import pytest
import torch
from jaxtyping import Float

from tests import contracts
from toolkit.policies.placement import LayerMap
from toolkit.quantization import absmax_int8


@pytest.mark.parametrize("weight", [torch.zeros(8), torch.zeros(2, 4, dtype=torch.int64)])
def test_tensors_that_break_their_annotation_are_refused_under_the_tests(weight):
    with pytest.raises(TypeError, match="weight"):
        absmax_int8(weight)


def test_the_return_value_and_other_arguments_are_left_alone():
    assert absmax_int8(torch.eye(2)).dtype == torch.int8


def test_functions_without_annotated_arrays_are_not_slowed_down():
    assert not hasattr(LayerMap.refilled, "__wrapped__")
    assert hasattr(absmax_int8, "__wrapped__")


@pytest.mark.parametrize(
    ("hint", "expected"), [(Float[torch.Tensor, "3"], True), ("Float[Tensor, '3']", True), (torch.Tensor, False)]
)
def test_which_functions_and_classes_are_checked(hint, expected):
    def function(array: hint) -> Float[torch.Tensor, "3"]:
        return array

    assert contracts.takes_arrays(function) is expected
    assert contracts.takes_arrays(make_dataclass("Made", [("array", hint)])) is expected
