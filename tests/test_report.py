"""The report as a browser shows it; without Chromium these are skipped."""

import re
import shutil
import subprocess

import nbformat
import pytest

from toolkit.report import write_page

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
