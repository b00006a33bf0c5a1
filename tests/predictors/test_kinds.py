"""Each kind of predictor: what one token gets, what many get, and the model with predictors in place."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from toolkit.models.ffn import decoder_ffns
from toolkit.predictors import (
    PREDICTORS,
    Context,
    FewBits,
    Gate,
    LowRank,
    Scored,
    predicted,
    prediction_quality,
    with_limits,
)
from toolkit.quality import perplexity
from toolkit.sparsity import thresholded


@pytest.fixture(params=["llama", "opt"])
def family(request):
    return request.param


STATELESS = [name for name, kind in PREDICTORS.items() if not kind.stateful]
SCORED = [name for name, kind in PREDICTORS.items() if issubclass(kind, Scored)]


@pytest.fixture(params=STATELESS)
def kind(request, family):
    if request.param == "gate" and family == "opt":
        pytest.skip("OPT's FFN has no gate")
    return request.param


@pytest.mark.parametrize("kind", PREDICTORS)
def test_each_layer_gets_a_predictor_of_its_shape(setting, predictors_of, kind):
    model, limits, samples = setting()
    predictors = predictors_of(kind, model, limits, samples)
    assert {predictor.name for predictor in predictors} == {kind}
    assert [predictor.shape for predictor in predictors] == [(48, 32)] * samples.layers
    if not PREDICTORS[kind].trained:
        with pytest.raises(ValueError, match="shorter"):
            predictors_of(kind, model, limits[:-1], samples)


def test_one_token_gets_what_many_get(setting, predictors_of, family, kind):
    model, limits, samples = setting(family)
    for predictor, x in zip(predictors_of(kind, model, limits, samples), samples.inputs, strict=True):
        mask, sure = predictor.mask(x), torch.ones(len(x), 48, dtype=torch.bool)
        assert mask.shape == sure.shape
        if isinstance(predictor, Scored):  # sums may end otherwise
            scores = predictor.scores(x)
            assert torch.equal(mask, scores > predictor.limit)
            sure = (scores - predictor.limit).abs() > 0.02 * scores.abs()
        for token in range(3):
            neurons = predictor.predict(Context(0, (x[token].float(),)))
            assert neurons.dtype == np.int64
            assert (np.diff(neurons) > 0).all()
            found = torch.zeros(48, dtype=torch.bool)
            found[neurons] = True
            assert torch.equal(found[sure[token]], mask[token][sure[token]])


def test_with_every_neuron_or_an_oracle_it_is_the_thresholded_model(setting, predictors_of, tokens, family):
    model, limits, samples = setting(family)
    with thresholded(model, limits):
        expected = model(tokens[None, :16]).logits
    for kind in ("all", "oracle"):
        with predicted(model, limits, predictors_of(kind, model, limits, samples)):
            assert torch.equal(model(tokens[None, :16]).logits, expected)
    with predicted(model, limits, [None] * samples.layers):
        assert torch.equal(model(tokens[None, :16]).logits, expected)


def test_the_gate_is_exact_by_its_own_criterion(setting, predictors_of, tokens):
    model, limits, samples = setting()
    gates = predictors_of("gate", model, limits, samples)
    with thresholded(model, limits, "gate"):
        expected = model(tokens[None, :16]).logits
    with predicted(model, torch.full((3,), -1.0), gates):  # no threshold but the predictors' own
        assert torch.equal(model(tokens[None, :16]).logits, expected)


def test_what_is_not_predicted_counts_as_zero(setting, predictors_of, tokens):
    """The same as a model whose down projection masks its own input."""
    model, limits, samples = setting()
    predictors = predictors_of("low_rank", model, limits, samples)
    with predicted(model, limits, predictors):
        found = perplexity(model, tokens, 16, 2)
    for ffn, limit, predictor in zip(decoder_ffns(model), limits, predictors, strict=True):
        up, down = ffn.up.forward, ffn.down.forward
        seen = {}
        ffn.up.forward = lambda x, up=up, seen=seen: up(seen.setdefault("x", x))

        def masked(y, down=down, seen=seen, limit=limit, predictor=predictor):
            wanted = predictor.scores(seen.pop("x").flatten(0, 1)) > predictor.limit
            return down(torch.where((y.float().abs() > limit) & wanted.view(y.shape), y, 0))

        ffn.down.forward = masked
    assert found == perplexity(model, tokens, 16, 2)


@torch.no_grad()
def test_neurons_of_the_prompt_are_not_left_to_predictors(setting, predictors_of, tokens):
    model, limits, samples = setting()
    nothing = [dataclasses.replace(one, limit=1e9) for one in predictors_of("low_rank", model, limits, samples)]
    with thresholded(model, limits):
        expected = model(tokens[None, :16]).logits
    with predicted(model, limits, nothing, prompt=5):
        found = model(tokens[None, :16]).logits
    assert torch.equal(found[:, :5], expected[:, :5])
    assert not torch.isclose(found[:, 5:], expected[:, 5:]).all(-1).any()


@pytest.mark.parametrize("zeros", [0.5, 0.9])
def test_quality_counts_what_is_there(setting, predictors_of, family, kind, zeros):
    model, limits, samples = setting(family, zeros)
    table = prediction_quality(predictors_of(kind, model, limits, samples), samples)
    for row, predictor in zip(table.itertuples(), predictors_of(kind, model, limits, samples), strict=True):
        found = predictor.mask(samples.inputs[row.layer]).numpy()
        active = samples.outputs[row.layer].float().numpy() != 0
        assert row.predicted == pytest.approx(found.mean())
        assert row.recall == pytest.approx((found & active).sum() / active.sum())
        precision = (found & active).sum() / found.sum() if found.any() else np.nan
        assert row.precision == pytest.approx(precision, nan_ok=True)
        assert row.false_positives == pytest.approx((found & ~active).sum() / (~active).sum())
        assert row.nbytes == predictor.nbytes
    if kind in ("all", "oracle"):
        assert (table["recall"] == 1).all()
        assert (table["kept"] == 1).all()


@pytest.mark.parametrize("kind", SCORED)
def test_limits_keep_what_is_asked_and_no_more(setting, predictors_of, kind):
    model, limits, samples = setting()
    predictors = with_limits(predictors_of(kind, model, limits, samples), samples, 0.9)
    for layer, predictor in enumerate(predictors):
        scores, sizes = predictor.scores(samples.inputs[layer]), samples.magnitudes(layer)
        assert sizes[scores > predictor.limit].sum() >= 0.9 * sizes.sum() * (1 - 1e-6)
        above = scores[scores > predictor.limit].min()  # the next limit up loses too much
        assert sizes[scores > above].sum() < 0.9 * sizes.sum()


def test_four_bits_are_rounded_weights(setting):
    """Against a product with the weights rounded group by group, in float32.

    More tokens than inputs are multiplied by decoded weights.
    """
    model, _, samples = setting()
    ffn, x = decoder_ffns(model)[0], samples.inputs[0].float()
    rounded = []
    for linear in (ffn.gate, ffn.up):
        weight = linear.weight.float()
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        step = (high - low) / 15
        rounded.append(((weight - low) / step).round() * step + low)
    expected = functional.silu(x @ rounded[0].T) * (x @ rounded[1].T)
    predictor = FewBits.of(ffn, "silu", 0.0)
    few, many = predictor.scores(x[:4]), predictor.scores(x[:4].repeat(ffn.up.in_features, 1))[:4]
    assert (few - expected[:4].abs()).abs().max() < 0.05 * expected.abs().max()
    assert (few - many).abs().max() < 0.02 * few.abs().max()


def test_bytes_are_those_in_memory(setting):
    ffn = decoder_ffns(setting()[0])[0]
    assert FewBits.of(ffn, "silu", 0.0).nbytes == 96 * 32 // 2 + 96 * 2 * 2  # codes, and two bf16 a row
    assert Gate.of(ffn, "silu", 0.0).nbytes == 48 * 32 * 2 + 48 * 4
    assert LowRank(0.0, torch.zeros(4, 32), torch.zeros(48, 4), torch.zeros(48)).nbytes == 4 * (4 * 80 + 48)
