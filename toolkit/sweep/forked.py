"""A fork as its parent sees it: `python forked.py SOCKET MODULE ARGUMENT...`, for `python -m`; see `fork_server`.

It imports the standard library alone, since a start takes 20 ms then.
"""

import json
import os
import signal
import socket
import sys

PEAK = "TOOLKIT_PEAK_MEMORY"  # the variable that names a file for the fork's peak memory in KiB


def main(address: str, arguments: list[str]) -> int:
    """Ask for a fork, pass SIGINT and SIGTERM on, and return its exit status. Without a server, run the module here."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:  # the server may have been killed for its memory
        os.execv(sys.executable, [sys.executable, "-P", "-m", *arguments])
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode() + b"\n"
    socket.send_fds(connection, [data[:1]], [0, 1, 2])
    connection.sendall(data[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    reply = json.loads(connection.recv(4096) or '{"status": 1, "peak_kib": 0}')  # nothing: the server is gone
    if PEAK in os.environ:
        with open(os.environ[PEAK], "w") as file:
            file.write(str(reply["peak_kib"]))
    return reply["status"] if reply["status"] >= 0 else 128 - reply["status"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
