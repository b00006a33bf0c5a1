"""A model as a folder's config.json describes it, without weights. Sizes are checked before it is made.

    config = read_config(folder, shapes)
    model = empty_model(config, lambda model: store.check_fits(model, "endor"))

Anyone may have written a configuration, and one line can ask for a hundred million layers. No code of the folder is
run.
"""

import contextlib
import copy
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from toolkit import hub
from toolkit.errors import UserError
from toolkit.files import check_memory
from toolkit.models.new_tensors import NewTensors
from toolkit.models.plain import plain
from toolkit.records import load_json

CONFIG, GENERATION = "config.json", "generation_config.json"
# names of entries that say how many modules or names are made, but not how wide one is
COUNTS = re.compile("^(?!.*_size$).*(layer|expert|label|block)")
SIZES = re.compile("(size|window|layers|heads|experts|per_tok)$")  # never negative
META = "meta"
SMALL = 1024  # numbers of a range: more than dimensions of a head, so that products of two are small, too
LEAST_LIMIT = 1024  # modules of a kind that are always made; so many take seconds


def read_config(folder: Path, shapes: Iterable[tuple[int, ...]]):
    """The configuration in a folder, as transformers reads it. `shapes` are those of all stored tensors.

    Raises `UserError` that names the file and the entry if it is no JSON object, if it wants more layers or experts
    than there are tensors for them, or if transformers cannot use it. Its class's own number is no wish: Doge names
    16384 experts where it has none.
    """
    from transformers import AutoConfig

    shapes, entries = list(shapes), _object(folder / CONFIG)
    experts = [shape[0] for shape in shapes if len(shape) == 3]  # they share a tensor
    rows = {shape[0] for shape in shapes if len(shape) == 2}  # an expert each, as in Doge's embeddings
    limit = max([LEAST_LIMIT, len(shapes), *experts])
    for place, value in _numbers(entries):
        many = COUNTS.search(place) and value > limit and not ("expert" in place and value in rows)
        if many and (place, value) not in _defaults(entries):
            raise UserError(f"{folder / CONFIG}: {place} is {value}; the weights beside it are {len(shapes)} tensors")
        if SIZES.search(place) and value < 0:
            raise UserError(f"{folder / CONFIG}: {place} is {value}; expected no negative number")
    with _usable(folder / CONFIG):
        return AutoConfig.from_pretrained(folder, local_files_only=True, **hub.NO_CODE)


def read_generation_config(folder: Path):
    """The settings of `generate` in a folder, or None if it has none. Raises `UserError` as `read_config` does."""
    from transformers import GenerationConfig

    if not (folder / GENERATION).exists():
        return None
    _object(folder / GENERATION)
    with _usable(folder / GENERATION):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def outline(config, kind: type | None = None) -> nn.Module:
    """The causal language model of a configuration, or one of class `kind`, its tensors on the device "meta"."""
    dtype = _dtype(config)
    with NewTensors(dtype, META):
        try:
            with _SmallRanges():
                model = _made(config, kind, dtype)
        except RuntimeError:  # it mixes ranges with other tensors
            model = _made(config, kind, dtype)
    for module in model.modules():
        module._buffers = {name: it if it is None else it.to(META) for name, it in module._buffers.items()}
    return model


class _SmallRanges(TorchFunctionMode):
    """On the device "meta", ranges of few numbers are on the CPU, and initial values are skipped.

    torch would import SymPy to compute with values that there are none of, such as position tables: 37 MB.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call a function of torch."""
        named = dict(kwargs or {})
        if getattr(function, "__module__", None) == torch.nn.init.__name__:
            return named["tensor"]
        if function is torch.arange and args and all(isinstance(it, int) and abs(it) <= SMALL for it in args):
            named["device"] = named.get("device") or "cpu"
        return function(*args, **named)


def check_outline(config, check: Callable[[nn.Module], None], kind: type | None = None) -> nn.Module:
    """The causal language model of a configuration, or one of class `kind`, without any memory.

    `check` compares its shapes with what is stored. Raises what it raises, and `UserError` if transformers cannot make
    the model or its buffers would not fit into memory.
    """
    with _usable(CONFIG):
        model = outline(config, kind)
    check(plain(model))
    check_memory(sum(buffer.nbytes for buffer in model.buffers()), f"what {CONFIG} has computed for the model")
    return model


