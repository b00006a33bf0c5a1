"""Corpora as one long row of tokens, split into text to calibrate on and text to evaluate on."""

import json
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit import downloads, hub, sources, tensor_files
from toolkit.cache import cached
from toolkit.errors import UserError, unknown
from toolkit.extras import extra

TOKENS, TOKENS_KIND = "tokens.safetensors", "tokens of a corpus"
PYTHON = "python-sources"
SPLITS = ("calibration", "evaluation")
CALIBRATION_EVERY = 3  # article 0, 3, 6, … of the dump calibrate, the others evaluate
NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3"}
C4_DOCUMENTS = {"calibration": 4000, "evaluation": 1100}  # 1100: what SparseGPT and Wanda evaluate on


@dataclass(frozen=True)
class Article:
    """One article of the Wikipedia slice as plain text. Blank lines separate paragraphs."""

    title: str
    text: str


def load_tokens(corpus: str, tokenizer, split: str = "calibration") -> Int64[Tensor, " n"]:
    """All tokens of one split of a corpus, in order and without special tokens. Kept in the cache.

    Args:
        corpus: `"wiki-slice"` (embedded), `"python-sources"` (the standard library of this Python, PSF licence; its
            text differs between versions of Python, so the kept tokens name the version), or `"wikitext-2"` or `"c4"`
            from the hub.
        tokenizer: as `load_model` returns it.
        split: `"calibration"` or `"evaluation"`. For wikitext-2 these are the training and the test split, for c4 the
            first 4000 documents of the training and the first 1100 of the validation split. Documents are joined as
            the code of SparseGPT and Wanda joins them. The ENDOR paper (section 5.3) says WikiText validation; the
            test split is what that code evaluates on, and what "WikiText perplexity" means in the pruning papers.

    Raises `UserError` if corpus or split is unknown, or the corpus needs a hub that cannot be reached.
    """
    if corpus not in CORPORA:
        raise unknown("corpus", corpus, CORPORA)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    text, backend = CORPORA[corpus](split), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python, which nothing tells from another one
        return _ids(tokenizer, text)

    def make(folder: Path) -> None:
        tensor_files.save(folder / TOKENS, TOKENS_KIND, {}, {"ids": _ids(tokenizer, text)})

    key = {"text_sha256": sources.digest(text), "tokenizer_sha256": sources.digest(backend.to_str())}
    key |= {"tokenizers": tokenizers.__version__}
    key |= {"python": platform.python_version()} if corpus == PYTHON else {}
    folder = cached("tokens", key, sources.dependencies("toolkit.quality.corpora"), make)
    return tensor_files.load(folder / TOKENS, TOKENS_KIND)[1]["ids"]


def _ids(tokenizer, text: str) -> Int64[Tensor, " n"]:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


def check_corpus(corpus: str) -> None:
    """Raise the `UserError` that `load_tokens` would raise for a corpus that cannot be had, without loading it."""
    if corpus not in CORPORA:
        raise unknown("corpus", corpus, CORPORA)
    if corpus == PYTHON:
        _python_files()
    elif corpus not in downloads.DOWNLOADS:
        _require_hub(corpus)


def load_articles(split: str) -> list[Article]:
    """The articles of one split of the Wikipedia slice, in the dump's order: every third one calibrates.

    Kept: prose, headings, list items. Left out: redirects, templates (infoboxes too), tables, references, formulas,
    pictures, categories and sections that only hold references or links. Raises `UserError` if the split is unknown.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    dump = downloads.DOWNLOADS["wiki-slice"]
    key = {"corpus": "wiki-slice", "dump_sha256": dump.sha256}
    file = cached("text", key, sources.dependencies("toolkit.quality.wikipedia"), _parse_dump) / "articles.jsonl"
    with open(file, encoding="utf-8") as lines:
        articles = [Article(**json.loads(line)) for line in lines]
    return _of_split(articles, split)


def _of_split(items: list, split: str) -> list:
    return [it for index, it in enumerate(items) if (index % CALIBRATION_EVERY == 0) == (split == "calibration")]


def _parse_dump(folder: Path) -> None:
    from toolkit.quality import wikipedia

    with open(folder / "articles.jsonl", "w", encoding="utf-8") as out:
        for title, text in wikipedia.articles(downloads.fetch("wiki-slice")):
            out.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")


def _wiki_slice(split: str) -> str:
    return "\n\n".join(f"{article.title}\n\n{article.text}" for article in load_articles(split))


def _python_files() -> list[Path]:
    """The standard library's sources, in an order that mixes its packages. Raises `UserError` if there are none.

    Left out: tests, data tables, and what is installed beside the library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = (file.relative_to(folder) for file in folder.rglob("*.py"))
    found = [name for name in names if not NOT_SOURCES & set(name.parts)]
    if not found:
        raise UserError(f"corpus {PYTHON!r}: this Python has no *.py files in {folder}; use 'wiki-slice'")
    return [folder / name for name in sorted(found, key=lambda name: sources.digest(name.as_posix()))]


def _python_sources(split: str) -> str:
    """Each file under a comment with its name; every third one calibrates, as of the Wikipedia slice."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(folder).as_posix(): file for file in _of_split(_python_files(), split)}
    return "\n\n".join(f"# {name}\n{it.read_text(encoding='utf-8', errors='replace')}" for name, it in files.items())


def _wikitext_2(split: str) -> str:
    part, joint = {"calibration": ("train", " "), "evaluation": ("test", "\n\n")}[split]
    return joint.join(_hub_rows("wikitext-2", split=part, path="Salesforce/wikitext", name="wikitext-2-raw-v1")["text"])


def _c4(split: str) -> str:
    part, file = {
        "calibration": ("train", "en/c4-train.00000-of-01024.json.gz"),
        "evaluation": ("validation", "en/c4-validation.00000-of-00008.json.gz"),
    }[split]
    rows = _hub_rows("c4", split=part, path="allenai/c4", data_files={part: file})
    return " ".join(rows[: C4_DOCUMENTS[split]]["text"])


def _require_hub(corpus: str) -> None:
    hub.require(f"corpus {corpus!r}", offline="use 'wiki-slice', which needs none")


def _hub_rows(corpus: str, **options):
    _require_hub(corpus)
    with extra("lab"):
        import datasets

    with hub.quiet():
        return datasets.load_dataset(**options)


CORPORA: dict[str, Callable[[str], str]] = {
    "wiki-slice": _wiki_slice,
    "python-sources": _python_sources,
    "wikitext-2": _wikitext_2,
    "c4": _c4,
}
