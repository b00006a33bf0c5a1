"""Forks behave as processes of their own: status, streams, signals, and nothing that outlives its owner."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from toolkit.sweep.fork_server import CLIENT, SOCKET, ForkedKernelManager, fork_server
from toolkit.sweep.forked import PEAK

PATIENCE_S = 60


@pytest.fixture(scope="module")
def address():
    with fork_server(["json"]):
        wait(lambda: Path(os.environ[SOCKET]).is_socket())
        yield os.environ[SOCKET]


def wait(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def start(address, folder, code):
    """A fork that runs this code, by `python -m timeit`."""
    command = [sys.executable, "-I", "-S", str(CLIENT), address, "timeit", "-n", "1", "-r", "1", code]
    environment = os.environ | {"ANIMAL": "cat", PEAK: str(folder / "peak")}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def pid_of(client):
    return int(client.stdout.readline())


WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_fork_has_the_environment_folder_streams_and_status_of_its_client(address, tmp_path):
    code = "import os, sys; print(os.environ['ANIMAL'], os.getcwd(), 'json' in sys.modules, flush=True); 1 / {}"
    for divisor, status in ((1, 0), (0, 1)):
        client = start(address, tmp_path, code.format(divisor))
        assert client.communicate(timeout=PATIENCE_S)[0].split()[:3] == ["cat", str(tmp_path), "True"]
        assert client.returncode == status
    assert 1000 < int((tmp_path / "peak").read_text()) < 10**7


def test_an_interrupt_and_the_end_of_a_client_reach_its_fork_alone(address, tmp_path):
    interrupted, other = start(address, tmp_path, WAIT), start(address, tmp_path, WAIT)
    pid_of(interrupted)
    pid = pid_of(other)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(PATIENCE_S) != 0
    assert other.poll() is None
    other.kill()
    wait(lambda: not psutil.pid_exists(pid))


def test_forks_and_clients_end_with_the_server(tmp_path):
    with fork_server(["json"]):
        wait(lambda: Path(os.environ[SOCKET]).is_socket())
        client = start(os.environ[SOCKET], tmp_path, WAIT)
        pid = pid_of(client)
    assert client.wait(PATIENCE_S) == 1
    wait(lambda: not psutil.pid_exists(pid))
    assert SOCKET not in os.environ


def test_modules_run_as_usual_where_no_server_answers(tmp_path):
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "socket"))  # and nobody listens
    for name in ("socket", "none"):
        client = start(str(tmp_path / name), tmp_path, "import os; print(os.getcwd(), flush=True); 1 / 1")
        assert client.communicate(timeout=PATIENCE_S)[0].split()[0] == str(tmp_path)
        assert client.returncode == 0


def test_kernels_are_forked_where_there_is_a_server(address, monkeypatch):
    manager = ForkedKernelManager(kernel_name="python3")
    manager._launch_args = {}  # as `start_kernel` has it
    monkeypatch.setenv(SOCKET, address)
    forked = manager.format_kernel_cmd()
    assert forked[3:6] == [str(CLIENT), address, "ipykernel_launcher"]
    monkeypatch.delenv(SOCKET)
    usual = manager.format_kernel_cmd()
    assert usual[1:4] == ["-P", "-m", "ipykernel_launcher"]
    assert usual[4:] == forked[6:]
