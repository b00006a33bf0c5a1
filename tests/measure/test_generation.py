from dataclasses import replace

import pandas as pd
import pytest
import torch

from tests.models.test_twins import TOYS
from toolkit import paths
from toolkit.errors import UserError
from toolkit.measure import generation, turns
from toolkit.measure.contestant import Reference
from toolkit.measure.generation import GenerationRace, generation_measurements, generation_words
from toolkit.models import shapes
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload

PHASES = ("prompt", "generation")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def toys(**sizes):
    return GenerationRace(Workload("toy-opt"), 3, **sizes)


def test_every_way_batch_and_phase_has_its_row(toy):
    table = generation_measurements(toys(prompt_tokens=5, new_tokens=3, batches=[2, 1]))
    rows = table.set_index(["batch", "phase", "method"])
    assert not rows.index.has_duplicates
    ours = {(batch, phase, method) for batch in (1, 2) for phase in PHASES for method in ("dense", "endor")}
    packed = {(1, "generation", "endor_packed")}  # elsewhere it decodes, as endor does
    assert set(rows.index) == ours | packed | {(1, phase, "accelerate") for phase in PHASES}
    assert (rows.loc[(slice(None), slice(None), "dense"), "speedup"] == 1).all()
    layer_bytes = sum(outputs * inputs * 2 for outputs, inputs in TOYS["toy-opt"].values())
    dense = rows.loc[(2, "generation", "dense")]
    assert dense["read_bytes"] == pytest.approx(3 * layer_bytes, rel=0.35)  # a layer on either side of the window
    assert dense["bytes_a_token"] == dense["read_bytes"] / 2
    assert dense["tokens_per_s"] == pytest.approx(2 / dense["seconds"])
    prompt = rows.loc[(2, "prompt", "dense")]
    assert prompt["tokens_per_s"] == pytest.approx(2 * 5 / prompt["seconds"])


def test_passes_give_what_one_pass_over_all_tokens_gives(toy):
    model = twin_model("toy-opt", 2, torch.float32)
    text = generation._text(model, 2, 4, 3)
    assert [tuple(tokens.shape) for tokens in text.inputs] == [(2, 4), (2, 1), (2, 1)]
    with torch.no_grad():
        whole = model(torch.cat(text.inputs, 1)).logits
    for step, expected in text.reference._outputs.items():
        assert torch.allclose(whole[:, 3 + step], expected, atol=1e-5)
        if step < 2:
            assert torch.equal(expected.argmax(-1, keepdim=True), text.inputs[step + 1])


def runs(**seconds: list[float]) -> pd.DataFrame:
    """Turns of a generation step, at 16 bytes dense and 9 packed."""
    rows = [
        {"method": method, "repetition": number, "seconds": found, "read_bytes": 9 if method == "endor" else 16}
        for method, each in seconds.items()
        for number, found in enumerate(each, 1)
    ]
    shared = {
        "policy": "pipelined",
        "batch": 1,
        "phase": "generation",
        "mode": "direct",
        "measured_at": "now",
        "disturbed": False,
    }
    return pd.DataFrame(rows).assign(**shared, tokens_per_s=1.0, bytes_a_token=1.0)


@pytest.mark.parametrize(("dense", "speedup", "fault"), [([1.5, 1.5], 1.5, False), ([2.0, 2.0], 2.0, True)])
def test_a_speed_up_above_its_byte_limit_is_a_fault(dense, speedup, fault):
    table = generation._summary(runs(dense=dense, endor=[1.0, 1.0], accelerate=[9.0, 9.0])).set_index("method")
    assert table["speedup"]["endor"] == speedup
    assert table["byte_limit"]["endor"] == pytest.approx(16 / 9)
    assert pd.isna(table["byte_limit"]["accelerate"])
    assert table["fault"].to_dict() == {"dense": False, "endor": fault, "accelerate": False}
    assert ("faulty measurements" in generation_words(table.reset_index()).lower()) == fault


def test_passes_by_the_same_code_are_one_row():
    """Seconds 1 and 3 of a prompt, 2 and 4 by the same code: a median of 2.5 over four turns."""
    found = runs(dense=[5.0, 5.0], endor=[1.0, 3.0], endor_packed=[2.0, 4.0])
    merged = generation._summary(found.assign(phase="prompt")).set_index("method")
    assert merged["seconds"].to_dict() == {"dense": 5.0, "endor": 2.5}
    assert merged.loc["endor", ["seconds_low", "seconds_high"]].tolist() == [1.0, 4.0]
    assert generation._summary(found)["method"].tolist() == ["dense", "endor", "endor_packed"]


def test_a_headline_says_what_packing_gains_and_where_it_does_not():
    table = generation._summary(runs(dense=[1.5], endor=[1.0], endor_packed=[2.0])).assign(model="toy", layers=3)
    assert generation.generation_headline(table) == {
        "gain": "A later token comes 0.75 to 1.50 times as fast from packed weights as from dense ones (toy, 3 layers, "
        "measured).",
        "negative": "Packing gains no more than the turns differ in the generation of batch 1 (toy, 3 layers, "
        "measured).",
    }


def test_words_say_where_packing_does_not_pay():
    words = generation_words(generation._summary(runs(dense=[1.0], endor=[2.0])))
    assert "endor 0.50 times as fast (0.50 to 0.50)" in words
    assert words.endswith("Packing does not pay for endor in the generation of batch 1.")
    assert generation_words(generation._summary(runs(dense=[1.5], endor=[1.0]))).endswith("Packing pays throughout.")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"new_tokens": 1}, "new_tokens=1: expected 2 or more"),
        ({"batches": [1, 0]}, r"batches=\[1, 0\]"),
        ({"repetitions": 0}, "repetitions=0"),
        ({"prompt_tokens": 250, "new_tokens": 32}, r"250 \+ 32 tokens: expected no more than the model's 256"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(toy, sizes, words):
    with pytest.raises(UserError, match=words):
        generation_measurements(toys(**({"batches": [1]} | sizes)))


def test_wrong_logits_are_refused(toy, monkeypatch):
    really = generation._text

    def wrong(*arguments):
        text = really(*arguments)
        outputs = [*text.reference._outputs.values()]
        return replace(text, reference=Reference("the model in memory", [*outputs[:-1], outputs[-1] + 1]))

    monkeypatch.setattr(generation, "_text", wrong)
    with pytest.raises(UserError, match="dense, pipelined, gives another output"):
        generation_measurements(toys(prompt_tokens=2, new_tokens=2, batches=[1]))
