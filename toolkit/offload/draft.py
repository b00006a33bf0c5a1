"""Speculative decoding with a packed copy of the same model as the draft, or with a smaller model of the same words.

LLM in a flash, section 5.2, takes a smaller model; SubSpec, 2025, a copy.

    with OffloadedModel.open(packed) as draft, OffloadedModel.open(dense, beside=draft) as model:
        tokens = model.generate(**prompt, max_new_tokens=40, draft=draft)
        model.speculation.tokens_a_pass

The draft proposes tokens one by one, and one pass of the full model checks them all: from disk that pass costs about
the same for one token and for ten. A copy and its model use one key-value cache: the draft sees what the full model
has stored for every checked token, so it needs no pass over the prompt and no memory of its own. A smaller model has a
cache of its own.

Greedy text is that of the full model's own passes over several tokens. Sampled text has the full model's distribution
(Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, section 2.3).
"""

import time
from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from toolkit.errors import UserError
from toolkit.models.cached_pass import CACHE, cached_pass
from toolkit.offload.speculation import Proposal, Speculation, check_words

ROUNDING = 4  # units in the last place of a logit, by which passes over several tokens and over one may differ
WORDS = "vocab_size"
SHARED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")

Scores = Float[Tensor, " vocabulary"]


def shares_cache(model: nn.Module, draft: nn.Module) -> bool:
    """Whether a draft can use the model's key-value cache. Raises `UserError` for one of another vocabulary."""
    here, there = (found.config.get_text_config() for found in (model, draft))
    check_words(*(getattr(found, WORDS, None) for found in (here, there)))
    same = all(getattr(here, name, None) == getattr(there, name, None) for name in SHARED)
    return same and model.dtype == draft.dtype


class Speculative:
    """A decoding method (`custom_generate`) for transformers' `generate`, which supplies logits processors and so on.

    `settle(tokens)` is called after each check with the number of tokens that count. `fixed` is how many tokens are
    drafted a pass; None drafts while a further token is worth its time, `MOST_DRAFTED` at most. `streamer` is the one
    of `generate`, which does not pass it to custom methods. `shares` is what `shares_cache` says.
    """

    def __init__(
        self, draft: nn.Module, settle: Callable[[int], None], fixed: int | None = None, streamer=None, shares=True
    ):
        if fixed is not None and fixed < 1:
            raise UserError(f"draft_tokens {fixed}: expected 1 or more, or None")
        self.draft, self.settle, self.fixed, self.streamer, self.shares = draft, settle, fixed, streamer, shares
        self.counts = Speculation()

    def __call__(
        self,
        model: nn.Module,
        input_ids: Int64[Tensor, "texts tokens"],
        logits_processor: Callable,
        stopping_criteria: Callable,
        generation_config,
        **inputs: object,
    ) -> Int64[Tensor, "texts more"]:
        """The prompt and the text after it. Raises `UserError` for several texts, padding, or a request for scores."""
        cache = _checked_cache(input_ids, generation_config, inputs)
        text = _Text(input_ids, logits_processor, stopping_criteria, generation_config.do_sample, self.streamer)
        given = input_ids[:, cache.get_seq_length() :]
        logits = cached_pass(model, given, cache, logits_to_keep=1).logits
        _keep_past(cache, generation_config.max_length)
        own = cache if self.shares else self._read(input_ids, generation_config.max_length)
        text.add(text.choose(text.scores(logits[0, -1])), self.counts)
        while not text.ended:
            self._pass(model, text, cache, own, generation_config.max_length)
        if self.streamer is not None:
            self.streamer.end()
        return text.ids

    def _read(self, ids: Tensor, most: int) -> DynamicCache:
        """The draft's own cache, once it has read the prompt."""
        own = DynamicCache(config=self.draft.config.get_text_config(decoder=True))
        cached_pass(self.draft, ids, own, logits_to_keep=1)
        _keep_past(own, most)
        return own

    def _pass(self, model: nn.Module, text: "_Text", cache: DynamicCache, own: DynamicCache, most: int) -> None:
        """Draft some tokens, check them in one pass of the model, and add those that it accepts and one more."""
        counts, begun_s = self.counts, time.perf_counter()
        drafted, proposed, promised = self._drafted(text, own, most - text.ids.shape[1] - 1)
        counts.check(promised)
        if own is cache:
            cache.crop(-len(proposed))
        counts.draft_s += (drafted_s := time.perf_counter()) - begun_s
        given = torch.cat([text.ids[:, -1:], drafted], dim=1)
        logits = cached_pass(model, given, cache).logits[0]
        added = 0
        for place, token in enumerate([*drafted[0].tolist(), None]):
            chosen = text.checked(logits[place], token, proposed[place] if token is not None else None)
            counts.close += _is_close(logits[place])
            accepted = token is not None and chosen == token
            text.add(chosen, counts)
            if accepted:
                counts.accept(promised, place)
            added += accepted
            if text.ended or not accepted:
                break
        cache.crop(added - drafted.shape[1])
        if own is not cache:  # it lacks the last drafted token, which may count
            own.crop(min(0, added + 1 - drafted.shape[1]))
        self.settle(added + 1)
        counts.check_s += time.perf_counter() - drafted_s

    def _drafted(
        self, text: "_Text", own: DynamicCache, most: int
    ) -> tuple[Int64[Tensor, "1 drafted"], list[Scores], list[float]]:
        """The drafted tokens, the scores that each was chosen by, and its probability under the draft."""
        ids, proposed, proposal = text.ids, [], Proposal(self.counts, most, self.fixed)
        while proposal.goes_on:
            given = ids[:, own.get_seq_length() :]
            logits = cached_pass(self.draft, given, own).logits[0, -1]
            proposed.append(text.scores(logits, ids))
            token = text.choose(proposed[-1])
            proposal.add(float(logits.float().softmax(-1)[token]))
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
        return ids[:, text.ids.shape[1] :], proposed, proposal.promised


