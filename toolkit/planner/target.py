"""The model that a plan is for: its sizes, without its weights.

target = open_target("mixtral-8x7b")
target.nbytes     # 93.4e9
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from toolkit import hub, tensor_files
from toolkit.errors import UserError, did_you_mean
from toolkit.files import path_of
from toolkit.models import MODELS, skeleton
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.models.cutting import ENTRY
from toolkit.models.loading import read_config
from toolkit.models.named import ADAPTERS, gguf_file, parts_of
from toolkit.models.shape_of import shape_of
from toolkit.models.weight_map import stored_shapes
from toolkit.offload.variant import check_not_packed
from toolkit.planner.files import ways_of_file
from toolkit.planner.ways import ZEROS, PlannedWay, ways
from toolkit.records import line

PUBLISHED_BYTES = 2  # of a weight: nearly every model is published in bf16 or fp16
OTHERS = (
    f"choose a shape ({', '.join(ARCHITECTURES)}), an embedded model ({', '.join(MODELS)}), a folder with a "
    "config.json, a .gguf file or an id on the hub"
)


@dataclass(frozen=True)
class Target:
    """A model: its name, its sizes, and what is known of it beside them.

    `dtype_bytes` are those of a weight as `load_model` gives it. `loadable`: `load_model(name)` gives its weights. A
    sparse model has thresholds of its own, and `zeros` is the share of its FFN outputs that they cut. `file` is the
    GGUF file that is the model as it is.
    """

    name: str
    shape: ModelShape
    dtype_bytes: float
    loadable: bool
    own_thresholds: bool = False
    zeros: float | None = None
    file: Path | None = None

    @property
    def cut(self) -> tuple[float, ...]:
        """The shares of FFN outputs that ways by neuron set to zero: its own, if it has thresholds."""
        if self.own_thresholds:
            return () if self.zeros is None else (self.zeros,)
        return ZEROS if self.shape.ffn and not self.shape.experts else ()

    @property
    def ways(self) -> list[PlannedWay]:
        """The ways of running it on a CPU, those that do not fit included."""
        of_file = ways_of_file(self.file, self.shape) if self.file else ()
        return [*ways(bool(self.shape.experts), self.cut), *of_file]

    @property
    def nbytes(self) -> float:
        """Bytes of all weights before any packing."""
        return self.shape.nbytes(self.dtype_bytes)


def open_target(text: str) -> Target:
    """The model of a name, without its weights.

    Args:
        text: a name of `ARCHITECTURES`, which is a shape alone; a name of `toolkit.models.MODELS`; a folder in Hugging
            Face's layout; a .gguf file; or an id on the hub.

    An embedded model is downloaded if it is not there yet. Raises `UserError` for an unknown name, for a folder or file
    that cannot be read, and for a model whose blocks differ.
    """
    if not text:
        raise UserError(f"the model has no name; {OTHERS}")
    if text in ARCHITECTURES:
        return Target(text, ARCHITECTURES[text], PUBLISHED_BYTES, False)
    if text in MODELS:
        return _registered(text)
    if (file := gguf_file(text)) is not None:
        return _gguf(text, file)
    return _configured(text, path_of(text))


def _registered(name: str) -> Target:
    """The shape is that of the GGUF file, changed by the file that makes another model of it."""
    from toolkit.models.gguf_header import read_header
    from toolkit.models.gguf_shape import gguf_shape

    gguf, file = gguf_file(name), parts_of(name)
    shape = gguf_shape(read_header(gguf))
    target = Target(name, shape, PUBLISHED_BYTES, True)
    if file is None:
        return replace(target, file=gguf)
    if file.name == ADAPTERS:
        quality = pd.read_csv(file.with_name("quality.csv"), index_col="version")
        return replace(target, own_thresholds=True, zeros=float(quality.loc["recovered", "zeros"]))
    return replace(target, shape=_mixture(shape, file))


def _mixture(dense: ModelShape, file: Path) -> ModelShape:
    """The mixture that a file makes of a dense model."""
    from toolkit.models import upcycled

    about, tensors = tensor_files.load(file, upcycled.KIND)
    experts, per_token = tensors["router"].shape[1], int(about[upcycled.PER_TOKEN])
    return replace(dense, experts=experts, experts_per_token=per_token)


def _gguf(text: str, file: Path) -> Target:
    from toolkit.models.gguf_header import LAYERS, read_header
    from toolkit.models.gguf_shape import gguf_shape

    header = read_header(file)
    matrices = [tensor for name, tensor in header.tensors.items() if name.startswith(LAYERS) and len(tensor.shape) > 1]
    nbytes = 4 if {tensor.kind for tensor in matrices} == {"F32"} else PUBLISHED_BYTES
    return Target(text, gguf_shape(header), nbytes, True, file=file)


def _configured(text: str, folder: Path) -> Target:
    """A model with a config.json, in a folder or on the hub."""
    local = folder.is_dir()
    if local:
        check_not_packed(folder)
    config, shapes = skeleton.read_config(folder, stored_shapes(folder)) if local else _hub_config(text), []
    try:
        skeleton.check_outline(config, lambda outline: shapes.append(shape_of(outline)))
    except Exception as error:  # whatever fails in a foreign file
        told = error if isinstance(error, UserError) else f"its sizes make no model ({line(error)})"
        raise UserError(f"{text}: model type {config.model_type!r:.99}: {told}; {OTHERS}") from error
    nbytes = getattr(getattr(config, "dtype", None), "itemsize", PUBLISHED_BYTES)
    loadable = getattr(config, "quantization_config", None) is None and (not local or any(folder.glob("*.safetensors")))
    return Target(text, shapes[0], nbytes, loadable, getattr(config, ENTRY, None) is not None)


def _hub_config(text: str):
    """The configuration on the hub, or in its cache."""
    try:
        return read_config(text)
    except UserError as error:
        meant = did_you_mean(text.rpartition("/")[2].lower(), [*ARCHITECTURES, *MODELS])
        why = "" if hub.reachable() else "; the Hugging Face hub cannot be reached"
        raise UserError(f"unknown model {text!r:.99}{meant}{why}; {OTHERS}") from error
