"""Text that a model writes itself."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.recovery import generated
from toolkit.recovery.generated import own_text


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"SEQUENCES": 3, "LENGTH": 12, "BEGINNING": 4}.items():
        monkeypatch.setattr(generated, name, value)


def test_sequences_begin_in_the_text_and_go_on_by_themselves(tiny, tokens):
    text = own_text(tiny("llama"), tokens, 50)
    assert text.shape == (50,)
    assert text.dtype == torch.int64
    places = tokens.unfold(0, 4, 1)
    for sequence in text[:48].view(4, 12):
        assert (places == sequence[:4]).all(1).any()
    assert len(set(map(tuple, text[:48].view(4, 12)[:, 4:].tolist()))) == 4


def test_more_text_begins_as_less_does_and_parts_are_kept(tiny, tokens, monkeypatch):
    model, state = tiny("llama"), torch.random.get_rng_state()
    short = own_text(model, tokens, 30)
    assert torch.equal(own_text(model, tokens, 60)[:30], short)
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(type(model), "generate", None)
    assert torch.equal(own_text(model, tokens, 60)[:30], short)


def test_a_text_without_a_beginning_is_refused(tiny, tokens):
    with pytest.raises(UserError, match="4 tokens hold no beginning of 4"):
        own_text(tiny("llama"), tokens[:4], 10)
