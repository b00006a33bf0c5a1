"""A packed draft changes how many passes there are, and not the text: greedy tokens, and the distribution of others."""

import re
from collections import Counter

import pytest
import torch

from tests.offload.conftest import GEMMA3, LAYERS, opened, pruned
from tests.offload.test_neuron_model import Packed, least_bytes
from toolkit.errors import UserError
from toolkit.formats.scaled import Scaled
from toolkit.models.cached_pass import CACHE
from toolkit.offload.budget import BudgetError
from toolkit.offload.draft import Speculative
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.speculation import Speculation
from toolkit.storage.packing import Linears, pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
COUNT = 30
GREEDY = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
SPREAD = LayerMap(0, 1, LAYERS - 1)
FORMS = {"endor": ("endor",), "rough": {"endor": lambda weight: Scaled.encode("endor", weight)}, "dense": ("dense",)}
pytestmark = pytest.mark.usefixtures("one_thread")


def packed(family, folder):
    """A model, dense and packed, and a rounded copy that agrees with most of its tokens."""
    model = pruned(family)
    for name, variants in FORMS.items():
        pack_model(model, folder / name, Linears(variants))
    return model, folder


@pytest.fixture(scope="module", params=["mistral", "opt", GEMMA3], ids=lambda family: str(family)[:9])
def every_family(request, tmp_path_factory):
    return packed(request.param, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return packed("llama", tmp_path_factory.mktemp("draft"))


def drafted(target, draft, settings=GREEDY, method=None, draft_tokens=None, **options):
    """The text, and what it took."""
    torch.manual_seed(0)
    with (
        OffloadedModel.open(draft, "endor_packed") as small,
        OffloadedModel.open(target, method, beside=small, **options) as model,
    ):
        return model.generate(PROMPT, draft=small, draft_tokens=draft_tokens, **settings), model.speculation


@pytest.mark.parametrize(("method", "draft_tokens"), [("dense", None), ("endor_packed", 5)])
def test_greedy_text_is_that_of_the_full_model(every_family, method, draft_tokens):
    model, folder = every_family
    expected = model.generate(PROMPT, **GREEDY)
    name = method.removesuffix("_packed")
    text, counts = drafted(folder / name, folder / "rough", method=method, draft_tokens=draft_tokens, placement=SPREAD)
    assert counts.close == 0, "random logits lie far apart"
    assert torch.equal(text, expected)
    assert counts.tokens == COUNT == 1 + counts.passes + counts.accepted
    assert counts.accepted <= counts.drafted <= (draft_tokens or 24) * counts.passes
    assert counts.accepted > 0


def test_a_draft_of_the_same_weights_is_always_right(folders):
    _, counts = drafted(folders[1] / "dense", folders[1] / "endor", draft_tokens=5)
    assert counts.acceptance == 1
    assert counts.passes == -(-(COUNT - 1) // 6)
    assert counts.tokens_a_pass == (COUNT - 1) / counts.passes


def test_a_draft_that_is_always_wrong_costs_passes_and_no_token(folders, monkeypatch):
    """Every drafted token is the one after the likeliest."""
    model, folder = folders
    with OffloadedModel.open(folder / "endor") as small, OffloadedModel.open(folder / "dense", beside=small) as target:
        forward = small.model.forward

        def wrong(**inputs):
            found = forward(**inputs)
            found.logits = found.logits.roll(1, -1)
            return found

        monkeypatch.setattr(small.model, "forward", wrong)
        text = target.generate(PROMPT, draft=small, draft_tokens=3, **GREEDY)
        counts = target.speculation
    assert torch.equal(text, model.generate(PROMPT, **GREEDY))
    assert counts.accepted < counts.drafted / 4


def test_settings_that_end_a_text_or_look_at_it_see_every_token(folders):
    model, folder = folders
    end = int(model.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] + 4])
    for more in ({"eos_token_id": end}, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}):
        text, _ = drafted(folder / "dense", folder / "rough", GREEDY | more)
        assert torch.equal(text, model.generate(PROMPT, **GREEDY, **more))


