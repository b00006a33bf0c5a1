"""A machine as the models here see it: disk, memories, processors and links as plain numbers, each with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import pandas as pd
from jaxtyping import Float

from toolkit.errors import UserError, unknown

GB = 1e9
THIS_MACHINE = "this-machine"  # the id of the profile that is probed here
MULTIPLIERS = 256  # of a GEMV unit (HERMES, table II): a profile's rate of near-data computing is theirs
NOTHING = MappingProxyType({})
BASES = {
    "paper": "stated by the paper",
    "datasheet": "stated by the vendor",
    "derived": "worked out from the paper's or the vendor's figures; the source shows how",
    "assumed": "stated nowhere; the source says what was assumed",
    "measured": "measured on the machine by the probe",
}
EVIDENCE = {  # the kind of evidence that a results table gives for a number of each basis
    "paper": "published",
    "datasheet": "published",
    "derived": "modelled",
    "assumed": "modelled",
    "measured": "measured",
}


@dataclass(frozen=True)
class Source:
    """Where a number comes from: its basis (a key of `BASES`) and the words; `low` and `high` where it is uncertain.

    `low` and `high` are in the unit of the number they belong to. `claims` are the ids of the published numbers that it
    was taken or derived from. They are inputs, so no score counts them.
    """

    basis: str
    text: str
    low: float | None = None
    high: float | None = None
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A disk. `bandwidth_gb_s` is its limit for long reads; the two times are the cost of short ones.

    `latency_s` is the time from a request to its data on an idle disk, without the transfer; requests of several
    threads overlap in it. `request_s` is the part of a request's cost that does not overlap, so a disk serves at most
    1 / `request_s` reads a second. With `thread_gb_s`, a read of c bytes takes its thread a time on a line instead,
    `latency_s` + c / `thread_gb_s`, with all threads at work; their sum stays below the bandwidth.
    """

    name: str
    capacity_bytes: float
    bandwidth_gb_s: float
    latency_s: float | None = None
    request_s: float = 0.0
    thread_gb_s: float | None = None

    def read_gb_s(self, chunk_bytes: int, threads: int) -> float:
        """Random-read bandwidth in GB/s when `threads` threads each wait for one chunk at a time.

        Without a rate of a thread, every read first waits `latency_s` beside the others, then for its turn at the disk
        behind them. With s(c) = `request_s` + c / bandwidth, the bandwidth is threads · c / (latency + threads · s(c)).
        This is the pessimistic bound of operational analysis for a closed system of one server and a delay. It rises
        with chunk and threads towards the disk's bandwidth, as FLASH shows in figure 2b. Raises `UserError` for a disk
        of unknown latency.
        """
        return chunk_bytes / self._read_s(chunk_bytes, threads) / GB

    def gap_bytes(self, threads: int) -> float:
        """The longest gap between two needed parts that is quicker to read than to leave out.

        Reading on costs the gap's bytes at the disk's bandwidth; leaving the gap out costs one more request. Raises
        `UserError` as `read_gb_s` does.
        """
        return self.bandwidth_gb_s * GB * self._read_s(0, threads)

    def _read_s(self, chunk_bytes: float, threads: int) -> float:
        """Seconds between the ends of two reads, of many that `threads` threads do."""
        if self.latency_s is None:
            raise UserError(f"the profile gives no latency for {self.name}: short reads cannot be modelled")
        if self.thread_gb_s:
            own_s = (self.latency_s + chunk_bytes / (self.thread_gb_s * GB)) / threads
            return max(own_s, chunk_bytes / (self.bandwidth_gb_s * GB))
        return self.latency_s / threads + self.request_s + chunk_bytes / (self.bandwidth_gb_s * GB)


