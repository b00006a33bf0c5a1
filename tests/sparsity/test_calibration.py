"""Calibration text of one corpus and of several."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.sparsity import Calibration, calibration

TEXTS = {"prose": torch.arange(100), "code": torch.arange(1000, 1300)}


@pytest.fixture(autouse=True)
def _texts(monkeypatch):
    monkeypatch.setattr(calibration, "load_tokens", lambda corpus, tokenizer, split: TEXTS[corpus])


def test_windows_of_two_corpora_take_turns_and_are_those_of_each_alone():
    windows = Calibration("prose+code", 5, 10).draw_from_corpus(None)
    assert torch.equal(windows[::2], Calibration("prose", 3, 10).draw_from_corpus(None))
    assert torch.equal(windows[1::2], Calibration("code", 3, 10).draw_from_corpus(None)[:2])


def test_without_a_number_the_shorter_corpus_decides():
    windows = Calibration("prose+code", None, 10).draw_from_corpus(None)
    assert len(windows) == 20
    assert (windows[:, 0] >= 1000).tolist() == [False, True] * 10


def test_a_number_of_windows_that_is_none_is_refused():
    with pytest.raises(UserError, match="expected a whole number"):
        Calibration("prose+code", 0, 10).draw_from_corpus(None)
