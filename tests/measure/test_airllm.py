"""AirLLM's process, with a package in AirLLM's place that loads the checkpoint whole."""

from contextlib import closing

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import UserError
from toolkit.measure import airllm
from toolkit.measure.airllm import AirLLM
from toolkit.measure.contestant import Text, greedy_text
from toolkit.measure.turns import take_turns

STAND_IN = """
from transformers import LlamaForCausalLM


class AutoModel:
    @classmethod
    def from_pretrained(cls, checkpoint, device, layer_shards_saving_path):
        open(f"{layer_shards_saving_path}/layer", "w").write("of the model")
        return LlamaForCausalLM.from_pretrained(checkpoint)
"""


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def toy():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=61)).eval()


def test_a_turn_is_the_models_own_text_and_another_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "airllm.py").write_text(STAND_IN)
    monkeypatch.setattr(airllm, "_packages", lambda: tmp_path / "packages")
    model = toy()
    text = greedy_text(model, torch.tensor([[5, 3, 7]]), 4, tolerance=0.1)
    with closing(AirLLM(model, Tokenizer(), tmp_path, text, {"way": "AirLLM"})) as rival:
        assert [rival.token(number) for number in range(3)] == [ids.item() for ids in text.inputs[1:]]
        spans = take_turns([rival], repetitions=1, tokens=4)
        assert spans["stage"].tolist() == ["read"] * 4
        assert (spans["end_s"] > spans["start_s"]).all()
        assert rival.held_bytes > 0
        other = (text.inputs[1] + 1) % 61
        rival.text = Text([text.inputs[0], other])
        with pytest.raises(UserError, match=f"AirLLM continues the prompt with token {text.inputs[1].item()}"):
            take_turns([rival], repetitions=1, tokens=2)


def test_a_process_that_ends_says_why(tmp_path, monkeypatch):
    (tmp_path / "airllm.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setattr(airllm, "_packages", lambda: tmp_path)
    model = toy()
    with pytest.raises(UserError, match="AirLLM ended: no such model"):
        AirLLM(model, Tokenizer(), tmp_path, Text([torch.tensor([[1]])]), {})
