"""The choices of parameters that are a part of what a registry has, for `notebooks/parameters.yaml`.

Registries, and torch with them, are imported when a choice is looked up.
"""


def operations() -> list[str]:
    """The linears of a decoder block of any shape-only twin."""
    from toolkit.models.shapes import SHAPES

    return list(dict.fromkeys(op for shapes in SHAPES.values() for op in shapes))


def llama_twins() -> list[str]:
    """The twins with a Llama's shapes: llama.cpp runs no others of ours."""
    from toolkit.models.shapes import SHAPES

    return [name for name, shapes in SHAPES.items() if "gate_proj" in shapes]


def probed_threads() -> tuple[int, ...]:
    """The numbers of threads by which the probe reads a disk."""
    from toolkit.machines.probe import ProbeSettings

    return ProbeSettings().threads


def mixtures() -> list[str]:
    """llama.cpp's mixtures of types that need no importance matrix."""
    from toolkit.studies.mixtures import MIXTURES, ONLY_WEIGHTED

    return [name for name in MIXTURES if name not in ONLY_WEIGHTED]


def weighted_mixtures() -> list[str]:
    """llama.cpp's mixtures of types that an importance matrix changes."""
    from toolkit.studies.forms import WEIGHTED

    return list(WEIGHTED.values())


def llama_cpp_ways() -> list[str]:
    """llama.cpp by the type of the weights in its file, as races name it."""
    from toolkit.interchange.gguf import QUANTIZATIONS

    return [f"llama.cpp {name}" for name in QUANTIZATIONS]
