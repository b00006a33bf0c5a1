import pytest
import torch

from toolkit.errors import UserError
from toolkit.measure.llama_cpp_quantiser import GgufMatrix


def test_rows_that_are_no_whole_blocks_are_refused_before_llama_cpp_writes_beyond_its_buffer():
    with pytest.raises(UserError, match="Q4_K: rows of 384 values; expected a multiple of 256"):
        GgufMatrix.encode(torch.zeros(2, 384), "Q4_K")
