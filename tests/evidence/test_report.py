"""The report as a browser shows it; without Chromium these are skipped."""

import base64
import json
import re
import shutil
import subprocess

import nbformat
import pytest

from toolkit import paths
from toolkit.evidence.catalogue import rows
from toolkit.evidence.report import write_page, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def page(tmp_path):
    cell = nbformat.v4.new_code_cell("1 < 2")
    cell.outputs = [
        nbformat.v4.new_output("stream", text="<b>not markup</b>"),
        nbformat.v4.new_output("display_data", data={"image/png": PIXEL}),
        nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=["\x1b[31mValueError\x1b[0m"]),
    ]
    cells = [nbformat.v4.new_markdown_cell("# A title\n\nwith *text*"), cell]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    write_page(tmp_path / "notebook.ipynb", tmp_path / "page.html", "A <title>")
    return tmp_path / "page.html"


def test_a_page_is_self_contained(page):
    text = page.read_text()
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(?!data:|#|index\.html)[^"]*"', text) == []
    assert "url(" not in text
    assert "<title>A &lt;title&gt;</title>" in text
    assert "&lt;b&gt;not markup" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it(page, tmp_path, width):
    shot = tmp_path / "shot.png"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 5000
    dom = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "A title" in dom.stdout
    assert "ValueError" in dom.stdout


def test_maths_become_mathml_and_money_stays_money(tmp_path):
    cells = [nbformat.v4.new_markdown_cell(r"the norm $\|x_j\|_2$, a sum $$\sum_i x_i^2$$ and $2,500 against $50,000")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    write_page(tmp_path / "notebook.ipynb", tmp_path / "page.html", "maths")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<math") == 2
    assert 'display="block"' in text
    assert "$2,500 against $50,000" in text


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder with one sound notebook, one of an older schema, one foreign and one that lost its figure."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    sound = {
        "schema": paths.RESULTS_SCHEMA,
        "figures": ["plot"],
        "evidence": ["measured"],
        "verdicts": {"prediction": {"differs": 1}},
    }
    metas = {
        "quickstart": sound | {"id": "quickstart", "verdicts": {"prediction": {"within tolerance": 2, "not run": 1}}},
        "endor/fig04": sound | {"id": "endor/fig04", "schema": 0},
        "endor/fig01": {"another": "program's"},
        "endor/tab_perplexity": sound | {"id": "endor/tab_perplexity"},
    }
    for id, meta in metas.items():
        (tmp_path / id).mkdir(parents=True)
        (tmp_path / id / "meta.json").write_text(json.dumps(meta))
        (tmp_path / id / "page.html").write_text("<p>page</p>")
        if id != "endor/tab_perplexity":
            (tmp_path / id / "plot.png").write_bytes(base64.b64decode(PIXEL))
    (tmp_path / "flash" / "fig02").mkdir(parents=True)
    (tmp_path / "flash" / "fig02" / "meta.json").write_text("{half")
    return tmp_path


def test_each_row_has_its_card_and_unsound_results_say_why(results):
    text = write_report({}).read_text()
    cards = dict(re.findall(r'<article class="card[^"]*" id="([^"]+)">(.*?)</article>', text, re.DOTALL))
    assert cards.keys() == rows().keys()
    assert "2 within tolerance" in cards["quickstart"]
    assert "schema 0" in cards["endor/fig04"]
    assert "run it again" in cards["endor/fig01"]
    assert "plot.png is missing" in cards["endor/tab_perplexity"]
    assert "run it again" in cards["flash/fig02"]
    assert "not yet" in cards["corm/tab01"]
    assert (results / "report" / "quickstart.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_index_fits_the_window_and_asks_for_nothing(results, width):
    index = write_report({})
    asked = "performance.getEntriesByType('resource').filter(entry => !entry.name.startsWith('data:')).length"
    probe = f"<script>document.title = document.documentElement.scrollWidth + ' ' + {asked}</script>"
    page = results / "report" / "probe.html"
    page.write_text(index.read_text().replace("</body>", probe + "</body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={results / 'profile'}", f"--window-size={width},900"]
    dom = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    wide, requests = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
    assert wide <= max(width, 500)  # a headless window is 500 wide at least
    assert requests == 0
