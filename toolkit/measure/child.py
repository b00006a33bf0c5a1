"""Another program that is measured: installed apart from this package, and run in a process of its own.

    child = Child("llama.cpp", [python, driver, file])     # waits for the first line, an answer to nothing
    child.ask(tokens=[7])
    child.close()

Each request and each answer is a line with a JSON object, on the program's stdin and stdout.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.errors import UserError

PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "10")
WHEELS = ("--only-binary", ":all:", "--no-deps", "--no-compile")
INSTALL_LIMIT_S = 180


class Child:
    """A process that answers requests. `process` is its `Popen`.

    Raises `UserError`, with the last lines of its stderr, if it ends instead of answering.
    """

    def __init__(self, name: str, command: Sequence[str | Path]):
        self.name, self._errors = name, tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self.process = subprocess.Popen(command, text=True, env=own_environment(), **pipes)

    def ask(self, **request: object) -> dict:
        """The answer to a request."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says why
        return self.answer()

    def answer(self) -> dict:
        """The next line of the program; the first one says that it is ready."""
        line = self.process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise UserError(f"{self.name} ended: {' / '.join(lines[-3:]) or 'it says nothing'}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):  # it has ended with a request unread
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()


def own_environment() -> dict[str, str]:
    """The environment of another program: without the setting by which threads of this toolkit sleep while they wait.

    llama.cpp's threads wait many times a token. With the setting it has two thirds of its speed on an idle machine.
    """
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def run_installer(name: str, arguments: Sequence[str | Path]) -> None:
    """Run a command that installs something. Raises `UserError` with the last line that it says if it fails."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{name} cannot be installed: {error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise UserError(f"{name} cannot be installed: {lines[-1]}")