def empty_model(config, check: Callable[[nn.Module], None]) -> nn.Module:
    """The causal language model of a configuration, with those buffers only that are computed.

    Raises what `check_outline` raises.
    """
    model = check_outline(config, check)
    with _usable(CONFIG):
        compute_buffers(model)
    return model


def check_reopens(model: nn.Module) -> None:
    """Raise `UserError` unless the model's configuration, once written and read, describes exactly its tensors.

    A configuration can say that the output head is tied to the embedding while the weights hold a head of its own, or
    the other way round. The model runs in memory, but a folder written of it would not load.
    """
    has, expected = _shapes(model), {}
    with tempfile.TemporaryDirectory() as folder:
        with hub.foreign_code(type(model).__name__, "its configuration cannot be written"):
            model.config.save_pretrained(folder)
        try:
            config = read_config(Path(folder), has.values())
            check_outline(config, lambda outline: expected.update(_shapes(outline)))
        except UserError as error:
            words = str(error).removeprefix(f"{folder}/")
            raise UserError(f"{type(model).__name__} could not be opened again: {words}") from error
    for name in sorted(has.keys() | expected.keys()):
        if has.get(name) != expected.get(name):
            raise UserError(
                f"{type(model).__name__} could not be opened again: its {name} is {_told(has.get(name))}, but its "
                f"config.json tells {_told(expected.get(name))}; correct config.json (tie_word_embeddings says whether "
                "the head is the embedding)"
            )


def check_head_alone(config) -> None:
    """Raise `UserError` for a model that shares more than its head, and so cannot have a head of its own.

    One entry of a configuration unties all that is shared, such as the block that Zamba uses several times.
    """
    alone = copy.deepcopy(config)
    alone.tie_word_embeddings = alone.get_text_config().tie_word_embeddings = False
    shared, untied = (check_outline(it, lambda outline: None) for it in (config, alone))
    tensors, head = untied.state_dict(keep_vars=True), untied.get_output_embeddings().weight
    if more := [name for name in _shapes(untied).keys() - _shapes(shared).keys() if tensors[name] is not head]:
        raise UserError(
            f"{type(untied).__name__} shares more than its head ({min(more)}): its head cannot be packed by itself; "
            "leave it whole (--head whole)"
        )


def _shapes(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tensor. A shared one is listed under its first name."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tuple(tensors[name].shape) for name in first.values()}


def _told(shape: tuple[int, ...] | None) -> str:
    return "absent or shared" if shape is None else " × ".join(map(str, shape))


def _made(config, kind: type | None, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    # for a type other than None transformers would set torch's default type, which all threads share
    model = kind(config) if kind else AutoModelForCausalLM.from_config(config, dtype=None, **hub.NO_CODE)
    for part in (config, model.config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return model


def _dtype(config) -> torch.dtype:
    """The type of a configuration's weights."""
    return config.dtype or config.get_text_config().dtype or torch.float32


def compute_buffers(model: nn.Module) -> None:
    """Compute the buffers that no file holds as `from_pretrained` does: in float32, not in the model's type.

    Their types stay. Buffers that a file holds have no values yet. Sines that are computed in bfloat16 are off by up to
    0.86 at position 2047 (GPT-J).
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # comes from the folder
    for module in model.modules():
        module._is_hf_initialized = next(module.buffers(), None) is None  # else it may compute one
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            )
    with NewTensors(torch.float32), torch.no_grad():
        # its decorator would replace functions of torch, for all threads
        inspect.unwrap(type(model).initialize_weights)(model)  # type: ignore[attr-defined]


def _object(file: Path) -> dict:
    found = load_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds no JSON object")
    return found


def _defaults(entries: dict) -> list[tuple[str, int | float]]:
    """The numbers that a configuration of this type has by itself; none of an unknown type."""
    from transformers import AutoConfig

    with contextlib.suppress(UserError), _usable(CONFIG):
        return list(_numbers(AutoConfig.for_model(entries.get("model_type")).to_dict()))
    return []


def _numbers(entries: dict) -> Iterator[tuple[str, int | float]]:
    """Each number and the name of its entry, in nested objects too."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


@contextlib.contextmanager
def _usable(file: Path | str) -> Iterator[None]:
    """Turn any error of transformers into a `UserError`, without its warnings."""
    with hub.foreign_code(file, "transformers cannot use it"), hub.quiet():
        yield
