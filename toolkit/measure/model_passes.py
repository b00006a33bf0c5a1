"""Methods and policies that bring consecutive tokens through the same model on disk: each is timed and checked in turn.

    ways = [(Way("dense", device="cpu"), "storage"), (Way("endor", policy="pipelined", device="cpu"), "storage")]
    spans = pass_spans(Workload("opt-1536"), 10, ways, 3, folder)
    summary(by_turn(spans, PLACED), PLACED)      # seconds a token, and bytes that were read for it

A turn is one window over `TOKENS` consecutive tokens. A pipeline reads for a token while it computes the one before, so
a window over one token would leave a part of its reads out. A window over several tokens, after one that is not timed,
has as many reads as its tokens need. Logits are compared with those of the model in memory.
Every token reads the disk: there are more layers than buffers, and where reads go through the page cache, the files'
pages are dropped before each token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.files import scratch_folder
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import AcceleratedModel
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.decoding import Text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.streamed import StreamedModel
from toolkit.measure.turns import take_turns
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload
from toolkit.policies.layer_maps import place_layers
from toolkit.policies.methods import ACCELERATE, LLAMA_CPP, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Placed, Way
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store

# Runtimes of others: `RUNTIMES[method](method, model, folder, text, labels)` is a contestant that runs a model from
# files that it writes into a folder.
RUNTIMES: dict[str, Callable[..., Contestant]] = {
    **dict.fromkeys(LLAMA_CPP, LlamaCpp),
    ACCELERATE: AcceleratedModel,  # the last, since it takes the model's weights away
}

TOKEN = torch.tensor([[7]])
TOKENS = 4  # in a turn's window
SLACK = 0.02  # of the largest logit: `endor_packed` adds in another order
PLACED = ["method", "policy", "mapping"]


def pass_spans(
    workload: Workload,
    layers: int,
    ways: Sequence[Placed],
    repetitions: int,
    folder: Path,
    tokens: int = TOKENS,
    memory_bytes: int | None = None,
) -> pd.DataFrame:
    """The spans of every way's turns, timed in a folder whose disk they read. What is written there is removed again.

    Columns: those of `PLACED`, dram_layers, storage_layers, and those of `take_turns`; `stored_bytes` is what one token
    must read. With `memory_bytes` every way may take so much memory for weights, and those that can be limited keep
    layers or pages in it, wherever the mapping puts them. Raises `UserError` as `pass_measurements` does, and for a
    limit that a way cannot be given.
    """
    if min(repetitions, tokens) < 1:
        raise UserError(f"repetitions={repetitions}, tokens={tokens}: expected 1 or more of each")
    endless = [way.method for way, _ in ways if way.method in RIVALS.keys() - LLAMA_CPP]
    if memory_bytes is not None and endless:
        raise UserError(f"memory_bytes={memory_bytes}: {endless[0]} cannot be given a limit; leave one of them out")
    for way, mapping in ways:
        place_layers(way, mapping, layers)  # early; `refilled` is placed again once bytes are known

    def text(model: nn.Module) -> list[Text]:
        with torch.no_grad():
            logits = model(TOKEN, use_cache=False).logits[:, -1]
        inputs = [TOKEN] * (1 + tokens)
        return [Text(inputs, Reference("the model in memory", [logits] * len(inputs), SLACK), cached=False)]

    with scratch_folder(folder) as place, contestants(workload, layers, ways, place, text, memory_bytes) as racing:
        return take_turns(racing, repetitions, tokens, skipped=1)


@contextmanager
def contestants(
    workload: Workload,
    layers: int,
    ways: Sequence[Placed],
    folder: Path,
    texts: Callable[[nn.Module], Sequence[Text]],
    memory_bytes: int | None = None,
) -> Iterator[list[Contestant]]:
    """The contestants of every text, in the order of the ways; runtimes of others take the first text only.

    What they need is written to an empty folder. `texts` gets the model in memory, before a runtime takes its weights.
    Labels: those of `PLACED`, dram_layers, storage_layers, and batch. Raises `UserError` for an unknown model, fewer
    than one layer, or a disk that is too small.
    """
    model = twin_model(workload.model, layers, DTYPES[workload.dtype], workload.sparsity)
    first, *others = texts(model)
    forms = dict.fromkeys(["dense", *sorted(way.stored.format for way, _ in ways if way.method not in RIVALS)])
    pack_model(model, folder / "store", tuple(forms), workload.model)
    store = Store.open(folder / "store")
    store.verify()
    maps = {(way, mapping): _placed(store, way, mapping) for way, mapping in ways}

    def limited(where: LayerMap) -> dict[str, object]:
        return {"placement": where} if memory_bytes is None else {"dram_bytes": memory_bytes}

    with ExitStack() as stack:
        rivals: dict[str, Contestant] = {}
        methods = {way.method: labels(way, mapping, maps[way, mapping], first) for way, mapping in ways}
        for method in [name for name in RUNTIMES if name in methods]:
            limit = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
            rivals[method] = RUNTIMES[method](method, model, folder, first, methods[method], **limit)
            stack.callback(rivals[method].close)
        del model
        yield [
            rivals.get(way.method)
            or StreamedModel(store, way, text, labels(way, mapping, where, text), **limited(where))
            for text in (first, *others)
            for (way, mapping), where in maps.items()
            if text is first or way.method not in rivals
        ]


def labels(way: Way, mapping: str, where: LayerMap, text: Text) -> dict[str, object]:
    """The columns that tell a contestant from others."""
    placed = {"mapping": mapping, "dram_layers": where.dram, "storage_layers": where.storage}
    return {"method": way.method, "policy": way.policy} | placed | {"batch": len(text.inputs[0])}


def _placed(store: Store, way: Way, mapping: str) -> LayerMap:
    dense, form = store.layers_of("dense"), "dense" if way.method in RIVALS else way.stored.format
    return place_layers(way, mapping, len(dense), dense[0].nbytes, store.layer(0, form).nbytes)
