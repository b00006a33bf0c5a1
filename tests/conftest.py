import errno
import os

import pytest


@pytest.fixture
def o_direct(monkeypatch):
    """Replaces what the file system does with O_DIRECT: `o_direct("refused")` or `o_direct("ignored")`."""
    really_open = os.open

    def answer(kind):
        def fake(path, flags, *rest, **named):
            if flags & os.O_DIRECT and kind == "refused":
                raise OSError(errno.EINVAL, "Invalid argument", path)
            return really_open(path, flags & ~os.O_DIRECT, *rest, **named)

        monkeypatch.setattr(os, "open", fake)

    return answer
