"""Ways of running: how weights are stored, by which path they come, and how the steps of a pass follow each other."""

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.errors import UserError, unknown
from toolkit.offload.methods import METHODS, RIVALS, Method, find_method

PATHS = ("host", "direct")  # storage → DRAM → device, or storage → device
DEVICES = {"gpu": "device", "cpu": "dram"}  # the tier whose processor computes


@dataclass(frozen=True)
class Policy:
    """How the steps of a pass follow each other.

    `slots`: buffers that layers pass through. `overlaps`: whether links and processors work beside each other.
    """

    slots: int
    overlaps: bool


POLICIES = {"sequential": Policy(slots=1, overlaps=False), "pipelined": Policy(slots=2, overlaps=True)}


@dataclass(frozen=True)
class Way:
    """One way of running a model: method, path, policy and the device that computes.

    The runtime, the cost model and the measurements all take this record. `sequential`: each step starts when the one
    before it has ended. `pipelined`: reads, copies and each processor work beside each other, each on one weight at a
    time, in order. Raises `UserError` for an unknown name, or a direct path past the CPU that should decode.
    """

    method: str = "endor"
    path: str = "host"
    policy: str = "sequential"
    device: str = "gpu"

    def __post_init__(self):
        """Refuse impossible combinations."""
        for name, known in {"path": PATHS, "policy": POLICIES, "device": DEVICES}.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        stored = self.stored
        if self.path == "direct" and (self.device == "cpu" or stored.decoded_in == "dram"):
            raise UserError(
                f"path 'direct' with method {self.method!r} on {self.device!r}: the CPU never sees the weight"
            )

    @property
    def stored(self) -> Method:
        """The format that weights are stored in, and where they are decoded."""
        return RIVALS[self.method] if self.method in RIVALS else find_method(self.method)


Placed = tuple[Way, str]  # a way, and where its layers are: the name of a tier, or of a map of layers


def all_ways(
    policies: Iterable[str] = ("sequential",),
    device: str = "gpu",
    methods: Iterable[str] = tuple(METHODS),
    paths: Iterable[str] = PATHS,
) -> list[Way]:
    """Every way that combines the named methods, paths and policies, as far as it exists on the device.

    Without a GPU there is no direct path, and `endor_cpu` is left out, since it is `endor` there. Raises `UserError`
    for an unknown method.
    """
    rated = {method.format for method in METHODS.values()}  # the cost model knows no rates of others
    for name in methods:
        if find_method(name).format not in rated:
            raise unknown("method", name, METHODS)
    routes = [(name, path) for name in methods for path in _paths(find_method(name), device) if path in paths]
    if device == "cpu":
        routes = [route for route in routes if route != ("endor_cpu", "host")]
    return [Way(*route, policy, device) for policy in policies for route in routes]


def _paths(method: Method, device: str) -> tuple[str, ...]:
    return ("host",) if device == "cpu" or method.decoded_in == "dram" else PATHS
