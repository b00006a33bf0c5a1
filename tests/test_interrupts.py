"""Signals and broken outputs end a command at once, with one line and the shell's status."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from toolkit import interrupts
from toolkit.errors import run_command


class Swallows:
    """Python drops the exception that ends its destructor."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def wait():
    """Long enough for the exception to come again."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.01)
    return 0


def swallowed():
    """The interrupt comes again after a destructor dropped it."""
    Swallows()
    gc.collect()
    return wait()


def converted():
    """A library makes another error of the interrupt."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException:
        raise RuntimeError("cannot load")  # noqa: B904


def ignored():
    """A library ignores the interrupt."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    return wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("library", [swallowed, converted, ignored])
def test_an_interrupt_that_a_library_swallows_ends_the_command(library, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.raised():
        assert run_command(library, "later") == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "later\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_clean_up_is_not_interrupted_again():
    cleaned = []

    def command():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(3 * interrupts.AGAIN_S)
            cleaned.append(True)

    with interrupts.raised():
        assert run_command(command) == 128 + signal.SIGTERM
        time.sleep(2 * interrupts.AGAIN_S)  # nothing is raised after the end
    assert cleaned == [True]


def test_a_clock_that_strikes_while_it_is_stopped_is_not_heard(monkeypatch):
    stop = signal.setitimer

    def late(clock, seconds):
        """The signal comes before the clock stops, and Python's handler is called after."""
        stop(clock, seconds)
        if not seconds:
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", late)
    with interrupts.raised():
        assert run_command(lambda: signal.raise_signal(signal.SIGTERM)) == 128 + signal.SIGTERM
        time.sleep(2 * interrupts.AGAIN_S)


def test_a_signal_that_the_process_ignores_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts.raised():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


WRITES = "import sys; from toolkit.errors import run_command; sys.exit(run_command(lambda: print('text' * 5000)))"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_or_closed_output_is_one_line(unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", WRITES], stdout=full, stderr=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"no space left" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", WRITES], stdout=pipe, stderr=subprocess.PIPE, env=environment)
        assert (done.returncode, done.stderr) == (141, b"stopped: nobody reads the output\n")
        assert (
            subprocess.run([sys.executable, "-c", WRITES], stdout=pipe, stderr=pipe, env=environment).returncode == 141
        )
