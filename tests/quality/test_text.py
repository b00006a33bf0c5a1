import copy

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from toolkit import downloads, hub
from toolkit.errors import UserError
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_tokenizer
from toolkit.quality import CORPORA, SPLITS, begun, corpora, load_articles, load_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(read_header(downloads.fetch("smollm2-135m")))


def test_the_slice_is_split_by_article(tokenizer):
    calibration, evaluation = (load_articles(split) for split in SPLITS)
    titles = [article.title for article in calibration + evaluation]
    assert len(set(titles)) == len(titles) > 100
    tokens = {split: load_tokens("wiki-slice", tokenizer, split) for split in SPLITS}
    total = sum(map(len, tokens.values()))
    assert total > 600_000
    assert 0.6 <= len(tokens["evaluation"]) / total <= 0.7


def test_tokens_are_kept_for_each_tokenizer(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(corpora, "CORPORA", {"wiki-slice": lambda split: f"The text to {split}."})
    first = load_tokens("wiki-slice", tokenizer)
    assert first.tolist() == tokenizer("The text to calibration.")["input_ids"]
    made, really = [], corpora._ids
    monkeypatch.setattr(corpora, "_ids", lambda *given: made.append(given) or really(*given))
    assert torch.equal(load_tokens("wiki-slice", tokenizer), first)
    assert made == []
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["calibration"])
    assert not torch.equal(load_tokens("wiki-slice", other), first)
    load_tokens("wiki-slice", tokenizer, "evaluation")
    for _ in range(2):
        assert load_tokens("wiki-slice", _plain)[0] == ord("T")
    assert len(made) == 4  # nothing tells one tokenizer in Python from another


def _plain(text, **_):
    """A tokenizer in Python."""
    return {"input_ids": [ord(character) for character in text]}


MARKS = ["[[", "]]", "{{", "}}", "{|", "|}", "<ref", "&nbsp;", "Category:", "#REDIRECT", "thumb|", "=="]


@pytest.mark.parametrize("split", SPLITS)
def test_the_text_is_clean(split):
    for article in load_articles(split):
        assert [mark for mark in MARKS if mark in article.text] == [], article.title
        assert {"References", "External links"}.isdisjoint(article.text.split("\n\n")), article.title


def test_corpora_of_the_hub_without_one(monkeypatch, tokenizer):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for corpus in CORPORA.keys() - {"wiki-slice", "python-sources"}:
        with pytest.raises(UserError, match="use 'wiki-slice'"):
            load_tokens(corpus, tokenizer)


@pytest.mark.parametrize(
    ("corpus", "split", "part", "expected"),
    [
        ("wikitext-2", "calibration", "train", "one two"),
        ("wikitext-2", "evaluation", "test", "one\n\ntwo"),
        ("c4", "calibration", "train", "one two"),
        ("c4", "evaluation", "validation", "one two"),
    ],
)
def test_corpora_of_the_hub_are_joined_as_the_papers_do(monkeypatch, tokenizer, corpus, split, part, expected):
    import datasets

    asked = {}

    def load_dataset(**options):
        asked.update(options)
        return datasets.Dataset.from_dict({"text": ["one", "two"]})

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert tokenizer.decode(load_tokens(corpus, tokenizer, split)) == expected
    assert asked["split"] == part


def test_windows_of_gemma_begin_with_its_first_token():
    """As lm-eval and llama.cpp have it; other models' windows, and a Gemma without such a token, stay as they are."""
    windows = torch.arange(10, 18).view(2, 4)
    config = Gemma3TextConfig(bos_token_id=2)
    assert begun(config, windows).tolist() == [[2, 11, 12, 13], [2, 15, 16, 17]]
    for other in (Gemma3TextConfig(bos_token_id=None), LlamaConfig(bos_token_id=2)):
        assert begun(other, windows) is windows