@dataclass(frozen=True)
class Curve:
    """Measured seconds of a task at some sizes in bytes, smallest size first; they never fall from one to the next.

    A fixed time and a rate do not describe a task whose rate depends on its size. A compiled product is one: its second
    thread often starts on the first one's core and moves only milliseconds later, so a small product runs at the rate
    of one thread and a large one at the rate of all.
    """

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, nbytes: Sequence[float], seconds: Sequence[float]) -> "Curve":
        """The curve through measured points, in any order.

        A time above that of a larger size is a slow spell: it is cut to the larger size's.
        """
        order = np.argsort(nbytes)
        size, time = np.asarray(nbytes, float)[order], np.asarray(seconds, float)[order]
        never_above_larger = np.minimum.accumulate(time[::-1])[::-1]
        return cls(tuple(size.tolist()), tuple(never_above_larger.tolist()))

    def at(self, nbytes: float) -> float:
        """Seconds for so many bytes, on the straight line between the two sizes beside them.

        Below the smallest size it takes as long as the smallest; beyond the largest it goes on at the largest's rate.
        """
        beyond = max(1.0, nbytes / self.nbytes[-1])
        return beyond * float(np.interp(nbytes, self.nbytes, self.seconds))


@dataclass(frozen=True)
class Memory:
    """A memory and the processor that computes on it: DRAM with the CPU, or device memory with the GPU.

    `tflop_s` maps a dtype to the dense peak rate in 10¹² operations a second (a multiply-add is two). Half-precision
    rates of GPUs accumulate in fp32 unless the source says otherwise.

    All other mappings are by format. `decode_gb_s` is the dense bytes that decoding makes a second, `matvec_gb_s` the
    stored bytes that a mat-vec goes through a second ("neurons": of an FFN of which few fire); a format without one is
    read at `bandwidth_gb_s`. `decode_fixed_s` and `matvec_fixed_s` are what decoding one weight, or one product, takes
    however small it is (starting threads, launching a kernel): 0 if absent. `decode_curves` and `matvec_curves` are
    measured times by bytes; where there is one, it is used instead of the rate and the fixed time. `sm_ghz` is the
    number of a GPU's multiprocessors times their clock.
    """

    name: str
    capacity_bytes: float
    bandwidth_gb_s: float
    tflop_s: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    decode_gb_s: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    matvec_gb_s: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    decode_fixed_s: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    matvec_fixed_s: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    decode_curves: Mapping[str, Curve] = field(default_factory=lambda: NOTHING)
    matvec_curves: Mapping[str, Curve] = field(default_factory=lambda: NOTHING)
    sm_ghz: float | None = None

    def decode_s(self, form: str, nbytes: float) -> float:
        """Seconds that decoding a weight of so many dense bytes takes, of a format that has a rate or a curve."""
        if form in self.decode_curves:
            return self.decode_curves[form].at(nbytes)
        return self.decode_fixed_s.get(form, 0.0) + nbytes / GB / self.decode_gb_s[form]

    def matvec_s(self, form: str, nbytes: float) -> float:
        """Seconds that a product with a weight of so many stored bytes takes."""
        if form in self.matvec_curves:
            return self.matvec_curves[form].at(nbytes)
        return self.matvec_fixed_s.get(form, 0.0) + nbytes / GB / self.matvec_gb_s.get(form, self.bandwidth_gb_s)

    def attainable_tflop_s(self, intensity: float, dtype: str) -> float:
        """The roofline: rate in TFLOP/s of a kernel that does `intensity` operations per byte it moves.

        Raises `UserError` for a dtype that the profile gives no peak rate of.
        """
        if dtype not in self.tflop_s:
            raise unknown(f"dtype of {self.name}", dtype, self.tflop_s)
        return min(self.tflop_s[dtype], intensity * self.bandwidth_gb_s / 1e3)


@dataclass(frozen=True)
class Links:
    """Copies in one direction between two tiers: bandwidth, and the time that even the smallest request takes.

    A bandwidth is None where there is no such path or no number.
    """

    storage_to_dram_gb_s: float | None = None
    dram_to_device_gb_s: float | None = None
    storage_to_device_gb_s: float | None = None
    storage_to_dram_fixed_s: float = 0.0
    dram_to_device_fixed_s: float = 0.0
    storage_to_device_fixed_s: float = 0.0


