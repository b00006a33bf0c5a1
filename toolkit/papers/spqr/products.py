"""Mat-vecs with one or several vectors on this CPU, in turns: SpQR's ways beside dense bf16, int8 and Endor's bitmap.

    table = product_measurements("llama2-7b", ["q_proj", "down_proj"], ["dense", "spqr, csr"])

Weights are shape-only twins: time does not depend on the values, but it does depend on where outliers lie. Each matrix
may therefore take its outliers' rows from a real one. Before each product a buffer larger than the caches is read, so
that it finds its weights in DRAM, as in a model that is larger than the caches. That read takes turns as well. It also
sends threads to sleep and code out of the caches, which a model's products do not wait for. A small product of the same
kind therefore comes right before.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from toolkit.errors import unknown
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.kernels import csr, dense, spqr
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.turns import measured, take_turns
from toolkit.models.shapes import random_pruned, twin_shapes

READ = "read"
FEW, MANY = "cached, few words", "cached, many words"
SWEPT_BYTES = 128 << 20  # read before each product; far more than the caches of a few cores
SMALL_ROWS = 256  # of the product before a timed one: enough work for several threads
CACHED_RUNS = 4  # that are not timed: from the second on, the caches hold the words
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work
CACHED_BYTES = {FEW: 64 << 10, MANY: 512 << 10}  # of words; a core's second cache holds them beside the vector
OUTLIERS = 0.01
TOLERANCE = 0.02  # of the largest product: sums of another turn may be in another order

Run = Callable[[], object]


@dataclass(frozen=True)
class MatrixTwin:
    """A random matrix [rows, columns]. `outliers` of its weights are outliers, in rows as `density` has them.

    `density` holds the outliers of each row of a real matrix; None spreads them evenly. A product has `vectors`.
    """

    shape: tuple[int, int]
    outliers: float = OUTLIERS
    density: tuple[int, ...] | None = None
    vectors: int = 1

    def inputs(self) -> Tensor:
        """Random vectors, [columns] or [vectors, columns]."""
        return torch.randn(self.shape[1:] if self.vectors == 1 else (self.vectors, self.shape[1]))

    def row_counts(self, generator: np.random.Generator) -> np.ndarray:
        """How many outliers each row has: drawn, with the density's rows repeated over this matrix's rows."""
        rows, columns = self.shape
        shares = np.resize(np.asarray(self.density or (1,), float), rows)
        expected = self.outliers * rows * columns * shares / max(shares.sum(), 1)
        return np.minimum(generator.poisson(expected), columns)


def random_outliers(twin: MatrixTwin, storage: str, seed: int = 0) -> csr.Outliers:
    """Outliers of a twin, in columns drawn at random."""
    generator = np.random.default_rng(seed)
    columns = [
        generator.choice(twin.shape[1], count, replace=False, shuffle=False) for count in twin.row_counts(generator)
    ]
    rows = np.repeat(np.arange(twin.shape[0]), [len(places) for places in columns])
    values = torch.from_numpy(generator.standard_normal(len(rows))).half()
    places = torch.from_numpy(np.concatenate(columns)) if columns else torch.empty(0, dtype=torch.int64)
    return csr.encode(storage, twin.shape, torch.from_numpy(rows), places, values)


def random_words(shape: tuple[int, int]) -> Tensor:
    """Words of a random matrix, whose sizes are padded to whole tiles."""
    whole = (spqr.TILE * spqr.tiles(shape)[0], spqr.TILE * spqr.tiles(shape)[1])
    return random_spqr(SpQRMatrix, whole, torch.bfloat16, outliers=0).words


SPQR = {"spqr, csr": ("csr", "auto"), "spqr, ptcsr": ("ptcsr", "auto")}  # storage of outliers and backend
SPQR |= {name: ("csr", name) for name in ("avx2", "avx2_table", "avx2_arithmetic", "table", "arithmetic")}
CONTESTANTS = ("dense", "dense, ours", "int8", "endor", *SPQR)


def timed(contestant: str, twin: MatrixTwin, x: Tensor) -> tuple[int, Run]:
    """The stored bytes of a matrix, and its product with a vector or several."""
    if contestant in SPQR:
        storage, backend = SPQR[contestant]
        words, outliers = random_words(twin.shape), random_outliers(twin, storage)
        nbytes = words.nbytes + outliers.offsets.nbytes + outliers.col_vals.nbytes
        return nbytes, lambda: spqr.matvec(words, outliers, x, backend=backend)
    if contestant == "endor":
        half = Endor.encode(random_pruned(twin.shape, 0.5, torch.bfloat16))
        return half.nbytes, lambda: half.matvec(x)
    weight, vector = torch.randn(twin.shape, dtype=torch.bfloat16), x.bfloat16()
    if contestant == "int8":
        scaled = Scaled.encode("dense", weight)
        return scaled.nbytes, lambda: scaled.matvec(x)
    ours = contestant == "dense, ours"  # torch's product does not reach the rate of memory
    return weight.nbytes, (lambda: dense.matvec(weight, x)) if ours else (lambda: functional.linear(vector, weight))


def product_measurements(
    model: str,
    ops: Sequence[str],
    contestants: Sequence[str],
    densities: Mapping[str, Sequence[int]] | None = None,
    outliers: float = OUTLIERS,
    repetitions: int = 15,
    fresh: bool = False,
    vectors: int = 1,
) -> pd.DataFrame:
    """Seconds of each mat-vec, kept: a row for every operation, contestant and repetition.

    Args:
        model: of `toolkit.models.shapes`, or a part of it.
        ops: its operations, such as "q_proj".
        contestants: of `CONTESTANTS`; backends that this CPU cannot run are left out.
        densities: outliers of each row of a real matrix, by operation, as in `MatrixTwin`; an operation without: even.
        outliers: the share of weights that are outliers.
        repetitions: turns that count; one more warms up.
        fresh: measure again.
        vectors: how many are multiplied at once.

    Columns: op, rows, columns, contestant, nbytes, repetition (from 1), seconds, threads, disturbed, measured_at. The
    contestant `READ` stands for `torch.sum` of `SWEPT_BYTES`. `FEW` and `MANY` are SpQR's products on one core with
    words that its second cache holds; nbytes are those words. Raises `UserError` for a model or an operation
    that is unknown, and for a product that is not the same in each turn.
    """
    known, tables = twin_shapes(model), []
    if unknown_ops := [op for op in ops if op not in known]:
        raise unknown(f"layer of {model}", unknown_ops[0], known)
    contestants = [name for name in contestants if name not in spqr.BACKENDS or name in spqr.BACKENDS.available()]
    for op in ops:  # one by one, so that notebooks share measurements of the same operation
        density = (densities or {}).get(op)
        counts = None if density is None else tuple(int(count) for count in density)
        twin = MatrixTwin(known[op], outliers, counts, vectors)
        turns = _turns(twin, contestants, repetitions, fresh=fresh)
        tables.append(turns.assign(op=op, rows=twin.shape[0], columns=twin.shape[1]))
    return pd.concat(tables, ignore_index=True)


@measured
def _turns(twin: MatrixTwin, contestants: Sequence[str], repetitions: int) -> pd.DataFrame:
    x, swept = twin.inputs(), torch.ones(SWEPT_BYTES // 8, dtype=torch.int64)
    small = MatrixTwin((min(SMALL_ROWS, twin.shape[0]), twin.shape[1]), twin.outliers)
    products = [TimedProduct(READ, swept.nbytes, swept.sum)]
    for name in contestants:
        before = [swept.sum, _pause, timed(name, small, x)[1]]
        products.append(TimedProduct(name, *timed(name, twin, x), before))
    for name, nbytes in CACHED_BYTES.items():
        words_bytes, run = _cached(twin, x, nbytes)
        products.append(OnOneCore(name, words_bytes, run, [run] * CACHED_RUNS))
    spans = take_turns(products, repetitions, warm_up=1)
    spans = spans.assign(threads=torch.get_num_threads())
    return spans[["contestant", "nbytes", "repetition", "seconds", "threads", "disturbed", "measured_at"]]


class TimedProduct(Contestant):
    """A product that is timed by itself, after other runs and a pause that are not. Each turn must give the same."""

    exact = False

    def __init__(self, name: str, nbytes: int, run: Run, before: Sequence[Run] = ()):
        self.name, self.labels, self.nbytes = name, {"contestant": name}, nbytes
        self.run, self.before, self.reference = run, before, Reference("before", tolerance=TOLERANCE)

    def prepare(self) -> None:
        """Run what comes before."""
        for run in (_pause, *self.before):
            run()

    def token(self, number: int) -> object:
        """The product."""
        return self.run()


class OnOneCore(TimedProduct):
    """A product by one thread."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """One thread for the turn."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _cached(twin: MatrixTwin, x: Tensor, nbytes: int) -> tuple[int, Run]:
    """A product with as many tile rows as fit into so many bytes of words, one at least."""
    columns = twin.shape[1]
    tall = max(1, nbytes // (8 * spqr.TILE * spqr.tiles((1, columns))[1]))
    part = MatrixTwin((tall * spqr.TILE, columns), twin.outliers)
    words, outliers = random_words(part.shape), random_outliers(part, "csr")
    return words.nbytes, lambda: spqr.matvec(words, outliers, x)


def _pause() -> None:
    """Wait without sleep: a thread that sleeps would have to be woken itself."""
    start = time.perf_counter()
    while time.perf_counter() - start < PAUSE_S:
        pass
