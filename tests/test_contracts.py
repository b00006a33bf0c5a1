import pytest
import torch

from toolkit.quantization import absmax_int8


@pytest.mark.parametrize("weight", [torch.zeros(8), torch.zeros(2, 4, dtype=torch.int64)])
def test_tensors_that_break_their_annotation_are_refused_under_the_tests(weight):
    with pytest.raises(TypeError, match="weight"):
        absmax_int8(weight)
