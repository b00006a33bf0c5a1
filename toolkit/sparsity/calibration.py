"""The text that a model is calibrated on, and what a model must be for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.on_demand import present
from toolkit.quality import begun, load_tokens, token_ids
from toolkit.vocabulary import check_vocabulary

AND = "+"  # between the names of corpora


@dataclass(frozen=True)
class Calibration:
    """The text that a model is calibrated on: windows of a text, drawn at random and without overlap."""

    corpus: str = "wiki-slice"
    """As `load_tokens` takes it; "wiki-slice+python-sources" for windows of both."""
    windows: int | None = None
    """How many are drawn; None for all there are. The papers take 128."""
    sequence_length: int = 1024
    """Tokens in a window."""
    seed: int = 0
    """Seeds the draw."""

    def draw(self, tokens: object) -> Int64[Tensor, "windows tokens"]:
        """Draw the windows from a row of token ids. Raises `UserError` as `cut_windows` does."""
        asked = len(cut_windows(tokens, self.windows, self.sequence_length))
        every = cut_windows(tokens, None, self.sequence_length)
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(self.seed))
        return every[order[:asked]]

    def draw_from_corpus(self, tokenizer: object) -> Int64[Tensor, "windows tokens"]:
        """Draw the windows from the corpus; of several, as many from each, in turn.

        Raises `UserError` as `load_tokens` and `draw` do.
        """
        corpora = self.corpus.split(AND)
        if len(corpora) == 1:
            return self.draw(load_tokens(self.corpus, tokenizer, "calibration"))
        _check_counts(self.windows, self.sequence_length)
        share = replace(self, windows=self.windows and math.ceil(self.windows / len(corpora)))
        drawn = [share.draw(load_tokens(name, tokenizer, "calibration")) for name in corpora]
        fewest = min(map(len, drawn))
        return torch.stack([windows[:fewest] for windows in drawn], dim=1).flatten(0, 1)[: self.windows]


DEFAULT = Calibration()


def cut_windows(tokens: object, windows: int | None, sequence_length: int) -> Int64[Tensor, "windows tokens"]:
    """Cut the first `windows` windows from a row of token ids of any integer type; None cuts all that fit.

    Raises `UserError` if there are too few tokens, or tokens or numbers are of the wrong kind.
    """
    tokens = token_ids(tokens, "calibration")
    _check_counts(windows, sequence_length)
    windows = max(len(tokens) // sequence_length, 1) if windows is None else windows
    if len(tokens) < windows * sequence_length:
        raise UserError(
            f"calibration has {len(tokens)} tokens, {windows} windows of {sequence_length} need "
            f"{windows * sequence_length}; ask for fewer windows or give more text"
        )
    return tokens[: windows * sequence_length].reshape(windows, sequence_length)


def _check_counts(windows: object, sequence_length: object) -> None:
    for label, value in {"windows": windows, "sequence_length": sequence_length}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise UserError(f"{label} is {value!r}; expected a whole number, at least 1")


def checked_windows(model: nn.Module, windows: object) -> Int64[Tensor, "windows tokens"]:
    """Windows of token ids of any integer type as int64, begun as the model expects (`toolkit.quality.begun`).

    Raises `UserError` for what the model cannot take.
    """
    if not isinstance(windows, Tensor) or windows.ndim != 2 or not windows.numel():
        what = f"{windows.dtype} {list(windows.shape)}" if isinstance(windows, Tensor) else type(windows).__name__
        raise UserError(f"calibration is {what}; expected token ids [windows, tokens], as cut_windows makes them")
    known = token_ids(windows.flatten(), "calibration").view(windows.shape)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", windows.shape[1])
    if 0 < positions < windows.shape[1]:  # some configurations say -1: no limit
        raise UserError(f"sequence_length {windows.shape[1]} is beyond the model's {positions} positions")
    check_vocabulary(known, model.get_input_embeddings().num_embeddings)
    return begun(model.config, known)


def check_finite(model: nn.Module) -> None:
    """Raise `UserError` for a decoder linear with weights that are not finite."""
    names = {module: name for name, module in model.named_modules()}
    for block in decoder_blocks(model):
        with present(block):
            check_finite_block(block, names)


def check_finite_block(block: nn.Module, names: Mapping[nn.Module, str]) -> None:
    """The same for one block. `names` are those of the model's modules."""
    for linear in decoder_linears(block).values():
        if not linear.weight.isfinite().all():
            raise UserError(f"{names[linear]} has weights that are not finite; load the model anew")
