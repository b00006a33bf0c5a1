"""A packed folder is opened again, and its logits are compared with those of the model that was packed.

    error = check_logits(folder, model)   # 0.004: in standard deviations of the logits

This finds faults that no other check looks for: an FFN with hidden parts, a buffer that is computed differently, a
linear with unusual arithmetic. Every path that `run` can take goes through both models, in this order: a prompt whose
tokens are spread over many positions, a few tokens, which other kernels multiply, and single tokens, which have code of
their own (`toolkit.offload.single_token`); each with the weights decoded and, where the format has a product, packed.
In the prompt's pass both models' blocks get the same inputs, so that a fault shows in the block that has it.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError
from toolkit.interchange.reading import load_dense_model
from toolkit.models import decoder_blocks
from toolkit.models.cached_pass import CACHE
from toolkit.models.cutting import ENTRY, attached, hook_thresholds, thresholds_of
from toolkit.models.experts import mixtures_by_layer
from toolkit.models.head import HEAD
from toolkit.models.on_demand import is_on_demand, present
from toolkit.models.plain import RoutedExperts
from toolkit.offload.linear import MOST_VECTORS
from toolkit.offload.methods import PACKED, known_methods
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.offload.stored import stored_model
from toolkit.quantization.smoothquant import round_to_int8
from toolkit.storage import experts, index, neuron_packing
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store

# tokens of a prompt, too long to be multiplied packed; of a few at once, which other kernels serve; single ones
PROMPT, FEW, SINGLE = MOST_VECTORS + 1, (5, 2), 3
REST = sum(FEW) + SINGLE
CACHES = (CACHE, "cache_params")  # of attention, and of a state-space model
FARTHEST = 600  # position of the last one
# In standard deviations of the logits. Weights that are made dense as they were give the same bits where the same
# library multiplies them: the worst token counts. Otherwise it is the median one, since the router of a mixture may
# choose another expert for a token or two.
EXACT = {torch.float32: 1e-5, torch.float16: 0.0005, torch.bfloat16: 0.003}
ROUNDED = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
OWN, MOST = 3, 0.5  # times the model's own rounding, where thresholds turn it into neurons that come and go; at most

TINY = 1e-30  # a hidden state may be zero

Logits = Float32[Tensor, "tokens vocabulary"]


def check_stored(folder: Path, dram_bytes: int | None = None) -> float:
    """The same for a folder whose model may not fit into memory: its own values are decoded, block by block.

    transformers' modules multiply them. The opened folder has a budget of `dram_bytes`; decoded blocks stay in memory
    as far as it leaves room. Raises what `check_logits` raises.
    """
    store = Store.open(folder)
    model = stored_model(store, store.variants[0])
    blocks = decoder_blocks(model)
    with ExitStack() as stack:
        if dram_bytes is not None:
            spare = dram_bytes - store.rest_bytes - max(map(store.nbytes, store.variants))
            size = max(sum(tensor.nbytes for tensor in block.state_dict().values()) for block in blocks)
            for block in blocks[: max(spare // size, 0)]:
                stack.enter_context(present(block))
        return check_logits(folder, model, dram_bytes)


@torch.no_grad()
def check_logits(folder: Path, model: nn.Module, dram_bytes: int | None = None) -> float:
    """Compare a folder, in every variant, with the model that it was packed from; return the largest error.

    The error of a token is the root mean square over the vocabulary, in standard deviations of the model's logits.
    Packing changes experts of few bits and int8 weights. So the packed values first replace the weights in `model`.

    Raises `UserError` for an error beyond rounding, and what `OffloadedModel.open` raises.
    """
    text = _Text.of(model)
    if not (folder / index.FILE).is_file():  # a checkpoint, which is loaded whole
        expected = _finite(text.prompt(model)[0])
        found = text.prompt(load_dense_model(folder))[0]
        return _judge("prompt", (found - expected) / expected.std(), exact=True, dtype=model.dtype)
    store = Store.open(folder)
    return max(_check(store, variant, model, text, dram_bytes) for variant in store.variants)


@dataclass(frozen=True, eq=False)
class _Text:
    """Random tokens and their positions: of a prompt and of what follows it."""

    tokens: Int64[Tensor, "1 tokens"]
    positions: Int64[Tensor, "1 tokens"] | None
    """None if the model takes none."""

    @classmethod
    def of(cls, model: nn.Module) -> "_Text":
        config = model.config.get_text_config()
        tokens = torch.randint(config.vocab_size, (1, PROMPT + REST), generator=torch.Generator().manual_seed(0))
        limit = getattr(config, "max_position_embeddings", None) or 0  # some say -1: none
        last = min(FARTHEST, limit - 1) if limit > 0 else FARTHEST
        spread = torch.linspace(0, last - REST, PROMPT).long()
        positions = torch.cat([spread, torch.arange(last - REST + 1, last + 1)])[None]
        takes = "position_ids" in inspect.signature(model.forward).parameters
        return cls(tokens, positions if takes else None)

    def prompt(self, model: nn.Module) -> tuple[Logits, Mapping[str, object]]:
        """The logits of the prompt, and the argument that is the cache after it."""
        # without a mask, gaps between positions would separate texts
        mask = torch.ones(1, PROMPT, dtype=torch.int64)
        output = model(self.tokens[:, :PROMPT], attention_mask=mask, use_cache=True, **self._places(0, PROMPT))
        return output.logits[0].float(), {name: value for name, value in output.items() if name in CACHES}

    def rest(self, model: nn.Module, cache: Mapping[str, object]) -> tuple[Logits, Logits]:
        """The logits of the few tokens at once and of the single ones, after what `cache` holds."""
        cache, ends = copy.deepcopy(cache), [*accumulate((*FEW, *[1] * SINGLE), initial=PROMPT)]
        logits = [self._after(model, cache, first, end) for first, end in pairwise(ends)]
        return torch.cat(logits[: len(FEW)]), torch.cat(logits[len(FEW) :])

    def rounding(self, model: nn.Module, cache: Mapping[str, object], logits: Logits) -> Logits:
        """How far the logits of the last tokens move if each block's output is rounded once more."""
        generator = torch.Generator().manual_seed(0)

        def round_again(module: nn.Module, inputs: object, output: object) -> object:
            several = isinstance(output, tuple | list)
            hidden = output[0] if several else output
            noise = torch.rand(hidden.shape, generator=generator) - 0.5
            hidden = (hidden.float() * (1 + torch.finfo(hidden.dtype).eps * noise)).to(hidden.dtype)
            return (hidden, *output[1:]) if several else hidden

        with attached([block.register_forward_hook(round_again) for block in decoder_blocks(model)]):
            return torch.cat(self.rest(model, cache)) - logits

    def _after(self, model: nn.Module, cache: Mapping[str, object], first: int, end: int) -> Logits:
        tokens = self.tokens[:, first:end]
        return model(tokens, **cache, use_cache=True, **self._places(first, end)).logits[0].float()

    def _places(self, first: int, end: int) -> dict[str, Tensor]:
        return {} if self.positions is None else {"position_ids": self.positions[:, first:end]}


