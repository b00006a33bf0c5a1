"""Perplexity over fixed windows of tokens, as GPTQ, SparseGPT and Wanda report it."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.progress import progress
from toolkit.vocabulary import check_vocabulary

LOGITS_AT_ONCE = 128  # positions turned to float32 at a time: 128 × 50k logits are 25 MB
MAX_EXPONENT = 700  # exp of more overflows a float
BEGUN = "gemma"  # how the types of models begin that need the token
INTEGERS = {
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


class Perplexity(float):
    """A perplexity with its conditions. Perplexities with different `sequence_length` must not be compared.

    Attributes:
        sequence_length: tokens a window.
        windows: how many windows.
        tokens: how many tokens were predicted: every token of a window but its first.
        mean_nll: mean negative log-likelihood a token, in nats; the perplexity is its exponential.
        window_nll: mean negative log-likelihood a token of each window, in nats, in the order of the windows.
        standard_error: of the perplexity, by the delta method from the spread over windows; nan for one window.
    """

    sequence_length: int
    windows: int
    tokens: int
    mean_nll: float
    window_nll: tuple[float, ...]
    standard_error: float

    @classmethod
    def of(cls, window_nll: Float[Tensor, " windows"], sequence_length: int) -> "Perplexity":
        """From the mean negative log-likelihood of each window."""
        mean = window_nll.double().mean().item()
        self = cls(math.exp(mean) if not mean > MAX_EXPONENT else math.inf)
        self.sequence_length = sequence_length
        self.windows = len(window_nll)
        self.tokens = self.windows * (sequence_length - 1)
        self.mean_nll = mean
        self.window_nll = tuple(window_nll.double().tolist())
        self.standard_error = math.nan
        if self.windows > 1:
            self.standard_error = self * window_nll.double().std().item() / math.sqrt(self.windows)
        return self


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Mean of first − second over the same windows, and its standard error (nan for one window).

    Windows differ far more from each other than two models do on one window. Differences by window do not contain that
    spread. With `window_nll` of two models it is the difference of their log-perplexities in nats: 0.01 means that the
    first perplexity is 1 % higher. Raises `UserError` for unlike numbers of windows, or none.
    """
    if len(first) != len(second) or not len(first):
        raise UserError(f"{len(first)} and {len(second)} windows cannot be paired; evaluate both models on the same")
    differences = torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)
    if len(differences) == 1:
        return differences.item(), math.nan
    return differences.mean().item(), differences.std().item() / math.sqrt(len(differences))


def in_turn(passes: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """The results of calls, one after the other."""
    results = []
    with progress("evaluating perplexity", len(passes), "windows") as bar:
        for call in passes:
            results.append(call())
            bar.update()
    return results


def perplexity(
    model: nn.Module,
    tokens: Tensor,
    sequence_length: int = 1024,
    windows: int | None = None,
    run: Callable[[Sequence[Callable[[], Tensor]]], list[Tensor]] = in_turn,
) -> Perplexity:
    """Perplexity of a causal language model on consecutive windows that do not overlap.

    Args:
        model: takes token ids on its own device and returns an object with `.logits`.
        tokens: a row of token ids of any integer type, as from `toolkit.quality.load_tokens`; an incomplete last window
            is left out.
        sequence_length: tokens a window, each window read from a blank context (GPTQ's protocol). There are no special
            tokens, but for models whose texts all begin with one (`toolkit.quality.begun`).
        windows: only the first so many; all if None.
        run: gives the results of calls, each of which runs the model on a window; `run_in_step` of
            `toolkit.models.streams` runs a block of a model that is larger than memory for all of them.

    Raises `UserError` if tokens are no row of integers, there are fewer of them than the windows need, one is outside
    the model's vocabulary, or the sequence is longer than the model's positions.
    """
    training = model.training
    model.eval()
    try:
        return perplexity_of(partial(_logits, model), model.config, tokens, sequence_length, windows, run)
    finally:
        model.train(training)


@torch.inference_mode()
def perplexity_of(
    scores: Callable[[Int64[Tensor, " tokens"]], Float[Tensor, "tokens words"]],
    config,
    tokens: Tensor,
    sequence_length: int = 1024,
    windows: int | None = None,
    run: Callable[[Sequence[Callable[[], Tensor]]], list[Tensor]] = in_turn,
) -> Perplexity:
    """The same of any function that gives the logits after each token of a window.

    `config` is the configuration of its model, as transformers has it. The rest is as in `perplexity`.
    """
    tokens, text_config = token_ids(tokens), config.get_text_config()
    available = len(tokens) // sequence_length if sequence_length > 1 else 0
    positions = getattr(text_config, "max_position_embeddings", None)
    if sequence_length < 2:
        raise UserError(f"sequence_length {sequence_length} is too short: a window needs at least 2 tokens")
    if positions and sequence_length > positions:
        raise UserError(f"sequence_length {sequence_length} exceeds the model's {positions} positions")
    if available < 1:
        raise UserError(f"{len(tokens)} tokens do not fill one window of {sequence_length}: give more or shorten it")
    if windows is not None and not 1 <= windows <= available:
        raise UserError(f"windows {windows} is outside 1 … {available}, what {len(tokens)} tokens fill")
    check_vocabulary(tokens, text_config.vocab_size)
    batch = begun(text_config, tokens[: (windows or available) * sequence_length].view(-1, sequence_length))
    window_nll = run([partial(_mean_nll, scores, window) for window in batch])
    return Perplexity.of(torch.stack(window_nll), sequence_length)


def _logits(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens words"]:
    return model(window[None].to(next(model.parameters()).device), use_cache=False).logits[0]


def _mean_nll(scores: Callable[[Tensor], Tensor], window: Int64[Tensor, " length"]) -> Float[Tensor, ""]:
    logits = scores(window)[:-1]
    chunks = zip(logits.split(LOGITS_AT_ONCE), window[1:].to(logits.device).split(LOGITS_AT_ONCE), strict=True)
    total = sum(functional.cross_entropy(part.float(), target, reduction="sum").double() for part, target in chunks)
    return (total / (len(window) - 1)).cpu()


def token_ids(tokens: object, name: str = "tokens") -> Int64[Tensor, " n"]:
    """A row of token ids as int64, which embeddings take; any integer type may come in.

    Raises `UserError` that says what it is, for anything but a tensor of integers with one dimension.
    """
    if not isinstance(tokens, Tensor):
        raise UserError(f"{name} is of type {type(tokens).__name__}; expected a tensor of token ids, int64 [n]")
    if tokens.ndim != 1 or tokens.dtype not in INTEGERS:
        raise UserError(f"{name} is {tokens.dtype} {list(tokens.shape)}; expected token ids, int64 [n]")
    return tokens.long()


def begun(config, windows: Int64[Tensor, "windows tokens"]) -> Int64[Tensor, "windows tokens"]:
    """The windows, their first token replaced by the one that begins each text, for a model that cannot do without.

    Gemma was trained on texts that all begin with it, and without it has twice the perplexity: 42 instead of 21 for
    Gemma 3 270M. lm-eval and llama.cpp put it there, too. Other models get their windows as they are, as in the code of
    GPTQ, SparseGPT and Wanda. The first token of a window is never predicted, so the same tokens count in both cases.
    """
    if not config.model_type.startswith(BEGUN) or config.bos_token_id is None:
        return windows
    first = windows.new_full((len(windows), 1), config.bos_token_id)
    return torch.cat([first, windows[:, 1:]], dim=1)
