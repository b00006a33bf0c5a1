import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Each test has a cache of its own."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return tmp_path
