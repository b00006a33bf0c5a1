"""Claims of a toy paper, for the tests of claims and of comparisons."""

import pytest
import yaml

from toolkit import paths
from toolkit.evidence import claims


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """`publish(*records)` replaces the claims of the paper "toy"."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    (tmp_path / "data" / "claims").mkdir(parents=True)

    def write(*records: dict) -> None:
        claims.read_claims.cache_clear()
        (tmp_path / "data" / "claims" / "toy.yaml").write_text(yaml.safe_dump(list(records)))

    yield write
    claims.read_claims.cache_clear()
