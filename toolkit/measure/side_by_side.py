"""One packed model in all the ways that a user could choose, with the same text and the same limit of memory.

    rivals, reasons = planned_rivals(folder, dram_bytes=140_000_000, gguf=Path("model.gguf"))   # before anything loads
    table, left_out = token_rates(folder, "endor", unpack_model(store, "endor"), prompt, 32, 140_000_000, rivals)

Ways are the dense weights, by torch and by our kernels; the packed ones decoded; the packed ones multiplied as they
are; llama.cpp with files that the toolkit writes of a Llama model; and llama.cpp with a GGUF file that is there.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
from torch import Tensor, nn

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import READABLE
from toolkit.measure import llama_cpp
from toolkit.measure.contestant import Contestant, greedy_text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.summary import NOT_COUNTED, by_turn, summary
from toolkit.measure.turns import take_turns
from toolkit.models.gguf_header import read_header
from toolkit.models.skeleton import CONFIG
from toolkit.offload.budget import BudgetError
from toolkit.policies.methods import LLAMA_CPP, PACKED
from toolkit.policies.ways import Way
from toolkit.records import line, load_json
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

POLICY = "pipelined"
TYPES = ("llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_0")  # those that any tensor's blocks fit, and no K type
REPETITIONS = 3
TOLERANCE = 0.1  # of the largest logit: packed products add in another order, in fp32; 30 layers in bf16 differ by 0.03


def planned_rivals(
    folder: Path, dram_bytes: int | None = None, gguf: Path | None = None
) -> tuple[dict[str, Path | None], list[str]]:
    """The rows of llama.cpp by name, each with its file if that is there, and why others take no part.

    `gguf` is a file of the same vocabulary that llama.cpp runs as it is. No weights are read; the first call may
    install llama.cpp. Raises `UserError` for a GGUF file that cannot be read, or that has another vocabulary than the
    packed model.
    """
    config = load_json(Store.open(folder).model_folder / CONFIG)
    rivals: dict[str, Path | None] = {}
    if gguf:
        header = read_header(gguf)
        embedding = header.tensors.get("token_embd.weight")
        words, expected = embedding.shape[0] if embedding else 0, config.get("vocab_size")
        if words != expected:
            raise UserError(f"{gguf} has {words} words and the packed model {expected}: name a file of the same model")
        rivals[f"llama.cpp {header.quantisation}"] = gguf
    if reason := llama_cpp.missing(limited=dram_bytes is not None):
        return {}, [f"llama.cpp: {reason}"]
    if config.get("model_type") == "llama":
        return dict.fromkeys(TYPES) | rivals, []
    types, kind = ", ".join(LLAMA_CPP[name] for name in TYPES), config.get("model_type")
    return rivals, [f"llama.cpp {types}: the toolkit writes GGUF files of Llama models only, not of {kind!r:.99}"]


def token_rates(
    folder: Path,
    form: str,
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    dram_bytes: int | None = None,
    rivals: Mapping[str, Path | None] = {},
    rival_model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda phase: None,
) -> tuple[pd.DataFrame, list[str]]:
    """A row for each way, and a sentence for each way that took no part.

    Args:
        folder: a packed model.
        form: the variant of it that is compared.
        model: that variant in memory (`unpack_model`).
        prompt: token ids, int64 [1, tokens].
        tokens: so many after the prompt count.
        dram_bytes: the limit for weights and buffers of each way; None lets all of them stay in memory.
        rivals: those of `planned_rivals`.
        rival_model: the model of the files that are written for llama.cpp; by default the packed one.
        tell: is called with each phase and with each turn's result.

    Columns: way; tokens_per_s, with its range over the turns (`summary`); read_mb (from the disk, a token); dram_mb (of
    weights and buffers; llama.cpp: the limit, or the file's layers); mode; disturbed (share of turns beside other
    work).

    Each way takes the same token ids, those that the dense weights choose greedily after the prompt; the passes of the
    prompt and of the next token are not counted. llama.cpp begins a new text with each token, which spares it the
    attention to those before. Outputs are checked. Raises `UserError` for a model or a folder that cannot be run.
    """
    store, reasons = Store.open(folder), list[str]()
    with scratch_folder(make_folder(paths.cache_dir() / "side_by_side")) as scratch, ExitStack() as stack:
        tell(f"choosing {NOT_COUNTED + tokens} tokens with the dense weights")
        text, dense = greedy_text(model, prompt, NOT_COUNTED + tokens, TOLERANCE), store
        if "dense" not in store.variants:
            tell("writing the dense weights")
            pack_model(model, scratch / "store", Linears(("dense",)), str(store.model.get("name")))
            dense = Store.open(scratch / "store")
        racing: list[Contestant] = []
        held_bytes = {}
        for name, place in _ways(form, store, dense).items():
            way = Way(name, policy=POLICY, device="cpu")
            ours = PackedModel(name, place.folder, text, {"way": name}, way, dram_bytes=dram_bytes)
            try:
                with ours.open():
                    held_bytes[name] = ours.held_bytes
            except BudgetError as error:
                reasons.append(f"{name}: {error}")
                tell(reasons[-1])
                continue
            racing.append(ours)
        for name, file in rivals.items():
            tell(f"starting {name}" + ("" if file else ", whose file is written first"))
            settings = {"mapped": dram_bytes is not None, "memory_bytes": dram_bytes, "gguf": file}
            try:
                rival = LlamaCpp(name, rival_model or model, scratch, text, {"way": name}, **settings)
            except UserError as error:
                if file is None:
                    raise
                reasons.append(f"{name}: {line(error)}")  # an architecture that llama.cpp does not run
                tell(reasons[-1])
                continue
            stack.callback(rival.close)
            held_bytes[name] = rival.held_bytes
            racing.append(rival)
        if not racing:
            raise UserError("; ".join(reasons))
        tell(f"{REPETITIONS} turns of {len(racing)} ways, {tokens} tokens each")
        spans = take_turns(
            racing,
            REPETITIONS,
            tokens,
            NOT_COUNTED,
            tell=lambda way, rate: tell(f"{way.labels['way']}: {rate:.2f} tokens/s"),
        )
    table = summary(by_turn(spans, ["way"]), ["way"], ["tokens_per_s"])
    table = table.assign(read_mb=table["read_bytes"] / 1e6, dram_mb=table["way"].map(held_bytes) / 1e6)
    rates = ["tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]
    return table[["way", *rates, "read_mb", "dram_mb", "mode", "disturbed"]], reasons


def _ways(form: str, store: Store, dense: Store) -> dict[str, Store]:
    kind = READABLE.get(form)
    ways = {"dense": dense, f"dense{PACKED}": dense}
    if form != "dense" and not (kind and kind.multiplied_packed):  # those are decoded far too slowly
        ways[form] = store
    if kind and kind.has_matvec and not kind.is_dense:
        ways[f"{form}{PACKED}"] = store
    return ways
