import logging
import warnings

import huggingface_hub
import pytest
from huggingface_hub import constants
from transformers.utils import logging as transformers_logging

from toolkit import hub
from toolkit.errors import UserError


class Session:
    def __init__(self, error=None):
        self.error, self.asked = error, []

    def head(self, url, timeout):
        self.asked.append((url, timeout))
        if self.error:
            raise self.error


@pytest.mark.parametrize(("error", "expected"), [(None, True), (OSError("refused"), False), (TimeoutError(), False)])
def test_the_hub_is_asked_once_for_a_short_time(monkeypatch, error, expected):
    session = Session(error)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.reachable.__wrapped__() is expected
    assert session.asked == [(constants.ENDPOINT, hub.PROBE_S)]


def test_offline_is_not_asked_at_all(monkeypatch):
    session = Session()
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.reachable.__wrapped__() is False
    assert session.asked == []


def test_what_needs_a_hub_is_refused_without_one(monkeypatch):
    for offline, reachable in ((False, True), (True, False)):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(hub, "reachable", lambda answer=reachable: answer)
        hub.require("corpus 'c4'", offline="use another")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"corpus 'c4' needs the Hugging Face hub.*; use another"):
        hub.require("corpus 'c4'", offline="use another")


def test_quiet_is_quiet_and_then_as_before(recwarn):
    def state():
        bars = transformers_logging.is_progress_bar_enabled(), huggingface_hub.utils.are_progress_bars_disabled()
        return bars, [logging.getLogger(name).level for name in hub.CHATTY]

    @hub.quiet()
    def fail():
        seen.append(state())
        warnings.warn("chatter", stacklevel=1)
        raise ZeroDivisionError

    seen, before = [], state()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [((False, True), [logging.ERROR] * len(hub.CHATTY))]
    assert state() == before  # an error puts things back too
    assert len(recwarn) == 0
