"""The documentation's pages: links lead somewhere, examples are true, and everything opens offline."""

import doctest
import html
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import guide
from toolkit.evidence.literature import PAPERS

TUTORIALS = ("endor", "flash", "spqr", "hermes", "corm")
TEXTS = [*guide.pages(), paths.root() / "README.md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
FETCHED = ("src", "srcset", "poster", "data", "action")  # attributes that a browser follows by itself


def page_of(file: Path) -> "Page":
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


class Page(HTMLParser):
    """The links, names and fetched addresses of a page."""

    def __init__(self):
        super().__init__()
        self.links, self.names, self.fetched = [], set(), []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.fetched += [given[name] for name in FETCHED if name in given]
        if tag == "link" and "href" in given:
            self.fetched.append(given["href"])


def dead_links(folder: Path) -> list[str]:
    pages = {file.resolve(): page_of(file) for file in folder.rglob("*.html")}
    dead = []
    for file, page in pages.items():
        for link in (*page.links, *page.fetched):
            if re.match("https?:|data:|mailto:", link):
                continue
            place, _, name = html.unescape(link).partition("#")
            target = (file.parent / place).resolve() if place else file
            known = pages[target].names if target in pages else {name}
            if not target.is_file() or (name and name not in known):
                dead.append(f"{file.name}: {link}")
    return dead


def check_pages(folder: Path) -> None:
    """No dead link, and nothing that a browser would fetch from elsewhere."""
    assert dead_links(folder) == []
    for file in folder.rglob("*.html"):
        page, text = page_of(file), file.read_text(encoding="utf-8")
        assert not [address for address in page.fetched if address.startswith(("http", "//"))], file
        assert not re.search(r"@import|url\(['\"]?(https?:)?//|import\(['\"]https?:", text), file


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "endor-fig04.html").write_text("ran")
    (tmp_path / "report" / "index.html").write_text("the report")
    return tmp_path


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: "/".join(text.parts[-2:]))
def test_links_of_the_texts_lead_to_files_and_headings(text):
    found = LINK.findall(CODE.sub("", text.read_text(encoding="utf-8")))
    for link in (link for link in found if not re.match("https?:", link)):
        place, _, name = link.partition("#")
        target = (text.parent / place).resolve() if place else text
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE) if name else []
        assert not name or name in map(guide.anchor, headings), link


@pytest.mark.parametrize("paper", TUTORIALS)
def test_examples_of_a_tutorial_give_what_it_prints(paper):
    text = (paths.root() / "docs" / f"{paper}.md").read_text(encoding="utf-8")
    examples = doctest.DocTestParser().get_doctest(text, {}, paper, paper, 0)
    assert len(examples.examples) > 3
    said = []
    assert doctest.DocTestRunner().run(examples, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("paper", TUTORIALS)
def test_a_tutorial_has_its_parts_and_names_notebooks_that_are_there(paper):
    text = (paths.root() / "docs" / f"{paper}.md").read_text(encoding="utf-8")
    parts = ["The problem", "The idea", "What the notebooks show", "Run it", "What was found", "What to keep in mind"]
    assert re.findall("^## (.+)$", text, re.MULTILINE) == parts
    known = {each.id: each.path for each in guide.notebooks().values()}
    named = re.findall(r"`(\w+/\w+)` \(\[notebook\]\(([^)]+)\)\)", text)
    assert len(named) >= 3
    assert all((paths.root() / "docs" / link).resolve() == known[id] for id, link in named)
    assert set(re.search(r"--only (.+) --preset", text)[1].split()) <= known.keys()


def test_pages_open_offline_and_lead_to_the_report(results):
    index = guide.write_guide(())
    assert index == results / "report" / "docs" / "index.html"
    check_pages(results / "report")
    endor = (index.parent / "endor.html").read_text(encoding="utf-8")
    assert '<a href="../endor-fig04.html">' in endor
    assert "../endor-fig05.html" not in endor  # has not run
    assert "<code>endor/fig05</code> (notebook)" in endor
    assert {file.stem for file in index.parent.glob("*.html")} >= {*TUTORIALS, "citing", "commands", "results"}


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="#x"></a><a href="#y"></a><a href="b.html"></a>')
    assert dead_links(tmp_path) == ["a.html: #y", "a.html: b.html"]


def test_modules_have_pages_that_the_texts_lead_to(results):
    names = [
        "toolkit.predictors",
        "toolkit.formats.endor",
        "toolkit.kernels",
        "toolkit.kernels.bitmap",
        "toolkit.policies.two_level",
    ]
    folder = guide.write_guide(names).parent
    check_pages(results / "report")
    assert all((folder / "api" / f"{name.replace('.', '/')}.html").is_file() for name in names)
    assert 'href="api/toolkit/kernels.html"' in (folder / "index.html").read_text(encoding="utf-8")
    assert '<a href="api/toolkit/formats/endor.html">' in (folder / "endor.html").read_text(encoding="utf-8")
    assert "packed form, as fp32" in (folder / "api/toolkit/formats/endor.html").read_text(encoding="utf-8")


def test_every_module_gets_a_page():
    names = guide.modules()
    assert names["kernels/bitmap/layout.py"] == "toolkit.kernels.bitmap.layout"
    assert names["toolkit/formats/__init__.py"] == "toolkit.formats"
    assert not [name for name in names if name.endswith("__main__.py")]


def test_without_a_checkout_one_line_says_so(monkeypatch):
    monkeypatch.setattr(paths, "is_installed", lambda: True)
    with pytest.raises(UserError, match="only the checkout has"):
        guide.write_guide()


def test_the_citation_names_every_paper_and_this_version():
    cited = yaml.safe_load((paths.root() / "CITATION.cff").read_text(encoding="utf-8"))
    known = {paper.title.partition(" (Master")[0]: paper.authors for paper in PAPERS.values() if paper.title}
    authors = {
        each["title"]: ", ".join(
            of.get("name") or f"{of['given-names']} {of['family-names']}" for of in each["authors"]
        )
        for each in cited["references"]
    }
    assert authors == known
    project = tomllib.loads((paths.root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["version"] == project["version"]
    assert f"version = {{{project['version']}}}" in (paths.root() / "docs" / "citing.md").read_text(encoding="utf-8")
