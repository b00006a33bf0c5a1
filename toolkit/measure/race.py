"""A race: ways of running one model take the same tokens in turns; each is timed, and its logits are checked.

    race = Race(Workload("opt-1536"), 10, [(Way("endor", policy="pipelined", device="cpu"), "storage")])
    turns = by_turn(race_spans(race), PLACED)      # seconds a token, and the bytes that were read for it
    summary(turns, PLACED)

The model is a twin with random weights (`toolkit.models.twins`) on the CPU. A turn is a window over several tokens,
after one that is not timed: a pipeline reads for a token while it computes the one before, so a window over one token
would miss a part of its reads. Every token reads the disk: there are more layers than buffers, and where reads go
through the page cache, the files' pages are dropped before each token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import AcceleratedModel
from toolkit.measure.contestant import Contestant, Reference, Text, greedy_text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.turns import measured, take_turns
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload
from toolkit.offload.methods import ACCELERATE, LLAMA_CPP, RIVALS
from toolkit.offload.placement import LayerMap, place_layers
from toolkit.offload.ways import Placed, Way
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

# Runtimes of others: `RUNTIMES[method](method, model, folder, text, labels)` is a contestant that runs a model from
# files that it writes into a folder.
RUNTIMES: dict[str, Callable[..., Contestant]] = {
    **dict.fromkeys(LLAMA_CPP, LlamaCpp),
    ACCELERATE: AcceleratedModel,  # the last, since it takes the model's weights away
}

STORE = "store"
TOKEN = torch.tensor([[7]])
TOLERANCE = 0.02  # of the largest logit: products with packed weights add in another order
PLACED = ["method", "policy", "mapping"]  # the labels of a way


@dataclass(frozen=True)
class Race:
    """The contest: a twin of `workload` with so many layers, each of the ways in turns, and the text of a turn.

    Args:
        ways: each with the map of its layers: `storage`, all on disk; `dram`, all in memory; `published`, the paper's
            share of layers in memory; `refilled` (`LayerMap.refilled`).
        repetitions: turns of each way.
        tokens: of a turn that count.
        memory_bytes: of weights that each way may hold in memory; those that can be limited keep layers or pages in it,
            wherever the map puts them. None leaves layers where the map says.
        prompt_tokens: 0: each pass takes one token and begins a new text, and a turn begins with one that does not
            count. Otherwise a turn is a random prompt of so many tokens, whose pass counts as the first token, and the
            tokens that the model in memory picks after it.
        batches: texts at once; runtimes of others take the first only.
    """

    workload: Workload
    layers: int
    ways: Sequence[Placed]
    repetitions: int = 5
    tokens: int = 4
    memory_bytes: int | None = None
    prompt_tokens: int = 0
    batches: Sequence[int] = (1,)

    def __post_init__(self):
        """Refuse unknown names."""
        for way, mapping in self.ways:
            place_layers(way, mapping, self.layers)  # early; `refilled` is placed again once bytes are known


@measured
def race_spans(race: Race) -> pd.DataFrame:
    """`run_race` on the disk of the cache, kept."""
    return run_race(race, make_folder(paths.cache_dir()))


def run_race(race: Race, place: Path) -> pd.DataFrame:
    """The spans of every way's turns: those of `take_turns`, with the labels of `contestants`.

    `stored_bytes` is what one token must read. Files are written into the folder `place`, and removed again. Raises
    `UserError` for an unknown model, a disk that is too small, or a way whose logits are not those of the model in
    memory.
    """
    workload = race.workload
    with scratch_folder(place) as folder:
        model = twin_model(workload.model, race.layers, DTYPES[workload.dtype], workload.sparsity)
        texts = _texts(race, model)
        with contestants(model, race.ways, folder, texts, memory_bytes=race.memory_bytes) as racing:
            del model  # a runtime of others may have taken its weights
            return take_turns(racing, race.repetitions, race.tokens, skipped=0 if race.prompt_tokens else 1)


def _texts(race: Race, model: nn.Module) -> list[Text]:
    if not race.prompt_tokens:
        inputs = [TOKEN] * (1 + race.tokens)
        with torch.no_grad():
            logits = [model(TOKEN, use_cache=False).logits[:, -1]] * len(inputs)
        return [Text(inputs, Reference("the model in memory", logits, TOLERANCE), cached=False)]
    places, count = model.config.max_position_embeddings, race.prompt_tokens + race.tokens
    if count > places:
        raise UserError(f"a text of {count} tokens: expected no more than the model's {places} positions")

    def prompt(batch: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(batch)
        return torch.randint(model.config.vocab_size, (batch, race.prompt_tokens), generator=random)

    return [greedy_text(model, prompt(batch), race.tokens, TOLERANCE) for batch in sorted(race.batches)]


@contextmanager
def contestants(
    model: nn.Module,
    ways: Sequence[Placed],
    folder: Path,
    texts: Sequence[Text],
    packs: Mapping[str, object] | None = None,
    memory_bytes: int | None = None,
    staged: bool = True,
) -> Iterator[list[Contestant]]:
    """The contestants of every text, in the order of the ways; runtimes of others take the first text only.

    The files that they need are written to a folder, unless they are there. `packs` says how matrices are packed, by
    format; by default as the formats do. Without `staged` a token of ours is a single span. Labels: those of `PLACED`,
    dram_layers, storage_layers, layer_bytes (of all layers as stored), and batch.
    """
    if not (folder / STORE).exists():
        forms = [way.stored.format for way, _ in ways if way.method not in RIVALS]
        pack_model(model, folder / STORE, Linears(packs or tuple(dict.fromkeys(["dense", *sorted(forms)]))))
    store = Store.open(folder / STORE)
    store.verify()
    maps = {placed: _placed(store, *placed) for placed in ways}
    limit = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    with ExitStack() as stack:
        rivals: dict[str, Contestant] = {}
        places = {way.method: (way, mapping) for way, mapping in ways}
        for method in [name for name in RUNTIMES if name in places]:
            labels = _labels(*places[method], maps[places[method]], texts[0])
            loaded = {"load": "read"} if places[method][1] == "dram" and not limit else {}
            rivals[method] = RUNTIMES[method](method, model, folder, texts[0], labels, **loaded, **limit)
            rivals[method].labels = labels | {"layer_bytes": rivals[method].nbytes}
            stack.callback(rivals[method].close)
        del model

        def streamed(way: Way, mapping: str, text: Text) -> PackedModel:
            where = maps[way, mapping]
            layer_bytes = sum(layer.nbytes for layer in store.layers_of(way.stored.format))
            labels = _labels(way, mapping, where, text) | {"layer_bytes": layer_bytes}
            settings = {"placement": where} if memory_bytes is None else {"dram_bytes": memory_bytes}
            return PackedModel(f"{way.method}, {way.policy},", store.folder, text, labels, way, staged, **settings)

        yield [
            rivals.get(way.method) or streamed(way, mapping, text)
            for text in texts
            for way, mapping in ways
            if text is texts[0] or way.method not in rivals
        ]


def _labels(way: Way, mapping: str, where: LayerMap, text: Text) -> dict[str, object]:
    placed = {"mapping": mapping, "dram_layers": where.dram, "storage_layers": where.storage}
    return {"method": way.method, "policy": way.policy} | placed | {"batch": len(text.inputs[0])}


def _placed(store: Store, way: Way, mapping: str) -> LayerMap:
    form = "dense" if way.method in RIVALS else way.stored.format
    sizes = [store.layer(0, name).nbytes if name in store.variants else 1 for name in ("dense", form)]
    return place_layers(way, mapping, len(store.layers_of(next(iter(store.variants)))), *sizes)