@dataclass(frozen=True)
class NearData:
    """DIMMs that compute on their own contents (HERMES, section IV-A and table II). All numbers are per DIMM."""

    name: str
    dimms: int
    capacity_bytes: float
    bandwidth_gb_s: float
    tflop_s: float
    link_gb_s: float

    def gemv_s(
        self, nbytes: Float[np.ndarray, "*shape"] | float, products: Float[np.ndarray, "*shape"] | float
    ) -> Float[np.ndarray, "*shape"] | float:
        """Seconds of one DIMM's matrix-vector product: the longer of its bytes over the bandwidth and of its products.

        `products` are multiply-adds; a batch multiplies the products and not the bytes.
        """
        return np.maximum(np.divide(nbytes, self.bandwidth_gb_s * GB), np.divide(products, self.tflop_s * 1e12 / 2))

    def with_multipliers(self, multipliers: int) -> "NearData":
        """DIMMs with other GEMV units than those of `MULTIPLIERS`."""
        return replace(self, tflop_s=self.tflop_s * multipliers / MULTIPLIERS)

    def dimms_needed(self, nbytes: float) -> int:
        """The fewest DIMMs that hold so many bytes."""
        return max(1, -int(-nbytes // self.capacity_bytes))


@dataclass(frozen=True)
class Software:
    """The processor. `layer_s` is the time of a decoder layer beside transfers and the products of its linears, the
    same for every model; `mixture_layer_s` is the time of a layer of a mixture of experts alone; `layer_s_gb` is the
    part that grows with the layer, for each GB of its dense weights.

    On a GPU a product takes `launch_s`, and the longer of its bytes at the share `bandwidth_share` of the
    memory's bandwidth and of `word_cycles` cycles of one multiprocessor for each packed word. `manage_gb_s` is the
    bytes of neurons a second that are put in their place in memory.
    """

    name: str
    layer_s: float = 0.0
    mixture_layer_s: float = 0.0
    layer_s_gb: float = 0.0
    launch_s: float = 0.0
    bandwidth_share: float = 1.0
    word_cycles: float = 0.0
    manage_gb_s: float | None = None


@dataclass(frozen=True)
class Profile:
    """One machine. `sources` has the source of every number by its dotted name, `device.tflop_s.fp16` say.

    A part that a paper does not use is None. With `unified`, DRAM is the device's memory: nothing is copied. `tiers`
    are the memories that a weight passes, in this order.
    """

    id: str
    title: str
    paper: str | None
    storage: Storage | None = None
    dram: Memory | None = None
    device: Memory | None = None
    links: Links = Links()
    near_data: NearData | None = None
    software: Software | None = None
    unified: bool = False
    tiers: tuple[str, ...] = ("storage", "dram", "device")
    sources: Mapping[str, Source] = field(default_factory=lambda: NOTHING, repr=False)

    def rest_s(self, dense_bytes: float, mixture: bool = False) -> float:
        """The time of a decoder layer with so many bytes of dense weights, beside transfers and products."""
        if self.software is None:
            return 0.0
        fixed_s = self.software.layer_s + self.software.mixture_layer_s * mixture
        return fixed_s + self.software.layer_s_gb * dense_bytes / GB

    def value(self, name: str) -> float:
        """The number of that dotted name. Raises `UserError` for a name that the profile has no number of."""
        if name not in self.sources:
            raise unknown(f"number of {self.id}", name, self.sources)
        part, quantity, *dtype = name.split(".")
        value = getattr(getattr(self, part), quantity)
        return value[dtype[0]] if dtype else value

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Low and high end of every number whose source gives both, by dotted name."""
        found = {name: (source.low, source.high) for name, source in self.sources.items()}
        return {name: ends for name, ends in found.items() if None not in ends}

    def with_values(self, values: Mapping[str, float]) -> "Profile":
        """The same machine with other numbers, by dotted name. Raises what `value` does."""
        machine = self
        for name, value in values.items():
            self.value(name)
            part, quantity, *key = name.split(".")
            whole = getattr(machine, part)
            number = {**getattr(whole, quantity), key[0]: value} if key else value
            machine = replace(machine, **{part: replace(whole, **{quantity: number})})
        return machine

    def table(self) -> pd.DataFrame:
        """A row a number: profile, part, name, quantity (with its unit), value, low, high, basis, source, evidence."""
        return pd.DataFrame(
            {
                "profile": self.id,
                "part": name.split(".")[0],
                "name": getattr(getattr(self, name.split(".")[0]), "name", None),
                "quantity": name.split(".", 1)[1],
                "value": self.value(name),
                "low": source.low,
                "high": source.high,
                "basis": source.basis,
                "source": source.text,
                "evidence": EVIDENCE[source.basis],
            }
            for name, source in self.sources.items()
        )