def _check(store: Store, variant: str, model: nn.Module, text: _Text, dram_bytes: int | None) -> float:
    """The largest error of a variant, in all ways that its weights can be used."""
    if variant not in known_methods():  # read on demand, and multiplied as they are
        return _check_opened(store, variant, model, text, None, dram_bytes)
    methods = [method for method in (variant, f"{variant}{PACKED}") if method in known_methods()]
    return max(_check_opened(store, variant, model, text, method, dram_bytes) for method in methods)


def _check_opened(
    store: Store, variant: str, model: nn.Module, text: _Text, method: str | None, dram_bytes: int | None
) -> float:
    options: dict[str, object] = {"dram_bytes": dram_bytes} | ({} if method is None else {"method": method})
    if variant == neuron_packing.LAYOUT:
        # predictors that miss neurons are no fault
        options["demand"] = Demand(predictors=[None] * len(decoder_blocks(model)))
    packed = method is not None and method.endswith(PACKED)
    mixture = any(isinstance(module, RoutedExperts) for module in model.modules())  # an expert may get a few tokens
    same = method is not None and not any(run.extras for run in store.index.ops if run.variant == variant)
    with OffloadedModel.open(store.folder, verify=False, **options) as opened, _as_packed(opened, model):
        with hub.foreign_code(type(model).__name__, "its own code fails"):
            with _watched(model) as own_blocks:
                expected, cache = text.prompt(model)
            few, singles = text.rest(model, cache)
        spread = _finite(torch.cat([expected, few, singles])).std()
        own = (
            0.0 if same else OWN * _error(text.rounding(model, cache, torch.cat([few, singles])) / spread, exact=False)
        )
        with _watched(opened.model, own_blocks) as blocks:
            found, cache = text.prompt(opened.model)
        found_few, found_singles = text.rest(opened.model, cache)
        how, exact = method or variant, same and not (packed and mixture)
        for number, (its, ours) in enumerate(zip(own_blocks, blocks, strict=True)):
            for which, expected_states, states in zip(("input", "output"), its, ours, strict=True):
                size = expected_states.square().mean(-1, keepdim=True).sqrt().clamp(min=TINY)
                differences = ((states - expected_states) / size).flatten(0, -2)
                _judge(f"{how}, {which} of block {number}", differences, exact, model.dtype)
        return max(
            _judge(f"{how}, prompt", (found - expected) / spread, exact, model.dtype, own),
            _judge(f"{how}, few tokens", (found_few - few) / spread, same and not packed, model.dtype, own),
            _judge(f"{how}, single tokens", (found_singles - singles) / spread, same and not packed, model.dtype, own),
        )


