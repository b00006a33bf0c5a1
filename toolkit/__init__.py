"""Language models that do not fit into memory: prune, quantise, pack, run from disk, and plan.

    import toolkit as tk

    model, tokenizer = tk.load_model("smollm2-135m")
    tk.prune(model, "wanda", sparsity=0.5)
    tk.pack(model, "packed", tokenizer=tokenizer)
    with tk.open("packed", memory="400MB") as packed:
        print(packed.generate_text("The old house", tokens=32))

`docs/api.md` describes the names. Each is imported when it is first used, so this import takes no time.
"""

from importlib import import_module as _import_module
from os import environ as _environ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.api.change import prune, quantise
    from toolkit.api.opening import open
    from toolkit.api.packing import pack
    from toolkit.api.planning import machine, plan
    from toolkit.api.quality import perplexity
    from toolkit.formats import decode, encode
    from toolkit.models import load_model
    from toolkit.planner.bench import bench
    from toolkit.timeline import Timeline

__all__ = [
    "Timeline",
    "bench",
    "decode",
    "encode",
    "load_model",
    "machine",
    "open",
    "pack",
    "perplexity",
    "plan",
    "prune",
    "quantise",
]

_MODULES = {
    "Timeline": "timeline",
    "bench": "planner.bench",
    "decode": "formats",
    "encode": "formats",
    "load_model": "models",
    "machine": "api.planning",
    "open": "api.opening",
    "pack": "api.packing",
    "perplexity": "api.quality",
    "plan": "api.planning",
    "prune": "api.change",
    "quantise": "api.change",
}

# torch's threads wait for each other by spinning, which takes most of the speed away beside another busy process. So
# they sleep, unless the variable is set already. torch reads it once, when it is imported.
_environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> object:
    """A name of `__all__`, whose module is imported when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