def test_a_streamer_gets_the_prompt_and_each_token_as_it_comes(folders):
    parts = []
    streamer = type(
        "Streamer", (), {"put": lambda self, ids: parts.append(ids), "end": lambda self: parts.append(None)}
    )
    text, _ = drafted(folders[1] / "dense", folders[1] / "endor", GREEDY | {"streamer": streamer()})
    assert parts.pop() is None
    assert torch.equal(parts[0], PROMPT)
    assert torch.cat(parts[1:]).tolist() == text[0, PROMPT.shape[1] :].tolist()


def test_sampled_text_has_the_distribution_of_the_full_model():
    """Two tokens by the exact probabilities of a model and a draft that differ much, 2,000 times."""
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]), torch.tensor([[0.1, 0.8, 0.1], [0.5, 0.25, 0.25]])
    torch.manual_seed(0)
    counted = Counter(sampled_pair(p, q) for _ in range(2000))
    for first in range(3):
        for second in range(3):
            expected = float(p[0, first] * p[first % 2, second])
            assert counted[first, second] / 2000 == pytest.approx(expected, abs=4 * (expected / 2000) ** 0.5 + 1e-3)


def sampled_pair(p, q):
    """The first two tokens of a text, whose next token depends on whether the last one is odd."""

    class Toy(torch.nn.Module):
        def __init__(self, chances):
            super().__init__()
            self.chances = chances

        def forward(self, input_ids, use_cache, logits_to_keep=0, **named):
            named[CACHE].length += input_ids.shape[1]
            logits = self.chances[input_ids % 2].log()
            return type("Output", (), {"logits": logits[:, -logits_to_keep:]})

    class Cache:
        layers, length = (), 0

        def get_seq_length(self):
            return self.length

        def crop(self, count):
            self.length += count

    config = type("Config", (), {"do_sample": True, "max_length": 4, "return_dict_in_generate": False})
    method, cache = Speculative(Toy(q), lambda tokens: None, 2), Cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.offload.draft.DynamicCache", Cache)
        ids = method(
            Toy(p),
            torch.tensor([[0]]),
            lambda ids, scores: scores,
            lambda ids, scores: torch.tensor([ids.shape[1] >= 4]),
            config,
            **{CACHE: cache},
        )
    assert cache.length == 3 or cache.length == 4  # the last token is not in the cache, unless the text ended there
    return int(ids[0, 1]), int(ids[0, 2])


def test_a_further_token_is_drafted_while_its_chance_exceeds_its_price():
    """A step of 0.1 s, and 20 tokens in 10 s so far: the seconds bring 0.2 tokens elsewhere. Four tokens of nine that
    the draft's own probabilities promised are trusted less.
    """
    assert Speculation(passes=5, drafted=30, accepted=15, draft_s=3.0, check_s=7.0).worth() == pytest.approx(0.1 * 2)
    assert Speculation(accepted=4, expected=9.0).trust() == pytest.approx(5 / 10)
    assert (Speculation().worth(), Speculation().trust()) == (0, 1)


