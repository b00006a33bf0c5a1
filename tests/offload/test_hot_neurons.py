"""Hot neurons on a GPU that the CPU plays, cold ones on the CPU: together they give what one device gives."""

import numpy as np
import pytest
import torch

from tests.offload.conftest import in_parts, opened
from tests.offload.pretend import PretendGpu
from tests.offload.test_neuron_model import GREEDY, NEURONS, PROMPT, Packed, Recording
from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.offload import model as module
from toolkit.offload.budget import BudgetError
from toolkit.offload.by_neuron import USAGE
from toolkit.offload.neuron_ffn import choose
from toolkit.predictors.predictor import Predictor
from toolkit.sparsity.statistics import save_usage
from toolkit.sparsity.thresholds import thresholded
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import pack_model

LAYERS = 4
TOKENS = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
SUMS = {"rtol": 1e-4, "atol": 1e-4}  # fp32 sums in another order
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def gpu(monkeypatch):
    pretended = PretendGpu()
    monkeypatch.setattr(module, "open_device", lambda name: pretended)
    return pretended


@pytest.fixture(scope="module", params=["llama", "opt"])
def packed(request, tmp_path_factory):
    return Packed(request.param, tmp_path_factory.mktemp("hot") / request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Packed("llama", tmp_path_factory.mktemp("hot") / "llama")


def drawn_usage():
    """Some neurons of each layer are never used, and layers differ."""
    generator = torch.Generator().manual_seed(2)
    shares = [torch.rand(NEURONS, generator=generator) ** (layer + 1) for layer in range(LAYERS)]
    for layer in shares:
        layer[::7] = 0
    return shares


def row_bytes(packed):
    return (2 if decoder_ffns(packed.model)[0].gate is None else 3) * 48 * 4


def device_bytes(packed, neurons):
    """Room for the rest of the model and so many neurons."""
    with pytest.raises(BudgetError) as told:
        opened(packed.folder, device="cuda", usage=drawn_usage(), device_bytes=1)
    return told.value.needed_bytes + neurons * row_bytes(packed)


def logits(packed, parts=(12, 1, 1, 1, 5, 4), **options):
    """The logits of a prompt, of tokens one by one, and of a few at once."""
    with opened(packed.folder, **options) as ours:
        return in_parts(ours.model, TOKENS, parts)


@pytest.mark.parametrize(
    ("kind", "neurons"), [("all", 0), ("exact", 1), ("exact", 777), ("all", 777), ("exact", LAYERS * NEURONS)]
)
def test_both_together_give_what_the_cpu_gives_alone(packed, gpu, kind, neurons):
    predictors = packed.predictors if kind == "exact" else None
    alone = logits(packed, predictors=predictors)
    options = {"predictors": predictors, "usage": drawn_usage(), "device": "cuda"}
    found = logits(packed, **options, device_bytes=device_bytes(packed, neurons))
    torch.testing.assert_close(found, alone, **SUMS)
    with thresholded(packed.model, packed.thresholds), torch.no_grad():
        torch.testing.assert_close(found, packed.model(TOKENS).logits, rtol=1e-3, atol=1e-3)


def test_the_same_tokens_with_little_memory_on_both_sides(packed, gpu):
    options = {"predictors": packed.predictors, "usage": drawn_usage(), "device": "cuda"}
    options |= {"device_bytes": device_bytes(packed, 500)}
    with pytest.raises(BudgetError) as told:
        opened(packed.folder, **options, dram_bytes=1)
    for window in (5, 1, 0):
        found = packed.generated(GREEDY, **options, dram_bytes=told.value.needed_bytes, window=window)
        assert torch.equal(found, packed.expected(**GREEDY))


def test_hot_are_the_most_used_of_all_layers_as_many_as_fit():
    usage = [torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0.0, 0.7, 0.2])]
    for nbytes, hot in {
        99: [[], []],
        100: [[0], []],
        299: [[0], [1]],
        300: [[0, 2], [1]],
        500: [[0, 1, 2], [1, 2]],
        600: [[0, 1, 2], [1, 2]],  # neuron 0 of layer 1 is never used
    }.items():
        assert [np.flatnonzero(mask).tolist() for mask in choose(usage, [3, 3], nbytes, 100)] == hot
    with pytest.raises(UserError, match=r"usage of \[3, 3\] neurons, by layer: expected \[3, 4\]"):
        choose(usage, [3, 4], 100, 100)


