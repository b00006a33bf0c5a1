"""Language models that do not fit into memory: prune, quantise, pack, run from disk, and plan.

    import toolkit as tk

    model, tokenizer = tk.load_model("smollm2-135m")
    tk.prune(model, "wanda", sparsity=0.5)
    tk.pack(model, "packed", tokenizer=tokenizer)
    with tk.open("packed", memory="400MB") as packed:
        print(packed.generate_text("The old house", tokens=32))

`docs/api.md` describes the names. Behind them are the rooms of the toolkit, as `tk.residency` or `tk.measure`, each a
namespace of its own. A name is imported when it is first used, so this import takes no time.
"""

from os import environ as _environ
from typing import TYPE_CHECKING

from toolkit.lazy import lazy as _lazy

# torch's threads wait for each other by spinning, which takes most of the speed away beside another busy process. So
# they sleep, unless the variable is set already. torch reads it once, when it is imported.
_environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from toolkit import (
        evidence,
        formats,
        interchange,
        machines,
        measure,
        models,
        offload,
        papers,
        planner,
        predictors,
        quality,
        quantization,
        residency,
        sparsity,
        storage,
        studies,
    )
    from toolkit.api.change import prune, quantise
    from toolkit.api.opening import open
    from toolkit.api.packing import pack
    from toolkit.api.planning import machine, plan
    from toolkit.api.quality import perplexity
    from toolkit.formats import decode, encode
    from toolkit.models import load_model
    from toolkit.planner.bench import bench
    from toolkit.timeline import Timeline
else:
    __getattr__, __dir__ = _lazy(__name__)

__all__ = [
    "Timeline",
    "bench",
    "decode",
    "encode",
    "evidence",
    "formats",
    "interchange",
    "load_model",
    "machine",
    "machines",
    "measure",
    "models",
    "offload",
    "open",
    "pack",
    "papers",
    "perplexity",
    "plan",
    "planner",
    "predictors",
    "prune",
    "quality",
    "quantise",
    "quantization",
    "residency",
    "sparsity",
    "storage",
    "studies",
]