class _Text:
    """A text that grows, with what says how its tokens are chosen and when it ends."""

    def __init__(self, ids: Tensor, processor: Callable, criteria: Callable, sampled: bool, streamer):
        self.ids, self.ended = ids, False
        self._processor, self._criteria, self._sampled, self._streamer = processor, criteria, sampled, streamer

    def scores(self, logits: Scores, ids: Tensor | None = None) -> Scores:
        """Logits after the settings of `generate`: temperature, top-k and the like."""
        return self._processor(self.ids if ids is None else ids, logits.float()[None])[0]

    def choose(self, scores: Scores) -> int:
        """The likeliest token, or a sampled one."""
        return int(scores.softmax(-1).multinomial(1) if self._sampled else scores.argmax())

    def checked(self, logits: Scores, drafted: int | None, proposed: Scores | None) -> int:
        """The text's next token, by the full model's logits: the drafted one if it is accepted.

        A sampled one is accepted with the chance p/q, its probability by the model over that by the draft. Another
        token is drawn from what p exceeds q by, so that the text follows p in any case.
        """
        scores = self.scores(logits)
        if not self._sampled or drafted is None:
            return self.choose(scores)
        wanted, chances = scores.softmax(-1), proposed.softmax(-1)
        if float(torch.rand(())) * float(chances[drafted]) < float(wanted[drafted]):
            return drafted
        return int((wanted - chances).clamp(min=0).multinomial(1))

    def add(self, token: int, counts: Speculation) -> None:
        """Add a token, hand it to the streamer, and see whether the text has ended."""
        self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
        counts.tokens += 1
        if self._streamer is not None:
            self._streamer.put(self.ids[0, -1:].cpu())
        self.ended = bool(self._criteria(self.ids, None).all())


def _checked_cache(input_ids: Tensor, config, inputs: dict[str, object]) -> DynamicCache:
    """The key-value cache. Raises `UserError` for settings that exclude a draft."""
    if len(input_ids) != 1:
        raise UserError(f"{len(input_ids)} texts at once: a draft goes with one text; leave draft out")
    if inputs.get("attention_mask") is not None:
        raise UserError("attention_mask: a draft goes with a text without padding; leave the padding or the draft out")
    if config.return_dict_in_generate:
        raise UserError("return_dict_in_generate=True: with a draft only tokens are returned; leave it or draft out")
    if type(cache := inputs.get(CACHE)) is not DynamicCache:
        raise UserError(f"a draft needs a cache that can be cut: leave {CACHE} and cache_implementation out")
    return cache


def _keep_past(cache: DynamicCache, length: int) -> None:
    """Let layers with sliding attention keep positions that a rejected token would push out of a full window."""
    windows = [layer.sliding_window for layer in cache.layers if layer.is_sliding]
    if windows and length >= min(windows):
        cache.activate_past_recording()


def _is_close(logits: Scores) -> bool:
    """Whether the two largest logits differ by no more than rounding in their type."""
    first, second = logits.topk(2).values.tolist()
    return first - second <= ROUNDING * torch.finfo(logits.dtype).eps * abs(first)
