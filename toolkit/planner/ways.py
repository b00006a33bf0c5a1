"""The ways of running a model that a plan compares: format and treatment of the weights, and the commands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.offload.methods import LLAMA_CPP, PACKED, Method, find_method
from toolkit.planner.footprint import FileBytes
from toolkit.storage.experts import BITS
from toolkit.studies.forms import HEAD_TOO

WHOLE = "whole"  # a head that stays in memory, in 16 bits
BFLOAT16, INT8 = "bfloat16", "int8"
GGUF_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_K": 4.5, "Q3_K": 3.4375}  # a weight, scales included
EXPERT_BITS = tuple(bits or 16 for bits in BITS)
SPARSITIES = (0.5, 0.6, 0.7)
WITH_HEAD = 0.5  # the sparsity that is also planned with a packed head
ZEROS = (0.8, 0.9)  # shares of an FFN's outputs, of which prices are measured
STREAMED, NEURONS, EXPERTS, RIVAL = "layers", "neurons", "experts", "llama.cpp"  # what comes from disk, or who runs it


@dataclass(frozen=True)
class PlannedWay:
    """One way of running a model on a CPU.

    Args:
        name: for tables.
        kind: what comes from the disk: whole "layers", "neurons" or "experts"; or "llama.cpp", which maps its file.
        treatment: what is done to the weights, as `toolkit.planner.treatments` names it.
        method: as `toolkit.offload.methods.find_method` has it; of neurons and experts, that of everything else.
        dtype: of the values that are stored.
        sparsity: share of zeros, of weights; of neurons, of their outputs.
        bits: of an expert's weight, or of a weight of llama.cpp's file.
        head: as `pack --head` has it.
        pack, run: options of the commands; no `pack` where nothing is packed, or the toolkit only models the way.
        file: the bytes of a GGUF file that is run as it is.
    """

    name: str
    kind: str
    treatment: str
    method: str
    dtype: str = BFLOAT16
    sparsity: float = 0.0
    bits: float = 16.0
    head: str = WHOLE
    pack: str | None = None
    run: str = ""
    file: FileBytes | None = None

    @property
    def stored(self) -> Method:
        """The format that weights are stored in."""
        return find_method(self.method)

    @property
    def head_method(self) -> str:
        """The method of a packed head."""
        return f"{'spqr' if self.head == 'spqr' else 'dense'}{PACKED}"

    @property
    def runs_here(self) -> bool:
        """Whether the toolkit does it."""
        return self.pack is not None or (self.file is not None and self.kind != RIVAL)


def ways(experts: bool, zeros: Sequence[float] = ()) -> list[PlannedWay]:
    """Every way, for a mixture of experts or for any other model.

    Weights are multiplied as they are stored: on a CPU, to decode them first moves more bytes and was never faster.
    `zeros` are shares of FFN outputs that thresholds cut: each gives a way by neuron. A mixture has none.
    """
    if experts:
        return [*_of_experts(), *_rivals()]
    return [*_of_layers(), *map(_by_neuron, zeros), *_rivals()]


def _of_layers() -> Iterator[PlannedWay]:
    dense = "--method dense --format dense"
    yield PlannedWay("dense", STREAMED, "dense", f"dense{PACKED}", pack=dense)
    int8 = {"dtype": INT8, "bits": 8}
    plain = PlannedWay("int8", STREAMED, "int8", f"dense{PACKED}", pack=f"{dense} --int8", **int8)
    yield from _with_head(plain, "int8")
    for share in SPARSITIES:
        prune, name = f"--method sparsegpt --sparsity {share}", f"endor, {share:.0%} zeros".replace("%", " %")
        pruned = {"sparsity": share, "pack": prune}
        yield PlannedWay(name, STREAMED, f"sparsegpt {share:g}", f"endor{PACKED}", **pruned)
        pruned["pack"] += " --int8"
        both = PlannedWay(f"{name}, int8", STREAMED, f"sparsegpt {share:g} int8", f"endor{PACKED}", **pruned, **int8)
        yield from _with_head(both, "int8") if share == WITH_HEAD else (both,)
    two_four = {"sparsity": 0.5, "pack": "--method sparsegpt --pattern 2:4"}
    yield PlannedWay("endor, 2:4", STREAMED, "sparsegpt 2:4", f"endor{PACKED}", **two_four)
    spqr = PlannedWay("spqr, 3 bits", STREAMED, "spqr", f"spqr{PACKED}", bits=3, pack="--method spqr")
    yield from _with_head(spqr, "spqr")


def _with_head(way: PlannedWay, head: str) -> Iterator[PlannedWay]:
    """A way, and the same with a packed output head."""
    yield way
    names = {"name": f"{way.name}{HEAD_TOO}", "treatment": f"{way.treatment}{HEAD_TOO}"}
    yield replace(way, **names, head=head, pack=f"{way.pack} --head {head}")


def _by_neuron(zeros: float) -> PlannedWay:
    """Predictors copy gate and up projection in few bits. A model with thresholds of its own keeps these."""
    name, pack = f"neurons, {zeros:.0%} zeros".replace("%", " %"), f"--method neurons --sparsity {zeros:.2g}"
    return PlannedWay(name, NEURONS, f"few_bits {zeros:g}", f"dense{PACKED}", sparsity=zeros, pack=pack)


def _of_experts() -> Iterator[PlannedWay]:
    for bits in EXPERT_BITS:
        pack = f"--method experts --bits {bits}"
        yield PlannedWay(f"experts, {bits} bits", EXPERTS, f"experts {bits}", "dense", bits=bits, pack=pack)
    # no command packs such experts
    yield PlannedWay("experts, SpQR (only modelled)", EXPERTS, "spqr", f"spqr{PACKED}", bits=3)


def _rivals() -> Iterator[PlannedWay]:
    for name, kind in LLAMA_CPP.items():
        yield PlannedWay(name, RIVAL, f"gguf {kind}", "dense", bits=GGUF_BITS[kind])