def test_both_keep_within_one_budget_and_hold_once_what_they_share(folders):
    folder = folders[1]
    with OffloadedModel.open(folder / "endor") as alone:
        packed_bytes = alone.budgets["dram"].used_bytes
        rest = alone.budgets["dram"].taken["rest"]
    with OffloadedModel.open(folder / "rough", "endor_packed", dram_bytes=8 << 20) as small:
        before = small.budgets["dram"].used_bytes
        with OffloadedModel.open(folder / "endor", beside=small) as target:
            assert target.budgets["dram"].used_bytes - before == packed_bytes - rest
            assert target.budgets["dram"].used_bytes <= 8 << 20
            mine, its = (found.model.state_dict(keep_vars=True) for found in (target, small))
            names = [run.name for run in target.store.index.rest if run.name in mine]
            assert names
            assert all(mine[name].data_ptr() == its[name].data_ptr() for name in names)
    with OffloadedModel.open(folder / "rough", dram_bytes=4 << 20) as small:
        small.budgets["dram"].limit_bytes = small.budgets["dram"].used_bytes
        with pytest.raises(BudgetError) as refused:
            OffloadedModel.open(folder / "endor", beside=small)
        listed = re.findall(r"\w+ ([\d.]+) MB", str(refused.value).partition("(")[2])
        assert sum(map(float, listed)) == pytest.approx(refused.value.needed_bytes / 1e6, abs=0.05 * len(listed))
    with OffloadedModel.open(folder / "rough", dram_bytes=4 << 20) as small, pytest.raises(UserError, match="dram"):
        OffloadedModel.open(folder / "endor", beside=small, dram_bytes=1 << 20)


@pytest.mark.parametrize("tight", [False, True])
def test_a_target_by_neuron_reads_what_all_tokens_of_a_check_need(tmp_path, tight):
    by_neuron = Packed("llama", tmp_path / "neurons")
    pack_model(by_neuron.model, tmp_path / "rough", Linears(FORMS["rough"]))
    budget = least_bytes(by_neuron, predictors=by_neuron.predictors) if tight else None
    with (
        OffloadedModel.open(tmp_path / "rough", "endor_packed") as small,
        opened(by_neuron.folder, predictors=by_neuron.predictors, dram_bytes=budget) as target,
    ):
        text = target.generate(PROMPT, draft=small, **GREEDY)
        assert target.speculation.accepted
    assert torch.equal(text, by_neuron.expected(**GREEDY))


def test_a_draft_with_a_cache_of_its_own_forgets_what_was_rejected(every_family, monkeypatch):
    """Every second drafted token is wrong, so passes of three accept one token and none in turn."""
    model, folder = every_family
    monkeypatch.setattr("toolkit.offload.model.shares_cache", lambda *models: False)
    with OffloadedModel.open(folder / "endor") as small, OffloadedModel.open(folder / "dense", beside=small) as target:
        forward, calls = small.model.forward, []

        def wrong_in_turn(**inputs):
            found = forward(**inputs)
            calls.append(None)
            found.logits = found.logits.roll(len(calls) % 2, -1)  # the first call reads the prompt
            return found

        monkeypatch.setattr(small.model, "forward", wrong_in_turn)
        text = target.generate(PROMPT, draft=small, draft_tokens=3, **GREEDY)
        counts = target.speculation
    assert torch.equal(text, model.generate(PROMPT, **GREEDY))
    assert abs(counts.accepted - counts.passes / 2) <= 1


def test_another_model_of_the_same_vocabulary_drafts(folders, tmp_path):
    """It has other layers, heads and weights; what it drafts is checked like anything else."""
    model, folder = folders
    pack_model(pruned("qwen3"), tmp_path / "other", Linears(("endor",)))
    text, counts = drafted(folder / "dense", tmp_path / "other", draft_tokens=3)
    assert torch.equal(text, model.generate(PROMPT, **GREEDY))
    assert counts.drafted > 2 * counts.passes


def test_what_a_draft_cannot_do_is_refused(folders):
    folder = folders[1]
    with OffloadedModel.open(folder / "endor") as small, OffloadedModel.open(folder / "dense") as target:
        with pytest.raises(UserError, match="return_dict_in_generate"):
            target.generate(PROMPT, draft=small, return_dict_in_generate=True, **GREEDY)
        with pytest.raises(UserError, match="one text"):
            target.generate(PROMPT.expand(2, -1), draft=small, **GREEDY)
        other = small.model.config
        other.get_text_config().vocab_size += 1
        with pytest.raises(UserError, match=r"words, the model .* smaller model of the same vocabulary"):
            target.generate(PROMPT, draft=small, **GREEDY)