def test_where_bytes_lie_and_what_is_computed_where(llama, gpu):
    budget = device_bytes(llama, 1000)
    options = {"predictors": llama.predictors, "usage": drawn_usage(), "device_bytes": budget + row_bytes(llama) - 1}
    with opened(llama.folder, **options, device="cuda") as ours:
        hot = [set(np.flatnonzero(mask).tolist()) for mask in ours.strategy.hot]
        assert sum(map(len, hot)) == 1000
        assert ours.budgets["device"].used_bytes == budget
        assert sum(buffer.numel() for buffer in gpu.device_buffers) == 1000 * row_bytes(llama)
        assert "rest" not in {name for name, nbytes in ours.budgets["dram"].taken.items() if nbytes}
        at_first = ours.timeline
        ours.generate(PROMPT, **GREEDY)
        spans = ours.timeline.spans[len(at_first.spans) :]
        for ffn, there in zip(ours.strategy.ffns, hot, strict=True):
            assert there.isdisjoint(np.flatnonzero(ffn.store.residency.held).tolist())
        loaded = sum(ffn.store.rows_loaded for ffn in ours.strategy.ffns)
    assert sum(span.nbytes for span in at_first.spans if span.stage == "copy") == 1000 * row_bytes(llama)
    assert sum(span.nbytes for span in at_first.spans if span.stage == "read") == 1000 * 4096  # a bundle takes a block
    assert sum(span.nbytes for span in spans if span.stage == "read") == loaded * 4096
    assert not any(span.stage == "copy" for span in spans)  # hot neurons stay
    passes = GREEDY["max_new_tokens"]
    on_device = [span for span in spans if (span.op, span.tier) == ("ffn", "device")]
    assert sum(span.nbytes for span in on_device) == passes * 1000 * row_bytes(llama)
    assert len(on_device) == passes * LAYERS
    cold = [span for span in spans if (span.op, span.tier) == ("ffn", "dram")]
    assert len(cold) >= passes * LAYERS
    linears = {span.tier for span in spans if span.stage == "compute" and span.op not in ("ffn", "predictor")}
    assert linears == {"device"}


class Changed(Predictor):
    """An exact predictor whose masks are changed."""

    def __init__(self, exact, change):
        self.exact, self.change = exact, change

    @property
    def shape(self):
        return self.exact.shape

    def mask(self, x):
        return self.change(self.exact.mask(x))


def test_hot_neurons_count_where_they_are_predicted_or_with_held_ones_always(llama, gpu):
    """With held ones an inexact predictor gives what it would give with the hot neurons added to its own."""
    half = torch.arange(NEURONS) % 2 == 0
    options = {"usage": drawn_usage(), "device": "cuda", "device_bytes": device_bytes(llama, 900)}
    inexact = [Changed(exact, lambda mask: mask & half) for exact in llama.predictors]
    with opened(llama.folder, predictors=inexact, **options) as ours:
        hot = [torch.from_numpy(mask) for mask in ours.strategy.hot]
    more = [
        Changed(exact, lambda mask, there=there: mask & half | there)
        for exact, there in zip(llama.predictors, hot, strict=True)
    ]
    alone, found = logits(llama, predictors=inexact), logits(llama, predictors=inexact, neurons="held", **options)
    torch.testing.assert_close(found, logits(llama, predictors=more), **SUMS)
    assert not torch.allclose(found, alone, **SUMS)
    torch.testing.assert_close(logits(llama, predictors=inexact, **options), alone, **SUMS)


def test_predictors_with_a_state_learn_of_hot_neurons_too(llama, gpu):
    """They are told of every neuron that fired, wherever it was computed."""
    runs = []
    for options in ({}, {"device": "cuda", "usage": drawn_usage(), "device_bytes": device_bytes(llama, 2000)}):
        predictors = [Recording(NEURONS, 48) for _ in range(LAYERS)]
        logits(llama, parts=(20, 1, 1, 1, 1), predictors=predictors, **options)
        runs.append([each.fired for each in predictors])
    for alone, both in zip(*runs, strict=True):
        assert len(alone) == len(both) == 24
        differ = sum(len(np.setxor1d(one, other)) for one, other in zip(alone, both, strict=True))
        assert differ <= 0.001 * sum(map(len, alone))  # outputs at the threshold, summed in another order


def test_usage_that_was_packed_with_the_model_is_taken(llama, gpu, tmp_path):
    save = lambda place: save_usage(place / USAGE, "tiny", drawn_usage())  # noqa: E731
    thresholds, settings = Neurons(llama.thresholds.tolist()), {"files": save}
    pack_model(llama.model, tmp_path / "store", thresholds, "tiny", **settings)
    budget = {"device": "cuda", "device_bytes": device_bytes(llama, 600)}
    chosen = []
    for folder, options in ((tmp_path / "store", {}), (llama.folder, {"usage": drawn_usage()})):
        with opened(folder, **budget, **options) as ours:
            chosen.append(ours.strategy.hot)
    assert all(np.array_equal(one, other) for one, other in zip(*chosen, strict=True))
    pack_model(llama.model, tmp_path / "other", thresholds, "large", **settings)
    for folder, options, told in [
        (tmp_path / "other", {}, "usage of neurons of model 'tiny'; expected 'large'"),
        (llama.folder, {}, "does not say which neurons are used most: pack it again, or give usage="),
        (llama.folder, {"usage": drawn_usage(), "reader": "kvikio"}, "reader='kvikio': .* holds neurons"),
    ]:
        with pytest.raises(UserError, match=told):
            opened(folder, **budget, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_gives_what_the_cpu_gives_alone(packed):
    alone = logits(packed, predictors=packed.predictors)
    options = {"usage": drawn_usage(), "device": "cuda", "device_bytes": device_bytes(packed, 777)}
    with opened(packed.folder, predictors=packed.predictors, **options) as ours, torch.no_grad():
        for _ in range(2):
            found = ours.model(TOKENS.to("cuda")).logits.cpu()
            torch.testing.assert_close(found, alone, rtol=1e-2, atol=1e-2)
