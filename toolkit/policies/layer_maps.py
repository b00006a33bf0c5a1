"""Maps of a measured model: which of its layers are in memory, by name."""

from toolkit.errors import UserError, unknown
from toolkit.policies.methods import RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES, Way

IN_MEMORY = 13 / 64  # of OPT-66B's layers, on GPU and CPU (ENDOR, section 3.3)


def layer_maps(layers: int, dense_bytes: int, packed_bytes: int) -> dict[str, LayerMap]:
    """Where layers live under each mapping, for layers of these bytes.

    OPT-66B has 13 of 64 layers on GPU and CPU (ENDOR, section 3.3). Our measurements compute on the CPU, so DRAM is
    the nearest tier and takes that share. `refilled` is what fits into the bytes of these once they are packed.
    """
    near = round(layers * IN_MEMORY)
    published = LayerMap(0, near, layers - near)
    return {
        "storage": LayerMap(0, 0, layers),
        "dram": LayerMap(0, layers, 0),
        "published": published,
        "refilled": published.refilled(dense_bytes, packed_bytes),
    }


def place_layers(way: Way, mapping: str, layers: int, dense_bytes: int = 1, packed_bytes: int = 1) -> LayerMap:
    """Where the layers of a way live, for layers of these bytes.

    Raises `UserError` for an unknown mapping, or if buffers keep all layers in storage: a second token would find them
    there and read nothing.
    """
    maps = layer_maps(layers, dense_bytes, packed_bytes)
    if mapping not in maps:
        raise unknown("mapping", mapping, maps)
    where = maps[mapping]
    slots = 0 if way.method in RIVALS else POLICIES[way.policy].slots
    if 0 < where.storage <= slots:
        raise UserError(
            f"{way.method}, {way.policy}, {mapping}: layers in storage: {where.storage} of {layers}; its buffers "
            f"keep {slots}, so that a second token reads nothing: expected none or more than {slots}; take more layers"
        )
    return where
