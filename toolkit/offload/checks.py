"""The checks of a store, its model and the options before a model is run."""

from collections.abc import Sequence

from toolkit.errors import UserError
from toolkit.policies.placement import LayerMap
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store


def check_weights(store: Store, layers: Sequence[Layer]) -> None:
    """Raise `UserError` for int8 matrices without scales: the integers alone are no weights."""
    for run in (run for layer in layers for run in layer.ops.values()):
        if not (run.scales_dtype or run.dtype).is_floating_point:
            raise UserError(
                f"{store.folder}: {run.label} is {run.dtype} without scales, which tells no weight; pack the model "
                f"with --int8, or its weights by `Scaled.encode`"
            )


def check_placement(placement: LayerMap, layers: int, on_gpu: bool) -> None:
    """Raise `UserError` unless the map places each of so many layers, and none on a GPU that does not compute."""
    if len(placement.tiers) != layers or (placement.device and not on_gpu):
        where = "on the device, in DRAM and" if on_gpu else "in DRAM and"
        raise UserError(f"{placement}: expected {layers} layers {where} in storage together")
