import huggingface_hub
import pytest
from huggingface_hub import constants

from toolkit import hub
from toolkit.errors import UserError


class Session:
    def __init__(self, error=None):
        self.error, self.asked = error, []

    def head(self, url, timeout):
        self.asked.append((url, timeout))
        if self.error:
            raise self.error


@pytest.mark.parametrize(("error", "expected"), [(None, True), (OSError("refused"), False)])
def test_the_hub_is_asked_once_for_a_short_time(monkeypatch, error, expected):
    session = Session(error)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.reachable.__wrapped__() is expected
    assert session.asked == [(constants.ENDPOINT, hub.PROBE_S)]


def test_what_needs_a_hub_is_refused_without_one(monkeypatch):
    for offline, reachable in ((False, True), (True, False)):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(hub, "reachable", lambda answer=reachable: answer)
        hub.require("corpus 'c4'", offline="use another")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"corpus 'c4' needs the Hugging Face hub.*; use another"):
        hub.require("corpus 'c4'", offline="use another")
