"""How a packed model is run: one frozen record that all parts of the runtime take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.models.experts import Experts
from toolkit.offload.expert_ffn import Router
from toolkit.offload.methods import Method, find_method, usual_method
from toolkit.offload.placement import LayerMap
from toolkit.offload.variant import FAVOURITE, NEURONS
from toolkit.offload.ways import POLICIES, Way
from toolkit.predictors import Predictor
from toolkit.residency.base import Residency
from toolkit.storage.readers import READERS

CONTEXT = 512  # tokens
WINDOW = 5  # tokens (LLM in a flash, section 3.1)


@dataclass(frozen=True)
class Demand:
    """How a folder of neurons or experts is read on demand: predictions, and the units that stay in memory.

    Args:
        predictors: of neurons, one for each layer; None takes those that were packed with the model, if any. A layer
            without one needs all its neurons for each token: it stays in memory whole, or is read whole each time.
        usage: of neurons on a GPU: for each layer, the share of tokens that each neuron is active for. The most used
            neurons stay in the GPU's memory and are computed there, as many as `device_bytes` allows beside the rest of
            the model. None takes the usage that was packed with the model.
        neurons: which neurons a token is computed with. "predicted": those that are predicted for it, so that results
            depend neither on memory limits nor on the tokens before. "held": all that memory holds then, also those
            that earlier tokens needed (LLM in a flash), which repair what a predictor misses as memory allows.
        window: how many tokens a neuron stays after its last use, if memory allows. 0 keeps nothing, neither neurons
            nor experts.
        residency: `residency(layer, units, rows)` makes the policy that keeps a layer's neurons or experts in so many
            rows of memory. None takes a window of `window` tokens for neurons, and the experts used last.
        look_ahead: while a layer computes, read the experts that the next one's router names for this layer's input.
        exact: read experts that were not predicted. If False, a token goes on with those that were, and its result
            differs.
        routing: `routing(layer, experts)` makes the object that chooses a layer's experts, such as
            `toolkit.offload.expert_ffn.RecordedRouter` for a twin. None takes the model's routers.

    Raises `UserError` for a negative window, or unknown `neurons`.
    """

    predictors: Sequence[Predictor | None] | None = None
    usage: Sequence[Float[Tensor, " neurons"]] | None = None
    neurons: str = NEURONS[0]
    window: int = WINDOW
    residency: Callable[[int, int, int], Residency] | None = None
    look_ahead: bool = True
    exact: bool = True
    routing: Callable[[int, Experts], Router] | None = None

    def __post_init__(self):
        """Refuse a window that cannot be, and unknown neurons."""
        if self.neurons not in NEURONS:
            raise unknown("neurons", self.neurons, NEURONS)
        if self.window < 0:
            raise UserError(f"window of {self.window} tokens: expected 0 or more")


@dataclass(frozen=True)
class Options:
    """How a packed model is run.

    Args:
        method: a name that `toolkit.offload.methods.find_method` knows: a format, made dense before each product, or
            one with `_packed` behind its name, multiplied as it is. The store must hold the variant of that format.
            None takes `endor`, else the first format by name, multiplied as it is on a CPU if it has a product of its
            own (`usual_method`); and it is what a folder of neurons needs.
        dram_bytes: hard budget of DRAM for all weights and buffers, but not for activations and the key-value cache;
            None takes nine tenths of what is free.
        memory_bytes: hard limit for all that the process takes on the CPU, as a memory cgroup counts it without pages
            of files: what it holds already, weights, buffers, activations, key-value cache of `context` tokens.
            With `dram_bytes`, both limits hold.
        memory_from: bytes of the process from which `memory_bytes` counts; 0 counts all that it holds.
        context: tokens of prompt and text for which `memory_bytes` leaves room, all of which may be the prompt's.
        placement: how many layers stay on the device and in DRAM; None fills the device with the first layers, and
            DRAM with layers spread among those on disk, as far as budgets allow.
        policy: "pipelined" brings the next layer while one is used; "sequential" does one thing at a time.
        reader: a key of `toolkit.storage.readers.READERS`; "kvikio" reads straight into a GPU's memory. None takes
            the quickest of this system (`open_reader`).
        verify: read the whole store first, compare checksums and check that packed weights agree with themselves. They
            are not checked again later: pass False only for a store that was verified before, since the results of a
            damaged one are wrong. No store makes a kernel touch memory outside of its tensors, verified or not.
        device: "cpu", or a GPU as torch calls it: "cuda", "cuda:1".
        device_bytes: hard budget of a GPU's memory, as `dram_bytes`. The bytes asked for are counted; torch rounds each
            piece up to some MB.
        demand: of a folder of neurons or experts; None takes a `Demand` as it stands.

    Raises `UserError` for an unknown name, a budget that is no number of bytes or of a device that has none, or a
    reader into a GPU's memory where the CPU must see the weights.
    """

    method: str | None = None
    dram_bytes: int | None = None
    memory_bytes: int | None = None
    memory_from: int = 0
    context: int = CONTEXT
    placement: LayerMap | None = None
    policy: str = "pipelined"
    reader: str | None = None
    verify: bool = True
    device: str = "cpu"
    device_bytes: int | None = None
    demand: Demand | None = None

    def __post_init__(self):
        """Refuse options that are unknown or contradict each other."""
        if self.method is not None:
            find_method(self.method)
        for name, known in {"policy": POLICIES, "reader": {None: None, **READERS}}.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), filter(None, known))
        for name in ("dram_bytes", "memory_bytes", "device_bytes"):
            limit = getattr(self, name)
            number = isinstance(limit, Real) and not isinstance(limit, bool)
            if limit is not None and not (number and 0 <= limit < float("inf")):
                raise UserError(f"{name}={limit!r}: expected a number of bytes from 0, such as 500_000_000, or None")
        if self.device_bytes is not None and not self.on_gpu:
            raise UserError(
                f"device_bytes={self.device_bytes}: a CPU has no memory but DRAM: set dram_bytes, or device='cuda'"
            )
        if self.direct and (self.stored.decoded_in == "dram" or not self.on_gpu):
            why = "this method unpacks on the CPU" if self.on_gpu else "this model computes on the CPU"
            raise UserError(f"reader {self.reader!r} reads into a GPU's memory, and {why}: leave it out")

    @property
    def stored(self) -> Method:
        """The format that weights are stored in, and where they are decoded."""
        return find_method(self.method or usual_method(FAVOURITE, self.on_gpu))

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device != "cpu"

    @property
    def direct(self) -> bool:
        """Whether the reader reads into a GPU's memory, past DRAM."""
        return self.reader is not None and READERS[self.reader].into == "device"

    @property
    def way(self) -> Way:
        """The same way of running as the cost model and the measurements name it. Its device is "gpu" or "cpu"."""
        path, device = "direct" if self.direct else "host", "gpu" if self.on_gpu else "cpu"
        return Way(self.method or usual_method(FAVOURITE, self.on_gpu), path, self.policy, device)
