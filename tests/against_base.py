"""The engine of a base commit and of this tree side by side: logits and packed bytes must be the same, to the bit.

    python tests/against_base.py BASE

Both run on this machine, one after the other, and nothing is kept, since last bits differ between kinds of CPU. Small
random models of six families are packed by each method in two types; the packed folder is opened with each reader and
at two budgets, without limit and at the smallest that it takes; a prompt of 20 tokens and 6 single tokens give logits.
Tables of notebooks are compared by `benchmarks/compare_results.py`, from a sweep of each tree. Ends with 1 if anything
differs.
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("Llama, tied", "Qwen2", "OPT", "GPT-NeoX", "Gemma2", "Mixtral")
PACKS = {
    "endor": ["--method", "magnitude"],
    "csr": ["--method", "magnitude", "--format", "csr"],
    "int8": ["--method", "dense", "--int8", "--windows", "2", "--sequence-length", "32"],
    "spqr": ["--method", "spqr", "--windows", "2", "--sequence-length", "32"],
    "neurons": ["--method", "neurons", "--predictors", "none", "--windows", "2", "--sequence-length", "32"],
    "experts": ["--method", "experts"],
    "experts, 4 bits": ["--method", "experts", "--bits", "4"],
}
METHODS = {"endor": (None, "endor_packed"), "spqr": ("spqr", "spqr_packed")}  # how a folder is run, if not one way
READERS = ("threads", "aio")
TYPES = ("float32", "bfloat16")


def main() -> int:
    """Print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("--probe", metavar="FOLDER", help=argparse.SUPPRESS)  # what a tree's own process does
    options = parser.parse_args()
    if options.probe:
        _probe(Path(options.probe))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_models(folder / "models")
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", folder / "base", options.base], cwd=ROOT, check=True
        )
        try:
            before, after = (_run(tree, folder) for tree in (folder / "base", ROOT))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder / "base"], cwd=ROOT, check=True)
    differences = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    for key in differences:
        print(f"{key}: {before.get(key, 'nothing')} → {after.get(key, 'nothing')}")
    print(f"{len(after)} results, {len(differences)} differ")
    return bool(differences)


def _run(tree: Path, folder: Path) -> dict[str, str]:
    """The results of one tree by name. A folder of links has its kernels where they are imported from."""
    house = folder / f"house of {tree.name}"
    house.mkdir()
    (house / "toolkit").mkdir()
    for entry in (tree / "toolkit").iterdir():
        (house / "toolkit" / entry.name).symlink_to(entry)
    (house / "toolkit" / "kernels").symlink_to(tree / "kernels")
    environment = os.environ | {
        "PYTHONPATH": str(house),
        "TOOLKIT_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", __file__, "-", "--probe", str(folder)]
    printed = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def _write_models(folder: Path) -> None:
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.families import write_family

    for family in FAMILIES:
        for name in TYPES:
            write_family(family, folder / f"{family}, {name}", getattr(torch, name))


def _probe(folder: Path) -> None:
    results = {}
    for model in sorted((folder / "models").iterdir()):
        for name, arguments in PACKS.items():
            with tempfile.TemporaryDirectory() as scratch:
                packed = Path(scratch) / "packed"
                key = f"{model.name}, {name}"
                dtype = model.name.rsplit(", ", 1)[1]
                if error := _pack([str(model), *arguments, "--dtype", dtype, "--out", str(packed), "--no-evaluate"]):
                    results[key] = error
                    continue
                shards = sorted(packed.glob("*.safetensors"))  # below it are files whose metadata has no fixed order
                results[f"{key}, bytes"] = _digest(b"".join(file.read_bytes() for file in shards))
                for method in METHODS.get(name, (None,)):
                    results |= {f"{key}, {way}": value for way, value in _logits(packed, method).items()}
    print(json.dumps(results))


def _pack(arguments: list[str]) -> str | None:
    """Pack by the command. The line of its refusal, or None."""
    from toolkit.__main__ import main

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        status = main(["pack", *arguments])
    return said.getvalue().strip().splitlines()[-1] if status else None


def _logits(packed: Path, method: str | None) -> dict[str, str]:
    """Digests of the logits with each reader and budget; `method` as `OffloadedModel.open` takes it."""
    import torch

    from toolkit.errors import UserError
    from toolkit.offload.model import OffloadedModel

    results = {}
    tokens = torch.randint(5, 90, (1, 26), generator=torch.Generator().manual_seed(0))
    for reader in READERS:
        smallest = None
        for budget in ("none", "smallest"):
            way = f"{method}, {reader}, {budget}"
            try:
                smallest = _smallest(packed, method, reader) if budget == "smallest" else None
                with OffloadedModel.open(packed, method=method, reader=reader, dram_bytes=smallest) as opened:
                    results[way] = _digest(_generate(opened.model, tokens))
            except UserError as error:
                results[way] = str(error)
    return results


def _smallest(packed: Path, method: str | None, reader: str) -> int:
    """The least budget, which the refusal of a smaller one names."""
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.model import OffloadedModel

    needed = 1
    while True:
        try:
            OffloadedModel.open(packed, method=method, reader=reader, dram_bytes=needed).close()
        except BudgetError as error:
            needed = error.needed_bytes
        else:
            return needed


def _generate(model, tokens) -> bytes:
    import torch

    with torch.no_grad():
        out = model(tokens[:, :20], use_cache=True)
        parts = [out.logits]
        for step in range(20, tokens.shape[1]):
            out = model(tokens[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, dim=1).float().numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    raise SystemExit(main())
