"""Which CPU backends of a family this machine can run; a backend has `features`, by LLVM's names."""

from collections.abc import Mapping

from toolkit.errors import UserError, unknown
from toolkit.kernels.common.simd import host_has


def runnable(backends: Mapping) -> list[str]:
    """The backends that this CPU can run, in their order."""
    return [name for name, backend in backends.items() if all(map(host_has, backend.features))]


def check_runnable(name: str, backends: Mapping) -> None:
    """Raise `UserError` that names the missing features unless this CPU can run the backend."""
    if not all(map(host_has, backends[name].features)):
        found = runnable(backends)
        missing = ", ".join(sorted(feature for feature in backends[name].features if not host_has(feature)))
        raise UserError(f"backend {name!r} needs a CPU with {missing}; this one can run: {', '.join(found)}")


def choose(name: str, backends: Mapping):
    """The backend of this name, or the first that this CPU can run for "auto".

    Raises `UserError` for a name that is unknown or that this CPU cannot run.
    """
    if name == "auto":
        return backends[runnable(backends)[0]]
    if name not in backends:
        raise unknown("backend", name, ["auto", *backends])
    check_runnable(name, backends)
    return backends[name]
