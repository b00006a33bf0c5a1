"""Progress bars: where they show, one at a time, and how to turn them off."""

import contextlib
import io
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit import progress as bars
from toolkit.progress import progress
from toolkit.quality import perplexity
from toolkit.quantization.smoothquant import round_to_int8, smooth
from toolkit.sparsity import prune
from toolkit.storage.packing import Linears, pack_model
from toolkit.studies.forms import store

TOKENS = torch.arange(64) % 61


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Bars are on, and every update shows at once."""
    monkeypatch.delenv(bars.SWITCH)
    for name in ("DELAY_S", "TERMINAL_S", "ELSEWHERE_S"):
        monkeypatch.setattr(bars, name, 0)


def shown(run, stderr=None):
    """The text on stderr meanwhile."""
    with contextlib.redirect_stderr(stderr or io.StringIO()) as found:
        run()
    return found.getvalue()


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).eval()


def updates(text):
    return [line.split(" |")[0] for line in text.split("\r") if line.strip()]


def work():
    with progress("pruning by wanda", 3, "blocks") as bar:
        for _ in range(3):
            bar.update()


LONG = {
    "pruning by Wanda: 3/3 blocks": lambda folder: prune(model(), "wanda", calibration=TOKENS.view(-1, 32)),
    "calibrating SmoothQuant: 2/2 windows": lambda folder: smooth(model(), TOKENS.view(-1, 32)),
    "rounding to int8: 3/3 blocks": lambda folder: round_to_int8(model()),
    "storing as int4, rtn: 21/21 matrices": lambda folder: store(model(), "int4, rtn"),
    "evaluating perplexity: 4/4 windows": lambda folder: perplexity(model(), TOKENS, 16),
    "packing: 3/3 layers": lambda folder: pack_model(model(), folder / "new", Linears(("endor", "dense"))),
}


def test_long_work_counts_to_its_end(tmp_path):
    for number, (end, run) in enumerate(LONG.items()):
        (tmp_path / str(number)).mkdir()
        assert updates(shown(partial(run, tmp_path / str(number))))[-1] == end


def test_outside_a_terminal_the_bar_is_cleared():
    text = shown(work)
    assert updates(text) == [f"pruning by wanda: {n}/3 blocks" for n in range(4)]
    assert text.endswith("\r")
    assert "\n" not in text


def test_in_a_terminal_the_finished_bar_stays():
    text = shown(work, Terminal())
    assert text.rpartition("\r")[2].startswith("pruning by wanda: 3/3 blocks |")
    assert text.endswith("\n")


@pytest.mark.parametrize("off", [{bars.SWITCH: "0"}, {"TQDM_DISABLE": "1"}], ids=["ours", "tqdm's"])
def test_bars_can_be_turned_off(off):
    """tqdm reads its own switch when it is imported."""
    script = "from toolkit import progress as bars; bars.DELAY_S = bars.ELSEWHERE_S = 0\n"
    script += "with bars.progress('x', 2, 'y') as bar: bar.update()"
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"} | off
    done = subprocess.run([sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


def test_one_bar_at_a_time():
    def nested():
        with progress("outer", 2, "steps") as bar:
            work()
            beside = threading.Thread(target=work)
            beside.start()
            beside.join()
            bar.update()

    assert updates(shown(nested)) == ["outer: 0/2 steps", "outer: 1/2 steps"]


def test_a_line_is_told_once_and_not_where_bars_are_off(monkeypatch):
    monkeypatch.setattr(bars, "_told", set())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert shown(lambda: [bars.tell_once("compiling") for _ in range(2)]) == "compiling\n"
    monkeypatch.setenv(bars.SWITCH, "0")
    assert shown(lambda: bars.tell_once("other")) == ""
