"""Shapes of published models against the number of parameters that their makers give."""

import pytest

from toolkit.models.architectures import ARCHITECTURES

TOTALS = {  # 10⁹ parameters
    "opt-1.3b": 1.316,
    "opt-2.7b": 2.652,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 29.97,
    "opt-66b": 65.7,
    "tinyllama-1.1b": 1.10,
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "falcon-7b": 6.92,
    "falcon-40b": 41.3,
    "persimmon-8b": 9.40,
    "phi-2": 2.78,
    "mixtral-8x7b": 46.7,
    "deepseek-moe-16b": 16.4,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.55,
    "llama3.1-405b": 405.9,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "phi-4": 14.66,
    "mistral-small-24b": 23.57,
    "gemma3-27b": 27.01,  # without the vision encoder
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.8,
    "glm-4.5-air": 106.9,  # without the layer that predicts a second token
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.5,
}


def test_parameters_add_up_to_the_known_total():
    assert ARCHITECTURES.keys() - TOTALS.keys() == {"opt-1536"}
    for name, total in TOTALS.items():
        assert sum(ARCHITECTURES[name].parameters.values()) / 1e9 == pytest.approx(total, rel=0.01), name
        assert ARCHITECTURES[name].nbytes() == 2 * sum(ARCHITECTURES[name].parameters.values())


def test_matrices_have_the_names_and_sizes_of_transformers():
    assert ARCHITECTURES["llama2-70b"].matrices["k_proj"] == (1024, 8192)
    assert ARCHITECTURES["opt-66b"].matrices["fc1"] == (36864, 9216)
    assert list(ARCHITECTURES["opt-66b"].matrices) == ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    assert ARCHITECTURES["falcon-7b"].matrices["query_key_value"] == (71 * 64 + 2 * 64, 4544)
    assert ARCHITECTURES["mixtral-8x7b"].matrices["down_proj"] == (4096, 14336)
    assert [ARCHITECTURES[name].gated for name in ("opt-6.7b", "falcon-40b", "mixtral-8x7b")] == [False, False, True]
