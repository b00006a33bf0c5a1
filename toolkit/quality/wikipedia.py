"""Turns Wikipedia's markup into plain text."""

import bz2
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

DROPPED_TAGS = {
    "gallery", "imagemap", "math", "ref", "references", "score", "source", "syntaxhighlight", "table", "timeline",
}  # fmt: skip
DROPPED_SECTIONS = {
    "see also", "references", "external links", "further reading", "notes", "bibliography", "footnotes", "sources",
    "notes and references", "citations", "works cited", "references and notes",
}  # fmt: skip
# [[File:…]], [[Category:…]], [[fr:…]]; a colon inside an ordinary title is followed by a space
NAMESPACE = re.compile(
    r"^\s*:?(?:file|image|media|category|wikipedia|template|[a-z]{2,3}(?:-[a-z-]+)?|simple):\S", re.IGNORECASE
)
REFERENCE = re.compile(r"<ref\b[^>]*?/>|<ref\b[^>]*>.*?</ref>", re.IGNORECASE | re.DOTALL)
SECTION = re.compile(r"^==([^=\n]+)==[ \t]*(?:<!--.*?-->)?[ \t]*$", re.MULTILINE)  # the second level is the outermost
# markup that is too broken to parse stays as text, so its line is dropped
MARKUP = re.compile(r"^[|!{]|\[\[|\]\]|\{\{|\}\}|</?[a-z]+[^<>]*>|^[\w-]+ ?= ?\S+$|\|")


def articles(dump: Path) -> Iterator[tuple[str, str]]:
    """Title and plain text of every article of a bz2 MediaWiki export, in its order, without redirects."""
    with bz2.open(dump) as export:
        for title, wikitext in _pages(export):
            text = plain_text(wikitext)
            if text:
                yield title, text


def plain_text(wikitext: str) -> str:
    """MediaWiki markup as clean paragraphs: no tables, templates, references, pictures, categories or link sections."""
    lead, *rest = SECTION.split(REFERENCE.sub("", wikitext))
    titled = zip(rest[::2], rest[1::2], strict=True)
    kept = [f"{title}\n\n{body}" for title, body in titled if title.strip().lower() not in DROPPED_SECTIONS]
    return "\n\n".join(text for section in (lead, *kept) if (text := _section_text(section)))


def _section_text(wikitext: str) -> str:
    """The text of one section. Each is parsed alone, so that unclosed markup spoils no other."""
    import mwparserfromhell

    code = mwparserfromhell.parse(wikitext)
    _drop(code)
    return _tidy(code.strip_code())


def _drop(code) -> None:
    """Take unwanted nodes out of parsed markup, in place and at every depth."""
    code.nodes = [node for node in code.nodes if not _is_dropped(node)]
    for node in code.nodes:
        for inner in (getattr(node, part, None) for part in ("contents", "text", "title")):
            if hasattr(inner, "nodes"):
                _drop(inner)


def _is_dropped(node) -> bool:
    from mwparserfromhell import nodes

    if isinstance(node, nodes.Tag):
        return str(node.tag).strip().lower() in DROPPED_TAGS
    if isinstance(node, nodes.Wikilink):
        return bool(NAMESPACE.match(str(node.title)))
    return isinstance(node, nodes.Template | nodes.Comment)


def _tidy(text: str) -> str:
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    text = re.sub(r"'{2,}|__[A-Z]+__", "", text)  # stray emphasis and magic words
    # commas and brackets that a dropped template leaves behind
    text = re.sub(r"(?:\s*[,;])+(?=\s*[,;.)])", "", text)
    text = re.sub(r"\((?:\s*[,;:])+\s*", "(", text)
    text = re.sub(r"\((?:[\s,;:]|or|and)*\)", "", text)
    text = re.sub(r" +([,.;:)])", r"\1", re.sub(r"[ \t]+", " ", text))
    lines = (line.strip() for line in text.splitlines())
    return "\n\n".join(line for line in lines if re.search(r"\w", line) and not MARKUP.search(line))


def _pages(dump: BinaryIO) -> Iterator[tuple[str, str]]:
    """Title and markup of every article of a MediaWiki export, without redirects."""
    for _, page in ElementTree.iterparse(dump):
        if page.tag.rpartition("}")[2] != "page":
            continue
        found = {child.tag.rpartition("}")[2]: child for child in page.iter()}
        text = found["text"].text or ""
        if found["ns"].text == "0" and "redirect" not in found and not text.lstrip().lower().startswith("#redirect"):
            yield found["title"].text, text
        page.clear()
