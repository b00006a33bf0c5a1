import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

DATA = Path(__file__).parents[1] / "formats" / "data"
JUDGED = ("llama", "types")  # written by compressed-tensors itself


@pytest.fixture(params=JUDGED)
def judged(request):
    """A checkpoint folder and the weights it was made from."""
    return DATA / request.param, load_file(DATA / f"{request.param}.dense.safetensors")


@pytest.fixture
def llama(tmp_path):
    """A copy, to be damaged."""
    return Path(shutil.copytree(DATA / "llama", tmp_path / "llama"))


@pytest.fixture
def types(tmp_path):
    return Path(shutil.copytree(DATA / "types", tmp_path / "types"))


@pytest.fixture
def change():
    """Edit a JSON file in place."""

    def change(path, edit):
        value = json.loads(path.read_text())
        path.write_text(json.dumps(edit(value) or value))

    return change
