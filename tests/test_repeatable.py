"""Same seed, same machine: what notebooks save is the same but for clock times."""

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.sparsity import METHODS, prune


def without_times(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=[name for name in table if name.endswith(("_s", "seconds"))])


def pruned(method: str, vocabulary: int = 97) -> tuple[pd.DataFrame, torch.nn.Module]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, **sizes)).eval()
    calibration = torch.randint(0, vocabulary, (256,), generator=torch.Generator().manual_seed(0))
    return pd.DataFrame(prune(model, method, calibration=calibration.view(-1, 64))), model


@pytest.mark.parametrize("method", METHODS)
def test_pruning_repeats_to_the_bit(method):
    (first, model), (second, again) = pruned(method), pruned(method)
    pd.testing.assert_frame_equal(without_times(first), without_times(second), check_exact=True)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
