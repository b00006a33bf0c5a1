"""Whether the tests notice faults: `python -P tests/mutants.py [WORD ...]` plants one at a time and runs tests on it.

A mutant is a fault in one line: an offset off by one, a stale slot, a lock that is not taken. `mutants.yaml` lists them
with the tests that must fail. The checkout stays as it is: mutants live in a temporary copy. `WORD` chooses the mutants
whose file or new text contains it; `--baseline` runs the named tests without any mutant first, which all must pass.

Exit status 1 if a mutant survives, its text is gone, or its tests cannot run. Tests that never end notice the fault,
too, but on a slow machine sound ones may last as long: they "timed out", and `--limit` gives them more. pytest does not
collect this file.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("toolkit", "kernels", "tests", "notebooks", "data", "docs", "benchmarks", "pyproject.toml", "README.md")
CACHES = ("downloads", "models", "text", "tokens")  # of `data/cache`: made of what no mutant here touches
IMPORTED = ("torch", "transformers", "numba", "pandas", "scipy.optimize", "jaxtyping", "pytest")  # once, for all
LIMIT_S = 180
NOTICED = ("killed", "timed out")


class Mutant(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`; the tests, separated by spaces, lie in `tests/`."""

    file: str
    old: str
    new: str
    tests: str


def mutants() -> list[Mutant]:
    """The mutants of `mutants.yaml`."""
    table = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    return [
        Mutant(file, old, new, tests)
        for place, faults in table.items()
        for file, _, tests in [place.partition(" ")]
        for old, new in faults.items()
    ]


def main() -> int:
    """Plant the chosen mutants one after the other, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the mutants to plant: part of their file or their new text")
    parser.add_argument("--baseline", action="store_true", help="run the named tests without a mutant first")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of a mutant (%(default)s)")
    arguments = parser.parse_args()
    words = arguments.words or [""]
    chosen = [mutant for mutant in mutants() if any(word in mutant.file or word in mutant.new for word in words)]
    for name in IMPORTED:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        if arguments.baseline:
            tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
            if (outcome := outcome_of(copy, tests, arguments.limit * len(tests))) != "survived":
                print(f"the tests do not pass without a mutant: {outcome}\n{log_of(copy)}")
                return 1
        outcomes = [planted(copy, mutant, arguments.limit) for mutant in chosen]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))
    return int(any(outcome not in NOTICED for outcome in outcomes))


def copied(folder: Path) -> Path:
    """A copy of the sources, with a cache of its own that begins with the checkout's downloads and kernels."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("cache", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    (folder / "toolkit" / "kernels").symlink_to("../kernels")  # else they would be imported from the checkout
    shutil.copytree(ROOT / "tests" / "cache", folder / "tests" / "cache", dirs_exist_ok=True)
    cache, kept = folder / "data" / "cache", ROOT / "data" / "cache"
    cache.mkdir()
    for name in CACHES:
        if (kept / name).is_dir():
            (cache / name).symlink_to((kept / name).resolve())
    if (kept / "compiled").is_dir():
        shutil.copytree(kept / "compiled", cache / "compiled")
    return folder


def planted(copy: Path, mutant: Mutant, limit_s: float) -> str:
    """The fate of a mutant: "killed", "timed out", "survived", "its text is gone" or "its tests cannot run"."""
    file, begun_s = copy / mutant.file, time.perf_counter()
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    if source.count(mutant.old) != 1:
        outcome = "its text is gone"
    else:
        file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            outcome = outcome_of(copy, mutant.tests.split(), limit_s)
        finally:
            file.write_text(source, encoding="utf-8")
    place = f"{mutant.file}: {' '.join(mutant.old.split())[:60]!r}"
    print(f"{outcome:16} {time.perf_counter() - begun_s:5.1f} s  {place}", flush=True)
    if outcome == "its tests cannot run":
        print(log_of(copy), flush=True)
    return outcome


def outcome_of(copy: Path, tests: list[str], limit_s: float) -> str:
    """Run tests in the copy, in a process that has imported the libraries already."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, tests))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return "timed out"
    known = {0: "survived", 1: "killed"}
    return "killed" if (status := process.exitcode or 0) < 0 else known.get(status, "its tests cannot run")


def run_tests(copy: Path, tests: list[str]) -> None:
    """End this process with pytest's exit status; what it prints goes to a file."""
    import hypothesis
    import pytest

    with open(copy / "log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.setpgid(0, 0)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"], os.environ["PYTHONPATH"] = "1", str(copy)
    hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutants")  # no example is made smaller
    status = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)])
    sys.stdout.flush()
    os._exit(status)


def log_of(copy: Path) -> str:
    """The end of what the last tests printed."""
    return (copy / "log").read_text(encoding="utf-8", errors="replace")[-3000:]


if __name__ == "__main__":
    sys.exit(main())