States = Float32[Tensor, "*batch hidden"]  # hidden states


@contextmanager
def _watched(
    model: nn.Module, given: list[tuple[States, States]] | None = None
) -> Iterator[list[tuple[States, States]]]:
    """Inside the block, the input and the output of each decoder block that runs, in order.

    A block runs on the input that is `given` for it, if any, in place of its own.
    """
    seen: list[tuple[States, States]] = []
    own: list[States] = []

    def enter(_: nn.Module, args: tuple) -> tuple:
        own.append(args[0].float())
        return args if given is None else (given[len(own) - 1][0].to(args[0].dtype), *args[1:])

    def leave(_: nn.Module, __: tuple, output: object) -> None:
        seen.append((own[-1], (output[0] if isinstance(output, tuple | list) else output).float()))

    blocks = decoder_blocks(model)
    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    with attached([*handles, *(block.register_forward_hook(leave) for block in blocks)]):
        yield seen


def _finite(logits: Logits) -> Logits:
    """The same. Raises `UserError` if the model itself has logits that are no numbers, which nothing can be compared
    with."""
    if not bool(logits.isfinite().all()):
        raise UserError(
            "the model itself gives logits that are NaN or infinite, before it is packed: its weights are damaged, or "
            "its numbers overflow their type; try --dtype bfloat16 or float32"
        )
    return logits


def _error(differences: Logits, exact: bool) -> float:
    """The error of a text, whose differences are in standard deviations: of the worst token, or of the median one."""
    errors = differences.square().mean(-1).sqrt()
    return float(errors.max() if exact else errors.median())


def _judge(what: str, differences: Logits, exact: bool, dtype: torch.dtype, own: float = 0.0) -> float:
    """The error of a text. Raises `UserError` if it is too large. `own` is what the model's own rounding explains."""
    error, limit = _error(differences, exact), EXACT[dtype] if exact else max(ROUNDED[dtype], min(own, MOST))
    if not error <= limit:
        raise UserError(
            f"the packed model ({what}) has other logits than the model: off by {error:.2g} of their standard "
            f"deviation, where rounding explains {limit:.2g}; please report this model's config.json"
        )
    return error


@contextmanager
def _as_packed(opened: OffloadedModel, model: nn.Module) -> Iterator[None]:
    """Inside the block a model cuts neurons as a folder does. It keeps a folder's experts and int8 weights."""
    limits = getattr(opened.model.config, ENTRY, None)
    decoded = is_on_demand(model)  # from the folder itself
    if experts.LAYOUT in opened.store.variants and not decoded:
        _copy_experts(opened.store, model)
    int8 = any(run.scales_dtype for run in opened.store.index.ops if run.op != HEAD)  # the head is what is packed
    if int8 and not decoded:
        round_to_int8(model)
    cut = limits is not None and thresholds_of(model) is None
    with attached(hook_thresholds(model, torch.tensor(limits)) if cut else []):
        yield


def _copy_experts(store: Store, model: nn.Module) -> None:
    """Copy the stored experts, which may have few bits, into a model."""
    slot, blocks = aligned_buffer(store.slot_bytes(experts.LAYOUT)), decoder_blocks(model)
    with open_reader(None, store, experts.LAYOUT) as reader:
        for number in mixtures_by_layer(model):
            layer = store.layer(number, experts.LAYOUT)
            reader.read(layer.chunks, slot)
            for name, packed in layer.view(slot).items():
                for weight, decoded in experts.WholeExperts().pairs(blocks[number], layer.ops[name], packed):
                    weight.copy_(decoded)
