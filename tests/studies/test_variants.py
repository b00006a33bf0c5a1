"""Variants of a tiny model: what is evaluated is what the packed weights decode to, and the bytes are theirs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.quality import perplexity
from toolkit.sparsity import Calibration, calibration, prune
from toolkit.sparsity.layerwise import Pruning, change_blocks
from toolkit.studies import loaded, quality
from toolkit.studies import variants as study
from toolkit.studies.forms import CALIBRATED, FORMS, SPQR, entropy_bits, size_of, store
from toolkit.studies.quality import EvaluationSettings
from toolkit.studies.variants import (
    ModelVariant,
    by_variant,
    compare_variants,
    pareto_front,
)

TOKENS = torch.arange(128) * 7 % 61
SETTINGS = EvaluationSettings("tiny", "text", sequence_length=16, windows=4)


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, initializer_range=0.2, **sizes)).eval()


def pruned(method="dense", sparsity=0.5, pattern=None):
    model = tiny()
    if method != "dense":
        prune(model, method, sparsity, pattern, calibration=TOKENS.view(-1, 16))
    return model


def linears(model):
    return [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]


@pytest.fixture
def evaluated(monkeypatch, tmp_path, one_thread):
    """A tiny model and text in place of the real ones, an empty cache, and what was pruned."""
    made, model = [], tiny().requires_grad_(False)

    def change_loaded(model, tokenizer, name, change, calibration):
        made.append((name, change, calibration))
        cut = TOKENS.view(-1, 16)[: calibration.windows]
        statistics = [record for block in change_blocks(model, change, cut) for record in block.statistics]
        return SimpleNamespace(statistics=statistics)

    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    for module in (study, quality, loaded):
        monkeypatch.setattr(module, "loaded", lambda name: (model, "tokenizer", "checksum"))
    monkeypatch.setattr(calibration, "load_tokens", lambda *_: TOKENS)
    monkeypatch.setattr(quality, "tokens_of", lambda *_: TOKENS)
    monkeypatch.setattr(study, "change_loaded", change_loaded)
    return made


def stored_size(model, form):
    return size_of([linear.weight for linear in linears(model)], store(model, form), form)


def test_bytes_are_the_packed_ones_and_the_weights_what_they_decode_to():
    for form, encoded in FORMS.items():
        model = pruned("magnitude", pattern="2:4")
        packed = [encoded(linear.weight) for linear in linears(model)]
        elements = sum(linear.weight.numel() for linear in linears(model))
        size = stored_size(model, form)
        assert size["bits_per_weight"] == 8 * sum(each.nbytes for each in packed) / elements, form
        assert size["ratio"] == size["bits_per_weight"] / 16
        for linear, each in zip(linears(model), packed, strict=True):
            assert torch.equal(linear.weight, each.decode().float()), form
        assert size["zeros"] == sum(int((each.decode() == 0).sum()) for each in packed) / elements, form


def _head_inputs(model):
    windows = Calibration(windows=2, sequence_length=16).draw(TOKENS)
    return model.base_model(windows).last_hidden_state.flatten(0, 1).detach().float()


def test_a_head_has_a_form_and_is_restored(evaluated):
    """Its bytes and weights count beside those of the linears, and an embedding that it shares stays as it is."""
    model = study.loaded("tiny")[0]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    before, kept = head.weight, embedding.clone()
    packed = FORMS["int8"](before.detach())
    with ModelVariant("int8, head too").change(SETTINGS) as facts:
        assert torch.equal(head.weight, packed.decode().to(head.weight.dtype))
        assert torch.equal(embedding, kept)
        weights = [linear.weight for linear in linears(model)]
        nbytes = packed.nbytes + sum(FORMS["int8"](weight).nbytes for weight in weights)
        elements = before.numel() + sum(weight.numel() for weight in weights)
        assert facts["bits_per_weight"] == pytest.approx(8 * nbytes / elements)
    assert head.weight is before
    with ModelVariant("int3, spqr 1 %, head too", calibration_windows=2).change(SETTINGS):
        chosen, inputs = head.weight.detach().clone(), _head_inputs(model)
    plain = SPQR["int3, spqr 1 %"].round(before.detach().float()).decode()
    error, rounded = (((weight.float() - before) @ inputs.T).norm() for weight in (chosen, plain))
    assert error < rounded  # its inputs count
    with pytest.raises(UserError, match="form of a head"):
        ModelVariant("int3, gptq, head too")


def test_bits_of_known_forms():
    model = pruned("magnitude", pattern="2:4")
    expected = {"fp16": 16, "fp16, 2:4": 9, "int8": 8 + 16 / 64, "int8, 2:4": 5 + 16 / 64, "int4, hqq": 4.5}
    assert {form: stored_size(pruned(), form)["bits_per_weight"] for form in ("fp16", "int8", "int4, hqq")} == {
        form: expected[form] for form in ("fp16", "int8", "int4, hqq")
    }
    assert stored_size(model, "fp16, 2:4")["bits_per_weight"] == expected["fp16, 2:4"]
    half = stored_size(pruned("wanda"), "fp16, endor")
    weight = linears(pruned("wanda"))[0].weight.half()
    assert half["bits_per_weight"] == pytest.approx(8 * encode("endor", weight).nbytes / weight.numel())
    assert half["entropy_bits"] == 9  # one bit for a coin's toss, half of 16
    assert math.isnan(stored_size(pruned(), "int8")["entropy_bits"])


def test_entropy_by_hand():
    assert entropy_bits(0, 16) == 16
    assert entropy_bits(1, 16) == 0
    assert entropy_bits(0.75, 8) == pytest.approx(2 + 0.75 * math.log2(4 / 3) + 0.25 * 2)
    with pytest.raises(UserError, match=r"sparsity 1\.5 is out of range"):
        entropy_bits(1.5, 16)


def test_the_front_by_hand():
    size, cost = pd.Series([16, 9, 8, 8, 4], index=list("abcde")), pd.Series([10, 12, 10, 11, 13], index=list("abcde"))
    assert pareto_front(size, cost).to_dict() == {"a": False, "b": False, "c": True, "d": False, "e": True}
    assert pareto_front(pd.Series([1, 1]), pd.Series([2, 2])).all()  # equals do not beat each other


def test_one_row_a_variant_with_the_mean_of_its_tasks():
    one = {"metric": "one", "value": 0.5, "standard_error": 0.03, "chance": 0.25}
    two = {"metric": "two", "value": 0.7, "standard_error": 0.04, "chance": 0.5}
    rows = []
    for form, bits, value in (("fp16", 16.0, 10.0), ("int8", 8.0, 10.5), ("int8, endor", 9.0, 40.0)):
        labels = {"form": form, "method": "dense", "pattern": "none", "zeros": 0.5, "bits_per_weight": bits}
        labels |= {"ratio": bits / 16, "entropy_bits": None}
        rows += [labels | {"metric": "perplexity", "value": value}, labels | one, labels | two]
    summary = by_variant(pd.DataFrame(rows))
    assert summary["perplexity"].tolist() == [10.0, 10.5, 40.0]
    assert summary["on_front"].tolist() == [True, True, False]
    first = summary.iloc[0]
    assert [first["accuracy"], first["chance"]] == pytest.approx([0.6, 0.375])
    assert first["accuracy_error"] == pytest.approx(0.05 / 2)


def test_rows_are_what_was_evaluated_and_kept(evaluated):
    variants = [
        ModelVariant(),
        ModelVariant("int8, endor", "wanda", 0.6),
        ModelVariant("fp16, 2:4", "wanda", 0.5, "2:4"),
    ]
    table = compare_variants(variants, SETTINGS)
    assert [change for _, change, _ in evaluated] == [Pruning.by("wanda", 0.6), Pruning.by("wanda", pattern="2:4")]
    assert table["pattern"].tolist() == ["none", "60 %", "2:4"]
    for variant, row in zip(variants, table.to_dict("records"), strict=True):
        model = pruned(variant.method, variant.sparsity, variant.pattern)
        size = stored_size(model, variant.form)
        expected = perplexity(model, TOKENS, 16, 4)
        assert row["value"] == pytest.approx(expected, rel=1e-9)
        assert row["bits_per_weight"] == pytest.approx(size["bits_per_weight"])
    again = compare_variants(variants, SETTINGS)
    pd.testing.assert_frame_equal(table, again)
    assert len(evaluated) == 2
    compare_variants(variants[1:2], replace(SETTINGS, windows=2))
    assert len(evaluated) == 3


def test_calibration_sees_the_text_of_the_evaluation_or_another_one(evaluated):
    one, other = (
        ModelVariant("fp16, endor", "wanda", 0.5),
        ModelVariant("fp16, endor", "wanda", 0.5, calibration_corpus="another text"),
    )
    table = compare_variants([one, other], SETTINGS)
    assert [calibration.corpus for _, _, calibration in evaluated] == ["text", "another text"]
    assert table["corpus"].tolist() == ["text", "text"]
    assert table["calibration_corpus"].fillna("the same").tolist() == ["the same", "another text"]
    assert "calibration_corpus" not in compare_variants([one], SETTINGS)


def test_calibrated_forms_are_quantised_block_by_block(evaluated):
    expected = tiny().requires_grad_(False)
    list(change_blocks(expected, CALIBRATED["int3, gptq 16"], TOKENS.view(-1, 16)[:4]))
    table = compare_variants([ModelVariant("int3, gptq 16", calibration_windows=4, seed=2)], SETTINGS)
    (asked,) = evaluated
    assert asked == ("tiny", CALIBRATED["int3, gptq 16"], Calibration("text", 4, SETTINGS.sequence_length, 2))
    row = table.iloc[0]
    assert row["value"] == pytest.approx(perplexity(expected, TOKENS, 16, 4), rel=1e-9)
    grid_bytes = 8 * 7  # bits and group of each matrix, 7 of which a block has
    elements = sum(linear.weight.numel() for linear in linears(expected))
    assert row["bits_per_weight"] == pytest.approx(3 + 2 * 16 / 16 + 8 * grid_bytes / elements)
    assert all(map(torch.equal, quality.loaded("tiny")[0].parameters(), tiny().parameters()))  # as before
