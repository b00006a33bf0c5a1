"""Files of one model in other forms, and their prices in quality, for a race within a limit of memory.

    own = gguf_file("qwen2.5-coder-1.5b")
    few_bits = in_types("qwen2.5-coder-1.5b", "IQ3_S", Calibration("wiki-slice", 16, 1024))
    prices({"the model": own, "IQ3_S": few_bits, "SpQR": folder}, Texts(("wiki-slice", "python-sources")))

Files and perplexities are kept by what the files hold, not by the code that made them: a race needs the same files
again, and packing takes minutes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from toolkit.cache import cached, cached_table
from toolkit.errors import UserError
from toolkit.files import file_sha256, read_json
from toolkit.interchange.reading import load_tokenizer
from toolkit.measure.llama_cpp import PACKAGE, VERSION
from toolkit.models import load_model
from toolkit.models.gguf_header import read_header
from toolkit.models.named import gguf_file
from toolkit.offload.model import OffloadedModel
from toolkit.offload.variant import variant_to_run
from toolkit.papers.beyond.requantised import requantise
from toolkit.quality import load_tokens, paired_difference, perplexity
from toolkit.sparsity import Calibration
from toolkit.studies.mixtures import Importance, importance
from toolkit.studies.ratios import ratio_range

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Texts:
    """The windows of text on which a model is evaluated."""

    corpora: Sequence[str]
    windows: int = 12
    """How many of each corpus."""
    sequence_length: int = 512


def in_types(model: str, mixture: str, calibration: Calibration) -> Path:
    """A GGUF file of a model in a mixture of llama.cpp's types, quantised with an importance matrix; kept.

    The model's own file, if it has this mixture. Raises `UserError` for a model without a GGUF file, and what
    `requantise` raises.
    """
    own = gguf_file(model)
    if own is None:
        raise UserError(f"{model}: llama.cpp's types are made of a GGUF file; name a model that has one")
    if read_header(own).quantisation == mixture:
        return own

    def fill(folder: Path) -> None:
        requantise(own, folder / f"{mixture}.gguf", mixture, _matrix(model, calibration))

    key = {"mixture": mixture, "of": file_sha256(own), "calibration": vars(calibration), PACKAGE: VERSION}
    return cached("in_types", key, (), fill) / f"{mixture}.gguf"


@functools.cache  # several mixtures are made with the same one
def _matrix(model: str, calibration: Calibration) -> Importance:
    """The importance matrix of a model."""
    dense, tokenizer = load_model(model, torch.bfloat16)
    return importance(dense, calibration.draw_from_corpus(tokenizer))


def prices(places: Mapping[str, Path], texts: Texts) -> pd.DataFrame:
    """A row a GGUF file or packed folder and corpus: perplexity, and its ratio to that of the first one.

    Columns: form (the name), corpus, perplexity, relative, relative_low, relative_high (by one standard error of the
    difference of log-perplexities, window by window).
    """
    rows, own = [], next(iter(places))
    losses = {name: window_nll(place, texts) for name, place in places.items()}
    for name, windows in losses.items():
        for corpus in texts.corpora:
            difference, error = paired_difference(windows[corpus], losses[own][corpus])
            row = {"form": name, "corpus": corpus, "perplexity": math.exp(windows[corpus].mean())}
            rows.append(row | ratio_range(difference, error))
    return pd.DataFrame(rows)


def window_nll(place: Path, texts: Texts) -> pd.DataFrame:
    """The mean negative log-likelihood a token in nats, a row a window, a column a corpus; kept."""

    def measure() -> pd.DataFrame:
        with ExitStack() as stack:
            if place.is_file():
                model, tokenizer = load_model(str(place), torch.bfloat16)
            else:
                form = f"{variant_to_run(place)}_packed"
                model = stack.enter_context(OffloadedModel.open(place, form, verify=False)).model
                tokenizer = load_tokenizer(place / "model")
            return pd.DataFrame({corpus: losses(model, tokenizer, corpus) for corpus in texts.corpora})

    def losses(model, tokenizer, corpus: str) -> Sequence[float]:
        tokens = load_tokens(corpus, tokenizer, "evaluation")
        return perplexity(model, tokens, texts.sequence_length, texts.windows).window_nll

    content = file_sha256(place) if place.is_file() else read_json(place / "index.json")["sha256"]
    return cached_table("window_nll", {"content": content, "texts": vars(texts)}, (), measure)


def sizes(place: Path, own: Path) -> dict[str, float]:
    """Columns of sizes: dense_mb (model in 16 bits), size_mb (file or folder), needed_mb (by a token), token_bits.

    token_bits are those of a weight that a token needs, scales, outliers and head included. A token needs one row of an
    embedding that is stored apart from the head, which is left out. `own` is the model's GGUF file, whose tensors tell
    the number of weights; a folder has its embedding in 16 bits.
    """
    tensors = read_header(own).tensors
    embedding = math.prod(tensors[EMBEDDING].shape)
    weights = sum(math.prod(tensor.shape) for tensor in tensors.values()) - embedding * (HEAD in tensors)
    if place.is_file():
        tensors = read_header(place).tensors
        nbytes, apart = place.stat().st_size, tensors[EMBEDDING].nbytes * (HEAD in tensors)
    else:
        nbytes, apart = sum(file.stat().st_size for file in place.iterdir() if file.is_file()), 2 * embedding
    needed = nbytes - apart
    numbers = {"dense_mb": 2 * weights, "size_mb": nbytes, "needed_mb": needed}
    return {name: count / 1e6 for name, count in numbers.items()} | {"token_bits": 8 * needed / weights}
