"""A model of transformers that a command opens: a packed folder, or a GGUF file that the decoder does not take.

torch takes seconds to import, so it is imported when one is needed.
"""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, unknown
from toolkit.memory_limits import bytes_of
from toolkit.offload.overhead import Overhead, TextRoom, most_bytes

if TYPE_CHECKING:
    from toolkit.offload.cached_model import CachedModel
    from toolkit.offload.model import OffloadedModel

SHORT = 32  # tokens of a prompt that is surely multiplied with the packed form


class Folder:
    """See `toolkit.commands.opening.ModelSource`. `draft` is the model that drafts for it, once it is open, or None."""

    def __init__(self, options: Namespace, kind: str, stack: ExitStack):
        from toolkit.interchange.reading import load_tokenizer
        from toolkit.storage.gguf_store import open_store

        place, self._options, self._stack = options.folder, options, stack
        self.draft: "OffloadedModel | None" = None
        self._method = method_of(kind, options.weights, options.device)
        self._kind = self._method or kind
        self.tokenizer: Any = load_tokenizer(place if place.is_file() else place / "model")
        self._stores = [open_store(folder) for folder in (place, options.draft) if folder]
        self._config = self._stores[0].config()

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return self._config.get_text_config().vocab_size

    @property
    def positions(self) -> int | None:
        """How many tokens the model knows positions for, if its configuration says so."""
        return getattr(self._config.get_text_config(decoder=True), "max_position_embeddings", None)

    @cached_property
    def most_bytes(self) -> int:
        """A bound of what weights and buffers can take, with the draft's."""
        return sum(map(most_bytes, self._stores))

    def kernels(self, room: TextRoom) -> str:
        """A name for the compiled functions that a text of this room needs."""
        return f"{self._kind}-{self._options.dram}-{room.passed > SHORT}"

    def overhead(self, room: TextRoom, compiles: bool) -> Overhead:
        """The memory that comes beside weights and buffers; `compiles`: no compiled functions are kept."""
        return Overhead.of_store(self._stores[0], room, compiles)

    def open(self, dram_bytes: int | None, room: TextRoom) -> "OffloadedModel":
        """The model, beside its draft if there is one."""
        from toolkit.offload.model import OffloadedModel

        options = self._options
        settings = {name: getattr(options, name) for name in ("policy", "verify", "device", "reader")}
        settings["demand"] = demand_of(options.residency, options.neurons)
        limits = {"dram_bytes": dram_bytes, "device_bytes": bytes_of("--device-memory", options.device_memory)}
        if options.draft:
            self.draft, limits = self._stack.enter_context(_opened_draft(options, limits)), {}
        return OffloadedModel.open(options.folder, self._method, beside=self.draft, **limits, **settings)

    def text_model(self, model: "OffloadedModel") -> "CachedModel":
        """The opened model as a `TextModel`."""
        from toolkit.offload.cached_model import CachedModel

        return CachedModel(model)

    def settings_of(self, model: "OffloadedModel") -> tuple[Any, Any]:
        """The settings that name the tokens that end a text, as `eos_token_id`."""
        return model.model.generation_config, model.model.config


def demand_of(residency: str | None, neurons: str | None):
    """How units are read on demand; None if neither is chosen.

    Raises `UserError` for a policy that needs to know what comes.
    """
    from toolkit.offload.options import Demand
    from toolkit.residency.policies import online, residency_of

    chosen = {"neurons": neurons} if neurons else {}
    if residency is None:
        return Demand(**chosen) if chosen else None
    if residency not in online():
        raise unknown("residency policy", residency, online())
    return Demand(residency=lambda layer, units, rows: residency_of(residency, units, rows), **chosen)


def _opened_draft(options: Namespace, budgets: Mapping[str, int | None]):
    """The draft. Raises `UserError` unless it is whole in memory: reads would cost as much as it saves."""
    from toolkit.offload.model import OffloadedModel
    from toolkit.offload.variant import variant_to_run

    method = method_of(variant_to_run(options.draft), None, options.device)
    draft = OffloadedModel.open(options.draft, method, verify=options.verify, device=options.device, **budgets)
    if draft.placement and draft.placement.storage:
        draft.close()
        raise UserError(
            f"--draft {options.draft}: {draft.placement.storage} of its layers do not fit into --dram {options.dram}: "
            "expected memory for all of it; raise --dram or leave --draft out"
        )
    return draft


def method_of(form: str, weights: str | None, device: str) -> str | None:
    """The name that `toolkit.offload.methods` has for it; None for neurons and experts, which are run in one way.

    Raises `UserError` for a format without a product.
    """
    from toolkit.offload.methods import PACKED, known_methods, usual_method
    from toolkit.offload.model import STRATEGIES

    if form in STRATEGIES:
        return None
    if weights is None:
        return usual_method(form, device != "cpu")
    if weights == "decoded":
        return form
    with_product = [name.removesuffix(PACKED) for name in known_methods() if name.endswith(PACKED)]
    if form not in with_product:
        raise UserError(
            f"--weights packed: {form} has no product of its own, only {', '.join(with_product)}; leave --weights out"
        )
    return f"{form}{PACKED}"
