"""Jobs and kernels forked from one process that has imported the large libraries: 6 CPU seconds less for each notebook.

The server is `python -m toolkit.sweep.fork_server SOCKET LIBRARY...`. A fork's command is `forked.py`, which asks the
server for it, passes signals on, and ends with its status: to Snakemake and Jupyter it is the process itself. The
server imports nothing of the toolkit, so that each notebook reads its modules anew.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.extras import extra

with extra("lab"):
    from jupyter_client import AsyncKernelManager

SOCKET = "TOOLKIT_FORK_SERVER"  # the variable that names the server's socket
CLIENT = Path(__file__).with_name("forked.py")
REQUEST_BYTES = 1 << 20
LONGEST_FOLDER = 90  # the name of a socket has 107 characters at most
LIBRARIES = (
    "torch",
    "numba",
    "pandas",
    "scipy.stats",
    "seaborn",
    "matplotlib.pyplot",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "safetensors.torch",
    "jaxtyping",
    "threadpoolctl",
    "ipykernel.kernelapp",
    "papermill",
    "nbconvert.exporters.html",
    "psutil",
    "pydantic",
)


class ForkedKernelManager(AsyncKernelManager):
    """Starts kernels by the fork server where there is one, and else as usual.

    Kernels are spoken to by sockets in a folder of their own. Ports that were found free may be another kernel's, which
    starts at the same time, when the kernel opens them: it would not answer.
    """

    def __init__(self, **settings: object):
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")
        place = Path(self._folder.name)
        if len(str(place)) < LONGEST_FOLDER:
            settings |= {"transport": "ipc", "ip": str(place / "ipc"), "connection_file": str(place / "kernel.json")}
        super().__init__(**settings)

    async def _async_cleanup_resources(self, restart: bool = False) -> None:
        """Remove the sockets' folder, too, at a kernel's end: no finaliser runs in a fork."""
        await super()._async_cleanup_resources(restart)
        if not restart:
            self._folder.cleanup()

    cleanup_resources = _async_cleanup_resources

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """The usual command, or the client with the same arguments."""
        command = super().format_kernel_cmd(extra_arguments)
        return [*module_command(), *command[command.index("-m") + 1 :]] if "-m" in command else command


def module_command() -> list[str]:
    """The beginning of a command that runs a module: by the fork server where there is one, and else as usual."""
    address = os.environ.get(SOCKET)
    return [sys.executable, "-I", "-S", str(CLIENT), address] if address else [sys.executable, "-P", "-m"]


@contextmanager
def fork_server(libraries: Sequence[str] = LIBRARIES) -> Iterator[None]:
    """Run a server for the processes that are started meanwhile. There is none with a GPU, since CUDA does not fork."""
    if sys.platform != "linux" or Path("/dev/nvidia0").exists():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:  # the name of a socket has 107 characters at most
        address = Path(folder) / "socket"
        command = [sys.executable, "-P", "-m", __name__, str(address), *libraries]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ[SOCKET] = str(address)
        try:
            yield
        finally:
            os.environ.pop(SOCKET, None)
            server.kill()
            server.wait()


def serve(address: str, libraries: Sequence[str]) -> None:
    """Fork a process for each connection. It is killed when its connection closes, and all with the server."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, waker = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(os.cpu_count() or 1)  # clients wait in this queue until all is imported
    _import(libraries)
    forks: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, woken, *forks.values()], [], [])
        if woken in ready:
            os.read(woken, 4096)
        for fork, connection in forks.items():
            if connection in ready:  # a byte is a signal's number; the end of the connection is the client's
                number = connection.recv(1)
                os.kill(fork, number[0] if number else signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request, streams = _receive(connection)
            fork = os.fork() if request else None
            if fork == 0:
                for each in (listener, connection, *forks.values()):
                    each.close()
                signal.set_wakeup_fd(-1)
                _run_module(request, streams)
            for stream in streams:
                os.close(stream)
            if fork is None:
                connection.close()
            else:
                forks[fork] = connection
        _report_ended(forks)


def _import(libraries: Sequence[str]) -> None:
    """Import them with the variables that they read at import."""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    for name in libraries:
        with suppress(ImportError):  # of another version: notebooks import what they need
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection writes to the pages that forks share


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A request, which is a line of JSON, and the client's standard streams; `{}` without a whole one."""
    data, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(REQUEST_BYTES)):  # the client is gone
            return {}, streams
        data += more
    return json.loads(data), streams


def _report_ended(forks: dict[int, socket.socket]) -> None:
    """Tell each client whose fork has ended its status and its peak memory in KiB."""
    while forks:
        fork, status, usage = os.wait4(-1, os.WNOHANG)
        if not fork:
            return
        with forks.pop(fork) as connection, suppress(OSError):
            reply = {"status": os.waitstatus_to_exitcode(status), "peak_kib": usage.ru_maxrss}
            connection.sendall(json.dumps(reply).encode())


def _run_module(request: dict, streams: list[int]) -> None:
    """Run the module that the request names, as `python -m` does, with its environment, folder, streams and threads."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        random.seed()
        _use_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
        sys.argv = request["arguments"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _use_threads(threads: int) -> None:
    """Limit the threads of loaded libraries, as `OMP_NUM_THREADS` and its siblings do before loading."""
    if "threadpoolctl" in sys.modules:
        sys.modules["threadpoolctl"].threadpool_limits(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def die_with_parent(number: int) -> None:
    """Have this process get a signal when its parent ends (Linux)."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
