"""Plans of models of hundreds of gigabytes read headers alone: holes stand for the weights here."""

from time import process_time

import pytest
from folder_twins import write_folder
from gguf_twins import write_twin

from tests.planner.test_plan import machine
from toolkit import memory_limits
from toolkit.planner import memory
from toolkit.planner.plan import plan
from toolkit.planner.target import open_target

GB = 10**9
__all__ = ["machine"]


def a_folder(place):
    write_folder("llama2-70b", place / "large", sparse=True)
    return place / "large", 138 * GB


def a_file(place):
    write_twin("mistral-large", place / "large.gguf", sparse=True)
    return place / "large.gguf", 245 * GB  # in 16 bits


@pytest.mark.parametrize("write", [a_folder, a_file])
def test_a_plan_reads_no_weights(write, machine, tmp_path, monkeypatch):
    """Reading the holes would take half a minute of the processor."""
    monkeypatch.setattr(memory, "present_bytes", lambda file, *way: 300_000_000)
    place, nbytes = write(tmp_path)
    seconds, held = process_time(), memory_limits.anonymous_bytes()
    found = plan(open_target(str(place)), memory_bytes=20 * GB)
    assert process_time() - seconds < 10
    assert memory_limits.anonymous_bytes() - held < 400_000_000
    assert found.target.nbytes == pytest.approx(nbytes, rel=0.01)
    assert found.choices[0].commands[-1].endswith('--memory 20000MB --prompt "The library of Alexandria"')
