"""Whether the tests notice faults: `python -P tests/mutants.py [WORD ...]` plants one at a time and runs tests on it.

A mutant is a fault in one line: an offset off by one, a stale slot, a lock that is not taken. Each names the tests that
must fail. The checkout stays as it is: mutants live in a temporary copy. `WORD` chooses the mutants whose file or new
text contains it; `--baseline` runs the named tests without any mutant first, which all must pass.

Exit status 1 if a mutant survives, its text is gone, or its tests cannot run. pytest does not collect this file.
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

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("toolkit", "kernels", "tests", "notebooks", "data", "docs", "benchmarks", "pyproject.toml", "README.md")
CACHES = ("downloads", "models", "text", "tokens")  # of `data/cache`: made of what no mutant here touches
IMPORTED = (
    "torch",
    "transformers",
    "numba",
    "pandas",
    "scipy.optimize",
    "jaxtyping",
    "pytest",
)  # once, for all mutants
LIMIT_S = 180  # tests that wait for ever notice the fault, too


class Mutant(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`; the tests, separated by spaces, lie in `tests/`."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    # blocks of GGUF files
    Mutant(
        "kernels/blocks/cpu_avx512.py",
        "_half(builder, block, 208), 5)",
        "_half(builder, block, 208), 4)",
        "formats/test_ggml.py",
    ),
    Mutant("kernels/blocks/activations.py", "NARROW), 4, -offset)", "NARROW), 4, offset)", "formats/test_ggml.py"),
    Mutant(
        "kernels/blocks/__init__.py",
        "key = rounding, x.ctypes.data, x.shape",
        "key = rounding, x.shape",
        "formats/test_ggml.py",
    ),
    # what counts as zero, and where values lie
    Mutant(
        "toolkit/formats/packed.py",
        "return bits(matrix) & torch.iinfo(BITS[matrix.dtype]).max != 0",
        "return bits(matrix) != 0",
        "formats/test_formats.py",
    ),
    Mutant("kernels/bitmap/__init__.py", "torch.bfloat16: 0x7FFF", "torch.bfloat16: 0xFFFF", "formats/test_formats.py"),
    Mutant("toolkit/formats/csr.py", "if columns <= 1 << 16", "if columns <= 1 << 17", "formats/test_formats.py"),
    Mutant(
        "toolkit/formats/two_four.py", ".sum(-1, dtype=torch.uint8) > KEPT", ".sum(-1) > 3", "formats/test_formats.py"
    ),
    Mutant("toolkit/formats/endor.py", "offsets = 8 * (rows + 1)", "offsets = 8 * rows", "formats/test_formats.py"),
    Mutant(
        "toolkit/formats/sparse_bitmask.py",
        "packed.row_offsets[:-1].view(rows)",
        "packed.row_offsets[1:].view(rows)",
        "formats/test_sparse_bitmask.py",
    ),
    Mutant("kernels/bitmap/cpu_simd.py", "(size - at) // WORD)", "full)", "kernels/test_bitmap.py"),
    Mutant("kernels/bitmap/cpu.py", "min(max(offsets[row], 0), values.size)", "offsets[row]", "kernels/test_bitmap.py"),
    Mutant(
        "kernels/csr/layout.py",
        "BLOCK * within + rows % BLOCK",
        "BLOCK * within + 15 - rows % BLOCK",
        "kernels/test_csr.py",
    ),
    Mutant(
        "kernels/spqr/layout.py",
        "words |= weights[..., column].astype(np.uint64)",
        "words |= weights[..., TILE - 1 - column].astype(np.uint64)",
        "kernels/test_spqr.py",
    ),
    Mutant(
        "kernels/engine/tally.py",
        "for unit in range(whole, len(place))",
        "for unit in range(whole + 1, len(place))",
        "kernels/test_tally.py",
    ),
    Mutant(
        "kernels/engine/products.py",
        "for rest in range(whole - begin, columns)",
        "for rest in range(whole - begin, columns - 1)",
        "kernels/test_products.py",
    ),
    Mutant(
        "kernels/engine/compiled.py",
        "if not content or signed(file, content[CHECKSUM_BYTES:]) != content:",
        "if not content:",
        "kernels/test_compiled.py",
    ),
    Mutant(
        "kernels/engine/parallel.py",
        "        wait(shared, earlier)",
        "        wait(shared, 0)",
        "kernels/test_parallel.py",
    ),
    Mutant("kernels/dense.py", "y[row] *= scales[row]", "y[row] *= scales[0]", "kernels/test_parallel.py"),
    # disk
    Mutant(
        "toolkit/storage/shards.py",
        "_up(len(text) + 8, BLOCK_BYTES) - 8",
        "_up(len(text), BLOCK_BYTES)",
        "storage/test_shards.py",
    ),
    Mutant(
        "toolkit/files.py",
        "                _sync(path)\n",
        "                pass\n",
        "storage/test_writing.py",
    ),
    Mutant("toolkit/files.py", "            _sync(folder.parent)\n", "", "storage/test_writing.py"),
    Mutant("toolkit/storage/chunks.py", "place += int(sizes.sum())", "pass", "storage/test_readers.py"),
    Mutant(
        "toolkit/storage/runs.py",
        "found[name], end = op.view(buffer[end:]), end + op.nbytes",
        "found[name], end = op.view(buffer[end:]), op.nbytes",
        "storage/test_store.py",
    ),
    Mutant(
        "toolkit/storage/chunks.py",
        "np.minimum(self.sizes[owner] - within, chunk_bytes)",
        "np.minimum(self.sizes[owner], chunk_bytes)",
        "storage/test_readers.py",
    ),
    Mutant(
        "toolkit/storage/readers/base.py",
        "            raise\n        self.files[shard].check(self._descriptor(shard))",
        "            raise",
        "storage/test_readers.py",
    ),
    Mutant(
        "toolkit/storage/store.py",
        "        if digest.hexdigest() != run.sha256:",
        "        if not digest:",
        "storage/test_store.py",
    ),
    Mutant(
        "toolkit/storage/store.py",
        "run.view(data).check()\n",
        "run.view(data)\n",
        "storage/test_store.py",
    ),
    Mutant("toolkit/storage/direct.py", "if found != {self.identity}:", "if not found:", "storage/test_readers.py"),
    Mutant(
        "toolkit/tensor_files.py",
        "if checksum(metadata, tensors) != metadata.get(CHECKSUM):",
        "if CHECKSUM not in metadata:",
        "test_tensor_files.py",
    ),
    Mutant(
        "toolkit/files.py",
        "suppress(Timeout):\n        lock.acquire()",
        "suppress(Timeout):\n        pass",
        "test_files.py",
    ),
    Mutant(
        "toolkit/files.py",
        "            _check_free(folder)\n            made.rename",
        "            made.rename",
        "test_files.py",
    ),
    # what runs from disk
    Mutant(
        "toolkit/offload/cache.py",
        "self.ahead(self._following[self._following[number]], slot)",
        "self.ahead(self._following[number], slot)",
        "offload/test_cache.py",
    ),
    Mutant(
        "toolkit/offload/cache.py",
        "                self.held[slot] = None\n                raise",
        "                raise",
        "offload/test_cache.py",
    ),
    Mutant(
        "toolkit/offload/cache.py",
        "            self.held[slot] = None  # the next line may raise\n",
        "",
        "offload/test_cache.py",
    ),
    Mutant(
        "toolkit/offload/cache.py",
        "return self._views[number, slot]",
        "return next(iter(self._views.values()))",
        "offload/test_streamer.py",
    ),
    Mutant(
        "toolkit/offload/uploader.py",
        "            mark.synchronize()\n            self._copy(",
        "            self._copy(",
        "offload/test_uploader.py",
    ),
    Mutant(
        "toolkit/offload/neuron_store.py",
        "        self.row_of[self.pointer[holes]] = holes\n",
        "",
        "offload/test_neuron_store.py",
    ),
    Mutant(
        "toolkit/offload/neuron_store.py",
        "self.bias[torch.from_numpy(holes)] = self.bias[torch.from_numpy(movers)]",
        "pass",
        "offload/test_neuron_store.py",
    ),
    Mutant(
        "toolkit/offload/neuron_store.py",
        "        except BaseException:\n            self.clear()\n",
        "        except BaseException:\n",
        "offload/test_neuron_store.py",
    ),
    Mutant(
        "toolkit/offload/expert_ffn.py",
        "slot = self.need(expert)",
        "slot = self.cache.slot_of[expert]",
        "offload/test_expert_model.py",
    ),
    Mutant(
        "toolkit/offload/expert_ffn.py",
        "weights[tokens, ranks, None]",
        "weights[tokens, 0, None]",
        "offload/test_expert_model.py",
    ),
    Mutant(
        "toolkit/offload/growing_cache.py",
        "end - self.sliding_window + 1)",
        "end - self.sliding_window + 2)",
        "offload/test_single_token.py",
    ),
    Mutant("toolkit/offload/growing_cache.py", "== self.written < ", "< ", "offload/test_cache_operations.py"),
    Mutant("toolkit/offload/budget.py", "> self.left_bytes:", "> self.left_bytes + 4096:", "offload/test_budget.py"),
    Mutant(
        "toolkit/offload/budget.py",
        "self.taken.get(name, 0) + nbytes",
        "nbytes",
        "offload/test_budget.py",
    ),
    Mutant(
        "toolkit/offload/plan.py",
        "budget.left_bytes - sum(fixed.values())",
        "budget.left_bytes",
        "offload/test_model.py",
    ),
    Mutant("toolkit/offload/turn.py", "if self._ended:", "if False:", "offload/test_turn.py"),
    Mutant("toolkit/offload/turn.py", "        with self._lock:\n            pass\n", "", "offload/test_turn.py"),
    Mutant(
        "toolkit/offload/linear.py",
        "self._multiply = type(linear).forward",
        "self._multiply = nn.Linear.forward",
        "offload/test_families.py",
    ),
    # what stays in memory
    Mutant(
        "toolkit/policies/residency.py",
        'np.argsort(order[candidates], kind="stable")[:count]',
        'np.argsort(order[candidates], kind="stable")[::-1][:count]',
        "policies/test_residencies.py",
    ),
    Mutant("toolkit/policies/residency.py", "        idle[kept] = False\n", "", "policies/test_residencies.py"),
    Mutant("toolkit/policies/residencies.py", "(age >= allowed)", "(age > allowed)", "policies/test_residencies.py"),
    Mutant("toolkit/policies/residencies.py", "return uses[::-1]", "return uses", "policies/test_residencies.py"),
    Mutant("toolkit/policies/dimms.py", "high > max(threshold, low)", "high > threshold", "policies/test_dimms.py"),
    Mutant(
        "toolkit/policies/two_level.py",
        "self.present[slots] = self._ahead[slots] = False",
        "self._ahead[slots] = False",
        "policies/test_two_level.py",
    ),
    Mutant(
        "toolkit/policies/two_level.py",
        "self.of_neurons.wasted += int(",
        "self.of_neurons.wasted = int(",
        "policies/test_two_level.py",
    ),
    Mutant("toolkit/policies/placement.py", "min(slots, len(passing))", "slots", "policies/test_placement.py"),
    Mutant(
        "toolkit/policies/dimms.py",
        "difference // (2 * activity)",
        "difference // activity",
        "policies/test_dimms.py",
    ),
    Mutant("toolkit/policies/dimms.py", "np.where(turn % 2,", "np.where(turn % 1,", "policies/test_mapping.py"),
    # models of cost
    Mutant("toolkit/costs/schedule.py", "max(free_s[step.resource], *", "max(0.0, *", "costs/test_schedule.py"),
    Mutant("toolkit/costs/cost_model.py", "(last_steps[-slots],)", "(last_steps[0],)", "costs/test_cost_model.py"),
    Mutant("toolkit/costs/cost_model.py", "fixed_s + nbytes / GB", "nbytes / GB", "costs/test_cost_model.py"),
    Mutant(
        "toolkit/costs/tables.py",
        "least, most = each.min(axis=0), each.max(axis=0)",
        "most, least = each.min(axis=0), each.max(axis=0)",
        "costs/test_ranges.py",
    ),
    Mutant(
        "toolkit/costs/machine.py",
        "self.tflop_s * 1e12 / 2))",
        "self.tflop_s * 1e12))",
        "costs/test_hardware.py",
    ),
    Mutant(
        "toolkit/costs/experts.py",
        "(1 - self.inputs.accuracy) ** self.loads.tokens_each",
        "(1 - self.inputs.accuracy)",
        "costs/test_experts.py",
    ),
    Mutant("toolkit/timeline.py", "end - max(start, reached)", "end - start", "test_timeline.py"),
    Mutant("toolkit/timeline.py", "nbytes=round(share * self.nbytes)", "nbytes=self.nbytes", "test_timeline.py"),
    Mutant(
        "toolkit/costs/machine.py",
        "np.minimum.accumulate(time[::-1])[::-1]",
        "time",
        "costs/test_hardware.py",
    ),
    Mutant(
        "toolkit/costs/disk.py",
        'if file.mode == "direct" else [offsets]',
        "if file.mode else [offsets]",
        "costs/test_disk.py",
    ),
    # pruning, quantisation, activations, predictors, quality
    Mutant("toolkit/sparsity/wanda.py", "gram.diagonal()).sqrt()", "gram.diagonal())", "sparsity/test_methods.py"),
    Mutant("toolkit/sparsity/calibration.py", "rows.square().sum(0)", "rows.abs().sum(0)", "sparsity/test_prune.py"),
    Mutant(
        "toolkit/offload/embedding.py",
        "self._start + number *",
        "self._start + 1 + number *",
        "offload/test_embedding.py",
    ),
    Mutant("toolkit/sparsity/patterns.py", "<= missing", "< missing", "sparsity/test_methods.py"),
    Mutant(
        "toolkit/sparsity/hessian.py",
        "weight[block] - changed[block]",
        "changed[block] - weight[block]",
        "sparsity/test_methods.py",
    ),
    Mutant(
        "toolkit/sparsity/calibration.py",
        "window.copy_(call(block, window))",
        "call(block, window)",
        "sparsity/test_prune.py",
    ),
    Mutant("toolkit/sparsity/calibration.py", ".manual_seed(self.seed)", ".manual_seed(0)", "sparsity/test_changed.py"),
    Mutant(
        "toolkit/quantization/groups.py",
        "((high - low) / (2**bits - 1))",
        "((high - low) / 2**bits)",
        "quantization/test_groups.py",
    ),
    Mutant(
        "toolkit/sparsity/hessian.py",
        "inverse[i, i + 1 : group.stop], errors[i], alpha=-1",
        "inverse[i, i + 1 : group.stop], errors[i], alpha=1",
        "quantization/test_groups.py",
    ),
    Mutant("toolkit/absmax.py", ".round_()", ".trunc_()", "quantization/test_absmax.py"),
    Mutant(
        "toolkit/quantization/spqr.py",
        "(weights - outliers - 1, weights - outliers)",
        "(weights - outliers - 1, weights - outliers - 1)",
        "quantization/test_spqr.py",
    ),
    Mutant(
        "kernels/spqr/quantise.py", "columns[later, lane] -=", "columns[later, lane] +=", "quantization/test_spqr.py"
    ),
    Mutant(
        "toolkit/sparsity/thresholds.py",
        ".abs() <= float(thresholds[layer])",
        ".abs() < float(thresholds[layer])",
        "sparsity/test_thresholds.py",
    ),
    Mutant(
        "toolkit/sparsity/statistics.py",
        "_ratio(both, _counts(later).sum())",
        "_ratio(both, _counts(earlier).sum())",
        "sparsity/test_statistics.py",
    ),
    Mutant(
        "toolkit/predictors/evaluation.py",
        "        mask[..., :prompt, :] = True\n",
        "",
        "predictors/test_kinds.py predictors/test_states.py",
    ),
    Mutant(
        "toolkit/predictors/evaluation.py",
        '"recall": _ratio(both, active.sum())',
        '"recall": _ratio(both, mask.sum())',
        "predictors/test_kinds.py",
    ),
    Mutant("toolkit/quality/likelihood.py", "window[1:].split", "window[:-1].split", "quality/test_perplexity.py"),
    Mutant(
        "toolkit/quality/likelihood.py",
        "self.windows * (sequence_length - 1)",
        "self.windows * sequence_length",
        "quality/test_perplexity.py",
    ),
    Mutant("toolkit/quality/corpora.py", '"calibration")]', '"evaluation")]', "quality/test_text.py"),
    # what is kept, and what is compared
    Mutant("toolkit/cache.py", "    bound.apply_defaults()\n", "", "cache/test_kept.py"),
    Mutant(
        "toolkit/cache.py",
        "    with locked(_lock_file(folder)):\n",
        "    with contextlib.nullcontext():\n",
        "cache/test_cache.py",
    ),
    Mutant(
        "toolkit/cache.py", "if not fresh and _use(folder):  # another", "if False:  # another", "cache/test_cache.py"
    ),
    Mutant("toolkit/cache.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "cache/test_cache.py"),
    Mutant(
        "toolkit/sources.py", "imported.difference(found, left_out)", "imported.difference(found)", "test_sources.py"
    ),
    Mutant(
        "toolkit/measure/disturbance.py",
        "(end.busy_s - start.busy_s) - (end.own_s - start.own_s)",
        "end.busy_s - start.busy_s",
        "measure/test_disturbance.py",
    ),
    Mutant("toolkit/measure/turns.py", "next(firsts) % len(contestants), {}", "0, {}", "measure/test_turns.py"),
    Mutant(
        "toolkit/measure/turns.py",
        "if _cores(again) < _cores(rounds[worst]):",
        "if again:",
        "measure/test_disturbance.py",
    ),
    Mutant("toolkit/measure/rates.py", "if line[0] >= 0 < line[1]", "if 0 < line[1]", "measure/test_line.py"),
    Mutant(
        "toolkit/costs/stage_tables.py",
        "pd.MultiIndex.from_frame(table[keys].assign(**baseline))",
        "pd.MultiIndex.from_frame(table[keys])",
        "costs/test_stage_tables.py",
    ),
    Mutant(
        "toolkit/evidence/comparison.py",
        'if bound == "at_least" else ours <= limit',
        'if bound == "at_least" else ours >= limit',
        "evidence/test_comparison.py",
    ),
    Mutant(
        "toolkit/evidence/comparison.py",
        '"worse", ascending=False',
        '"worse", ascending=True',
        "evidence/test_comparison.py",
    ),
    Mutant(
        "toolkit/evidence/comparison.py",
        "return (ratio.astype(float) - 1).abs()",
        "return ratio.astype(float) - 1",
        "evidence/test_comparison.py",
    ),
    Mutant(
        "toolkit/evidence/comparison.py",
        "return rows[measured] if measured.any() else rows",
        "return rows",
        "evidence/test_comparison.py",
    ),
    Mutant(
        "toolkit/planner/by_bytes.py",
        "(1 - memory.held_share(dram_bytes))",
        "memory.held_share(dram_bytes)",
        "planner/test_by_bytes.py",
    ),
    # which matrices a model has, and what they compute
    Mutant("toolkit/models/plain.py", "(output * weights[token, rank, None])", "output", "models/test_plain.py"),
    Mutant(
        "toolkit/models/plain.py",
        "yield name, tensor.T if transposed else tensor",
        "yield name, tensor",
        "models/test_plain.py",
    ),
    Mutant(
        "toolkit/models/ffn.py",
        "linear.weight.data.chunk(2)[half]",
        "linear.weight.data.chunk(2)[0]",
        "models/test_ffn.py",
    ),
    Mutant(
        "toolkit/models/experts.py",
        "FORMS[self.gate.form](scores, ids) * self.gate.scale",
        "FORMS[self.gate.form](scores, ids)",
        "models/test_experts.py",
    ),
    Mutant(
        "toolkit/offload/head.py",
        "return part.view(buffer)[HEAD]",
        "return part.view(buffer * 0)[HEAD]",
        "offload/test_head.py",
    ),
]


def main() -> int:
    """Plant the chosen mutants one after the other, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the mutants to plant: part of their file or their new text")
    parser.add_argument("--baseline", action="store_true", help="run the named tests without a mutant first")
    arguments = parser.parse_args()
    words = arguments.words or [""]
    chosen = [mutant for mutant in MUTANTS if any(word in mutant.file or word in mutant.new for word in words)]
    for name in IMPORTED:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        if arguments.baseline:
            tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
            if (outcome := outcome_of(copy, tests, LIMIT_S * len(tests))) != "survived":
                print(f"the tests do not pass without a mutant: {outcome}\n{log_of(copy)}")
                return 1
        outcomes = [planted(copy, mutant) for mutant in chosen]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))
    return int(any(outcome != "killed" for outcome in outcomes))


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


def planted(copy: Path, mutant: Mutant) -> str:
    """The fate of a mutant: "killed", "survived", "its text is gone" or "its tests cannot run"."""
    file, begun_s = copy / mutant.file, time.perf_counter()
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    if source.count(mutant.old) != 1:
        outcome = "its text is gone"
    else:
        file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            outcome = outcome_of(copy, mutant.tests.split(), LIMIT_S)
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
        return "killed"
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
