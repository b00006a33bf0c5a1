"""What the tests of several kernel families share."""

import pytest


def each_backend(family):
    """The fixture `backend`: every backend of a family in turn. Those that this CPU cannot run are skipped."""

    @pytest.fixture(params=family.BACKENDS)
    def backend(request):
        if request.param not in family.available():
            pytest.skip(f"this CPU lacks what {request.param} needs")
        return request.param

    return backend
