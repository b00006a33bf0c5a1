"""Products of blocks with many vectors, such as those of a prompt, for CPUs with AVX-512 and VNNI: sixteen rows a lane.

Sixteen rows are unpacked once for all vectors, into a panel that stays in the second cache. A register of it has four
columns of each row, a row a lane. `vpdpbusd` multiplies it with the same four columns of a vector in all lanes, so no
sum runs across lanes. Eight vectors share a register of codes; they lie side by side, too.

    panel, a block of 256 columns                vectors, eight together
    [64 × (16 rows × 4 codes)]                   [64 × (8 vectors × 4 codes)]
    [a factor for each 16 or 32 columns × 16]    [a scale × 8]
    [a minimum likewise, where there are any]    [a start, or a sum, for each 16 or 32 columns × 8]

Sums of integers begin at a start where codes have an offset. Factors are exact: a scale of a block and one of its
parts. A row's sum adds up parts of a row one after the other, so it differs from that of `cpu_avx512` in the last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from toolkit.kernels.blocks.activations import narrow, prepare_wide, prepare_with_sums
from toolkit.kernels.blocks.codebooks import CODEBOOKS
from toolkit.kernels.blocks.cpu_avx512 import READ, knows, row_pointer, second_size
from toolkit.kernels.blocks.layout import LAYOUTS
from toolkit.kernels.blocks.unpacking import BYTES, FLOATS, INTS, LANES, NARROW, OFFSETS, REGISTER, WIDTH
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import Task
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    I32,
    I64,
    call,
    constant,
    in_all_lanes,
    join,
    multiply_add,
    prefetch_l2,
    take,
)

__all__ = ["FEWEST", "PANEL_BYTES", "knows", "preparing", "product", "rounding"]

FEWEST = 32  # vectors: for fewer, unpacking takes longer than what it saves
VECTORS = 8  # side by side
PANEL_BYTES = 384 << 10  # of panels that meet all vectors together: they leave room in the second cache for vectors
HALF_WIDTH = 32  # columns of a narrow block
SIGNED = 6  # the offset of codes with signs, as a binary logarithm: magnitudes stay below it
WIDE_OFFSETS = {"Q3_K": 2, "Q6_K": 5, "IQ4_XS": 7, "TQ2_0": 0} | dict.fromkeys(CODEBOOKS, SIGNED)
LONG_PARTS = ("Q4_K", "Q5_K", "IQ4_XS")  # wide types with a scale for 32 columns; the others have one for 16


class PanelForm(NamedTuple):
    """The panels of a type: columns that are unpacked together, that share a scale of vectors, and that share a factor.

    `minima`: there are minima in place of an offset.
    """

    unit: int
    width: int
    part: int
    minima: bool

    @property
    def codes(self) -> int:
        """Registers of codes of a unit and row."""
        return self.unit // REGISTER

    @property
    def numbers(self) -> int:
        """Factors and minima of a unit."""
        return self.unit // self.part * (1 + self.minima)

    @property
    def record(self) -> int:
        """Registers that a unit of a row takes before rows are turned to lanes."""
        return self.codes + -(-self.numbers // LANES)

    @property
    def registers(self) -> int:
        """Registers of a unit in a panel."""
        return self.unit // 4 + self.numbers


def form_of(name: str) -> PanelForm:
    """The panels of a type."""
    if name in READ:
        return PanelForm(WIDTH, WIDTH, 32 if name in LONG_PARTS else 16, name not in WIDE_OFFSETS)
    return PanelForm(REGISTER, HALF_WIDTH, HALF_WIDTH, name not in OFFSETS)


# --- panels ---


def _of_wide(builder, name: str, block) -> list[ir.Value]:
    """A block in registers: four of codes, then factors and minima, which are negative."""
    wide, count = READ[name](builder, block), WIDTH // form_of(name).part
    assert wide.offset == WIDE_OFFSETS.get(name) or wide.signs
    codes = [*wide.codes]
    if wide.signs:
        signed = [builder.select(sign, builder.neg(code), code) for code, sign in zip(codes, wide.signs, strict=True)]
        codes = [builder.add(code, constant(BYTES, 1 << SIGNED)) for code in signed]

    def numbers(scales, factor):
        every = builder.fmul(builder.sitofp(scales, FLOATS), in_all_lanes(builder, factor, LANES))
        return take(builder, every, range(0, LANES, LANES // count))

    found = [numbers(wide.scales, wide.factor)]
    if wide.minima is not None:
        found.append(numbers(wide.minima, builder.fneg(wide.minimum_factor)))
    if count < LANES:
        found = [join(builder, [*found, ir.Constant(found[0].type, None)][:2])]
    return [*codes, *found]


def _of_narrow(builder, name: str, pair) -> list[ir.Value]:
    """Two blocks of 32 columns likewise; the second may be None."""
    both = NARROW[name](builder, pair)
    minima = ir.Constant(both.factors.type, None) if both.minima is None else both.minima
    nothing = ir.Constant(minima.type, None)
    return [both.codes, join(builder, [both.factors, minima, *[nothing] * 6])]


@cache
def read_unit(name: str):
    """The intrinsic that writes a unit of a row to `out`, from the byte `place` on: of narrow blocks one or two."""

    @intrinsic(prefer_literal=True)
    def read_unit(typing_context, data, at, blocks, out, place):
        count = blocks.literal_value

        def generate(context, builder, signature, arguments):
            block = simd.pointer(context, builder, signature.args[0], *arguments[:2], simd.I8)
            if name in READ:
                found = _of_wide(builder, name, block)
            else:
                second = builder.gep(block, [I64(LAYOUTS[name].nbytes)]) if count == 2 else None
                found = _of_narrow(builder, name, [block, second])
            for number, value in enumerate(found):
                to = builder.add(arguments[4], I64(REGISTER * number))
                builder.store(value, simd.pointer(context, builder, signature.args[3], arguments[3], to, value.type), 4)
            return context.get_dummy_value()

        return types.void(data, types.int64, blocks, out, types.int64), generate

    return read_unit


@intrinsic(prefer_literal=True)
def turn(typing_context, array, at, stride, place, count):
    """Turn rows to lanes: sixteen rows of sixteen words become columns, of which `count` are written from `place` on.

    Rows begin at the byte `at` and each `stride` bytes behind; all lie in `array`.
    """

    def generate(context, builder, signature, arguments):
        def pointer(where):
            return simd.pointer(context, builder, signature.args[0], arguments[0], where, INTS)

        places = (builder.add(arguments[1], builder.mul(arguments[2], I64(row))) for row in range(LANES))
        rows = [builder.load(pointer(where), align=REGISTER) for where in places]
        for step in (8, 4, 2, 1):  # blocks of so many words change places across the diagonal
            for low in (row for row in range(LANES) if not row & step):
                pair = rows[low], rows[low | step]
                lanes = [lane if not lane & step else LANES + (lane ^ step) for lane in range(LANES)]
                others = [lane | step if not lane & step else LANES + lane for lane in range(LANES)]
                kind = ir.VectorType(I32, LANES)
                rows[low] = builder.shuffle_vector(*pair, ir.Constant(kind, lanes))
                rows[low | step] = builder.shuffle_vector(*pair, ir.Constant(kind, others))
        for number in range(count.literal_value):
            to = builder.add(arguments[3], I64(REGISTER * number))
            builder.store(rows[number], pointer(to), align=REGISTER)
        return context.get_dummy_value()

    place = types.int64
    return types.void(array, place, place, place, count), generate


@cache
def fill_panel(name: str):
    """The function that unpacks sixteen rows into a panel, from the byte `panel` of `buffer` on.

    Rows from `last` on are the last one again. Meanwhile the second cache is asked for what lies `ahead` bytes behind.
    `records` is where rows lie until they are turned to lanes. Both begin a cache line.
    """
    form, layout = form_of(name), LAYOUTS[name]
    codes, numbers, record, registers = form.codes, form.numbers, REGISTER * form.record, REGISTER * form.registers
    blocks = form.unit // layout.elements
    nbytes, read, first_numbers = blocks * layout.nbytes, read_unit(name), min(numbers, LANES)
    more_numbers, behind_codes = numbers - first_numbers, REGISTER * form.unit // 4

    @compiled
    def fill_panel(data, row, last, ahead, buffer, records, panel):
        row_bytes, place = data.shape[1], panel
        for unit in range(0, row_bytes, nbytes):
            for lane in range(LANES):
                at = min(row + lane, last - 1) * row_bytes + unit
                for line in range(0, nbytes, CACHE_LINE):
                    prefetch_l2(data, at + ahead + line)
                if unit + nbytes <= row_bytes:
                    read(data, at, blocks, buffer, records + lane * record)
                else:
                    read(data, at, 1, buffer, records + lane * record)
            for part in range(codes):
                turn(buffer, records + REGISTER * part, record, place + LANES * REGISTER * part, LANES)
            turn(buffer, records + REGISTER * codes, record, place + behind_codes, first_numbers)
            if more_numbers:
                after = place + behind_codes + REGISTER * LANES
                turn(buffer, records + REGISTER * (codes + 1), record, after, more_numbers)
            place += registers

    return fill_panel


# --- products ---


@dataclass(frozen=True)
class _Tile:
    """Some panels and eight vectors, behind pointers; `part` columns share a factor. Lists begin with the first one."""

    builder: ir.IRBuilder
    part: int
    panels: Sequence[ir.Value]
    codes: ir.Value
    scales: ir.Value
    more: ir.Value

    def clear(self, sums: Sequence[ir.Value]) -> None:
        """Set what is behind pointers to zero."""
        for place in sums:
            self.builder.store(ir.Constant(FLOATS, None), place, align=REGISTER)

    def load(self, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """The numbers behind pointers."""
        return [self.builder.load(place, align=REGISTER) for place in sums]

    def of_vectors(self, source: ir.Value, first: ir.Value) -> list[ir.Value]:
        """Numbers of eight vectors, each in all lanes, once for each panel; `first` is the number of the eight."""
        builder, at = self.builder, self.builder.mul(first, I64(VECTORS))
        places = (builder.gep(source, [builder.add(at, I64(vector))]) for vector in range(VECTORS))
        return [in_all_lanes(builder, builder.load(place), LANES) for place in places] * len(self.panels)

    def of_panels(self, at: ir.Value, kind: ir.Type) -> list[ir.Value]:
        """A register of each panel, once for each vector."""
        places = (self.builder.bitcast(self.builder.gep(panel, [at]), kind.as_pointer()) for panel in self.panels)
        return [register for place in places for register in [self.builder.load(place, align=REGISTER)] * VECTORS]

    def integers(self, register: ir.Value, quad: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """The sums of a part, from these on: its codes lie in panels from `register` on, in vectors from `quad` on."""
        builder = self.builder
        for number in range(self.part // 4):
            weights = self.of_panels(builder.add(register, I64(number)), INTS)
            given = self.of_vectors(self.codes, builder.add(quad, I64(number)))
            each = zip(sums, weights, given, strict=True)
            sums = [call(builder, "x86.avx512.vpdpbusd.512", INTS, *operands) for operands in each]
        return [*sums]

    def add(self, sums: Sequence[ir.Value], factors: Sequence[ir.Value], terms: Sequence[ir.Value]) -> None:
        """Add products to what is behind pointers."""
        before = self.load(sums)
        for place, factor, term, value in zip(sums, factors, terms, before, strict=True):
            self.builder.store(multiply_add(self.builder, term, factor, value), place, align=REGISTER)


@cache
def multiply_tile(unit: int, width: int, part: int, minima: bool, panels: int):
    """The intrinsic that multiplies so many panels with eight vectors and writes the sums of rows from `row` to `last`.

    The other numbers are those of a `PanelForm`. Panels of `stride` bytes begin at the byte `panel` of `buffer`.
    `group` is the number of the eight vectors.
    """
    registers, parts, codes = PanelForm(unit, width, part, minima).registers, unit // part, unit // 4

    @intrinsic
    def multiply_tile(typing_context, buffer, panel, stride, codes_of, scales_of, more_of, group, y, row, last):
        def generate(context, builder, signature, arguments):
            buffer, panel, stride, *_, group, y, row, last = arguments

            def register_at(place, kind):
                return simd.pointer(context, builder, signature.args[0], buffer, place, kind)

            places = [builder.add(panel, builder.mul(stride, I64(number))) for number in range(panels)]
            given = [row_pointer(context, builder, signature, arguments, k, group) for k in (3, 4, 5)]
            given[0] = builder.bitcast(given[0], I32.as_pointer())
            tile = _Tile(builder, part, [register_at(place, INTS) for place in places], *given)
            count = panels * VECTORS
            totals, sums = ([cgutils.alloca_once(builder, FLOATS) for _ in range(count)] for _ in range(2))
            every = builder.udiv(second_size(builder, arguments[5]), I64(VECTORS))

            def add_part(number, sums) -> None:
                """Add the products of a part, by its number in a row."""
                of_unit, within = builder.udiv(number, I64(parts)), builder.urem(number, I64(parts))
                base = builder.mul(of_unit, I64(registers))
                register = builder.add(base, builder.mul(within, I64(part // 4)))
                more = tile.of_vectors(tile.more, number)
                starts = [ir.Constant(INTS, None)] * count if minima else more
                found = tile.integers(register, builder.mul(number, I64(part // 4)), starts)
                floats = [builder.sitofp(value, FLOATS) for value in found]
                numbers = builder.add(builder.add(base, I64(codes)), within)
                factors = tile.of_panels(numbers, FLOATS)
                if width == part:
                    scales = tile.of_vectors(tile.scales, number)
                    factors = [builder.fmul(factor, scale) for factor, scale in zip(factors, scales, strict=True)]
                tile.add(sums, factors, floats)
                if minima:
                    tile.add(sums, tile.of_panels(builder.add(numbers, I64(parts)), FLOATS), more)

            tile.clear(totals)
            if width == part:
                with cgutils.for_range(builder, every, intp=I64) as loop:
                    add_part(loop.index, totals)
            else:
                with cgutils.for_range(builder, builder.udiv(every, I64(parts)), intp=I64) as blocks:
                    tile.clear(sums)
                    first = builder.mul(blocks.index, I64(parts))
                    with cgutils.for_range(builder, I64(parts), intp=I64) as loop:
                        add_part(builder.add(first, loop.index), sums)
                    tile.add(totals, tile.of_vectors(tile.scales, blocks.index), tile.load(sums))
            for number in range(panels):
                some = tile.load(totals[number * VECTORS : (number + 1) * VECTORS])
                _store(context, builder, signature, (group, y, builder.add(row, I64(number * LANES)), last), some)
            return context.get_dummy_value()

        place = types.int64
        of_vectors = codes_of, scales_of, more_of
        return types.void(buffer, place, place, *of_vectors, place, y, place, place), generate

    return multiply_tile


def _store(context, builder, signature, where, totals: Sequence[ir.Value]) -> None:
    """Write the sums of those rows and vectors that there are."""
    group, y, row, last = where
    vectors = builder.extract_value(builder.extract_value(y, 5), 0)
    left = in_all_lanes(builder, builder.trunc(builder.sub(last, row), I32), LANES)
    mask = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), left)
    for number, value in enumerate(totals):
        vector = builder.add(builder.mul(group, I64(VECTORS)), I64(number))
        with builder.if_then(builder.icmp_signed("<", vector, vectors)):
            at = builder.add(builder.mul(vector, second_size(builder, y)), row)
            place = simd.pointer(context, builder, signature.args[7], y, at, FLOATS)
            call(builder, "masked.store.v16f32.p0", ir.VoidType(), value, place, I32(4), mask)


@cache
def product(name: str):
    """The compiled function that sets `y[vector, row]` to the products of rows of blocks with prepared vectors."""
    form, layout = form_of(name), LAYOUTS[name]
    fill, multiply, multiply_two = fill_panel(name), multiply_tile(*form, 1), multiply_tile(*form, 2)
    nbytes, registers = form.unit // layout.elements * layout.nbytes, REGISTER * form.registers
    record_bytes = LANES * REGISTER * form.record

    @compiled
    def product(data, codes, scales, more, y, first, last):
        row_bytes = data.shape[1]
        panel_bytes = (row_bytes + nbytes - 1) // nbytes * registers
        panels = min(max(1, PANEL_BYTES // panel_bytes), (last - first + LANES - 1) // LANES)
        some = LANES * panels
        buffer = np.empty(CACHE_LINE + record_bytes + panels * panel_bytes, np.uint8)
        records = CACHE_LINE - np.int64(buffer.ctypes.data) % CACHE_LINE
        begins = records + record_bytes
        for begin in range(first, last, some):
            end = min(begin + some, last)
            for row in range(begin, end, LANES):
                fill(data, row, last, some * row_bytes, buffer, records, begins + (row - begin) // LANES * panel_bytes)
            for group in range(len(codes)):
                row, panel = begin, begins
                while row + LANES < end:
                    multiply_two(buffer, panel, panel_bytes, codes, scales, more, group, y, row, last)
                    row, panel = row + 2 * LANES, panel + 2 * panel_bytes
                if row < end:
                    multiply(buffer, panel, panel_bytes, codes, scales, more, group, y, row, last)

    return product


# --- vectors ---


@cache
def interleaved(prepare, kind: types.Type, width: int, entries: int, factor: int):
    """The function that rounds x, fp32 [vectors, columns], and puts eight vectors side by side, of groups.

    `prepare` rounds a vector, in blocks of so many columns; it gives sums of type `kind`. `factor` times each so many
    of these are what a part has.
    """

    @compiled
    def interleaved(x, codes, scales, more, first, last):
        columns = (x.shape[1] + REGISTER - 1) // REGISTER * REGISTER
        of_one, of_blocks = np.zeros((1, columns), np.int8), np.zeros((1, columns // width), np.float32)
        sums = np.zeros((1, columns // 4), kind)
        words, placed = of_one.view(np.int32), codes.view(np.int32)
        for vector in range(VECTORS * first, min(VECTORS * last, len(x))):
            prepare(x[vector : vector + 1], of_one, of_blocks, sums)
            group, lane = vector // VECTORS, vector % VECTORS
            for word in range(placed.shape[1] // VECTORS):
                placed[group, VECTORS * word + lane] = words[0, word]
            for block in range(scales.shape[1] // VECTORS):
                scales[group, VECTORS * block + lane] = of_blocks[0, block]
            for part in range(more.shape[1] // VECTORS):
                total = sums[0, entries * part]
                for entry in range(1, entries):
                    total += sums[0, entries * part + entry]
                more[group, VECTORS * part + lane] = total * factor

    return interleaved


def _interleaving(name: str):
    form = form_of(name)
    if name in READ:
        factor = 1 if form.minima else -1 << WIDE_OFFSETS[name]
        return interleaved(prepare_wide, numba.int16, WIDTH, form.part // 16, factor)
    if form.minima:
        return interleaved(prepare_with_sums, numba.float32, HALF_WIDTH, 1, 1)
    return interleaved(narrow(OFFSETS[name]), numba.int32, HALF_WIDTH, HALF_WIDTH // 4, 1)


def rounding(name: str) -> str:
    """The name of the way that vectors are rounded for a type; types of one way share prepared vectors."""
    form = form_of(name)
    return f"panels {form.width} {form.part} {form.minima or WIDE_OFFSETS.get(name, OFFSETS.get(name))}"


def preparing(name: str, x: np.ndarray) -> Task:
    """The task that prepares vectors, fp32 [vectors, columns], for a type: its last arguments are what products take.

    These are codes, scales and what parts have, of each group of eight vectors. Vectors that there are not are zeros.
    """
    (vectors, columns), form = x.shape, form_of(name)
    groups = -(-vectors // VECTORS)
    codes = np.zeros((groups, VECTORS * columns), np.int8)
    scales = np.zeros((groups, VECTORS * columns // form.width), np.float32)
    more = np.zeros((groups, VECTORS * columns // form.part), np.float32 if form.minima else np.int32)
    return Task(_interleaving(name), (x, codes, scales, more), groups, x.nbytes)
