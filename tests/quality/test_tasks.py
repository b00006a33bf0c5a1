import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import naive_evaluation
from toolkit import downloads, hub
from toolkit.errors import UserError
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_tokenizer
from toolkit.quality import HUB_TASKS, LOCAL_TASKS, evaluate_tasks, harness
from toolkit.quality.corpora import load_articles


@pytest.fixture(scope="module")
def small():
    """A random model small enough to run in no time, and the embedded model's tokenizer."""
    tokenizer = read_tokenizer(read_header(downloads.fetch("smollm2-135m")))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def counts():
    return Counter(word for a in load_articles("evaluation") for word in re.findall(r"[a-z]+", a.text.lower()))


def guessing(items, score) -> float:
    """Accuracy of always taking the choice with the greatest score; equal scores share the point."""
    points = 0.0
    for item in items:
        scores = [score(choice) for choice in item.choices]
        best = [index for index, value in enumerate(scores) if value == max(scores)]
        points += (item.answer in best) / len(best)
    return points / len(items)


@pytest.mark.parametrize("task", LOCAL_TASKS.values(), ids=LOCAL_TASKS.keys())
def test_items_are_many_distinct_and_well_formed(task):
    items = task.items()
    assert len(items) >= 500
    assert items == task.items()
    assert len({(item.context, item.choices[item.answer]) for item in items}) == len(items)
    for item in items:
        assert len(set(item.choices)) == len(item.choices) == task.choices
        assert 0 <= item.answer < task.choices
        assert len(item.context.split()) <= 20
        assert item.context == item.context.strip() != ""


@pytest.mark.parametrize("task", LOCAL_TASKS.values(), ids=LOCAL_TASKS.keys())
def test_neither_length_nor_frequency_nor_place_tells(task, counts):
    def frequency(choice):
        words = re.findall(r"[a-z]+", choice.lower())
        return sum(np.log1p(counts[word]) for word in words)

    items = task.items()
    margin = 4 * (task.chance * (1 - task.chance) / len(items)) ** 0.5
    for score in (len, lambda choice: -len(choice), frequency, lambda choice: -frequency(choice)):
        assert guessing(items, score) == pytest.approx(task.chance, abs=margin)
    places = Counter(item.answer for item in items)
    assert all(places[place] / len(items) == pytest.approx(task.chance, abs=margin) for place in places)


def test_the_table_against_the_oracle(small):
    model, tokenizer = small
    for name, task in LOCAL_TASKS.items():
        table = evaluate_tasks(model, tokenizer, [name], limit=6, batch_size=5)
        items = task.items()[:6]
        right = [naive_evaluation.best_choice(model, tokenizer, i.context, i.choices) == i.answer for i in items]
        (row,) = table.to_dict("records")
        assert row["value"] == pytest.approx(np.mean(right))
        assert row["standard_error"] == pytest.approx(np.std(right, ddof=1) / 6**0.5)
        assert {key: row[key] for key in ("task", "metric", "chance", "items")} == {
            "task": name,
            "metric": "acc",
            "chance": task.chance,
            "items": 6,
        }


def test_two_tasks_keep_their_order_and_the_generators_their_states(small, capfd):
    def draws():
        return random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002

    def seed():
        random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002

    seed()
    expected = draws()
    seed()
    table = evaluate_tasks(*small, ["local_last_word", "local_agreement"], limit=2)
    assert draws() == expected
    assert list(table["task"]) == ["local_last_word", "local_agreement"]
    assert "loglikelihood" not in "".join(capfd.readouterr())


def test_a_group_of_groups_is_one_row_with_all_its_items():
    scores = {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "mmlu"}
    found = {
        "results": {"mmlu": scores, "piqa": scores | {"acc_norm,none": 0.6, "acc_norm_stderr,none": 0.2}},
        "group_subtasks": {"mmlu": ["stem", "other"], "stem": ["physics", "algebra"], "other": ["law"], "piqa": []},
        "n-samples": {name: {"effective": n} for name, n in {"physics": 3, "algebra": 4, "law": 5, "piqa": 6}.items()},
    }
    table = harness._table(found, ["piqa", "mmlu"])
    assert table.to_dict("list") == {
        "task": ["piqa", "piqa", "mmlu"],
        "metric": ["acc", "acc_norm", "acc"],
        "value": [0.5, 0.6, 0.5],
        "standard_error": [0.1, 0.2, 0.1],
        "chance": [0.5, 0.5, 0.25],
        "items": [6, 6, 12],
    }


def test_bad_input():
    for tasks, options, names in (
        (["arc"], {}, "unknown task 'arc'"),
        ("local_agreement", {}, "one string"),
    ):
        with pytest.raises(UserError, match=names):
            evaluate_tasks(None, None, tasks, **options)


def test_tasks_of_the_hub_without_one(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for task in HUB_TASKS:
        with pytest.raises(UserError, match="local_agreement, local_continuation, local_last_word"):
            evaluate_tasks(None, None, ["local_agreement", task])
