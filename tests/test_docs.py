"""The examples of the pages, lines that begin with `>>>`, give what the pages say."""

import doctest

import pytest

from toolkit import paths

PAGES = [page for page in sorted((paths.root() / "docs").glob("*.md")) if ">>> " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page(page):
    text, runner = page.read_text(encoding="utf-8"), doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0))
    assert runner.summarize().failed == 0
