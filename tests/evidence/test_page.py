"""A notebook's page: what it begins with, and what it survives."""

import base64
import io
import json
import math
import re

import nbformat
from tqdm import tqdm

from toolkit.evidence.catalogue import Notebook, notebooks
from toolkit.evidence.page import WIDGET, three_digits, write_page

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ABOUT = Notebook("endor/fig04", "A <title>", "How many bytes?", notebooks()["endor/fig04"].path)
META = {"figures": ["lost", "plot"], "cpu": "A CPU, 2 cores", "memory_gb": 24.6, "gpu": None, "git": "0123456789abcdef"}
META |= {"git_dirty": True, "finished": "2026-01-02T03:04:05Z", "parameters": {"rows": 8}, "versions": {"numpy": "2.4"}}


def cells(*sources, **outputs):
    made = []
    for source in sources:
        kind, _, text = source.partition(":")
        new = nbformat.v4.new_markdown_cell if kind == "md" else nbformat.v4.new_code_cell
        made.append(new(text, metadata={"tags": [kind]} if "parameters" in kind else {}))
    made[-1].update(outputs)
    return made


def stream(text):
    return nbformat.v4.new_output("stream", text=text)


def write(folder, made, about=ABOUT, meta=META, more=None, **options):
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=more or {}), folder / "notebook.ipynb")
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "plot.png").write_bytes(base64.b64decode(PIXEL))
    write_page(folder / "notebook.ipynb", folder / "page.html", about, **options)
    return (folder / "page.html").read_text()


def body(text):
    return text.split("<main>")[1].split("</main>")[0]


def test_a_page_begins_with_question_answer_and_figure_and_ends_with_its_circumstances(tmp_path):
    first = "md:# A title\n\n**Question.** How many\nbytes?\n\n**The paper's claim.** Few."
    text = write(tmp_path, cells(first, "code:print()"), meta=META | {"seen": "56 % of the <b>bytes</b>."})
    places = [
        text.index(word)
        for word in (
            "<h1>A &lt;title&gt;",
            "How many bytes?",
            "56 % of the &lt;b&gt;bytes",
            PIXEL,
            "<main>",
            "Few.",
            "<footer>",
        )
    ]
    assert places == sorted(places)
    assert "Question." not in text
    assert "A title" not in body(text)
    footer = text.split("<footer>")[1]
    for word in ("2026-01-02 03:04:05 UTC", "A CPU, 2 cores, 25 GB of memory, no GPU", "0123456789 with uncommitted"):
        assert word in footer
    for word in ("numpy 2.4", "parameters of its own", "ENDOR: Hardware-Friendly Sparse Format"):
        assert word in footer


def test_a_page_is_self_contained(tmp_path):
    made = cells("code:1 < 2", outputs=[stream("<b>not markup</b>")])
    made[0].outputs.append(nbformat.v4.new_output("display_data", data={"image/png": PIXEL}))
    text = write(tmp_path, made)
    assert text.count("<script") == 1  # which closes an enlarged figure
    links = re.findall(r'(?:src|href)="(?!data:|#|index\.html)([^"]*)"', text)
    assert links == [f"endor/fig04/{name}" for name in ("notebook.ipynb", "meta.json")]
    assert "url(" not in text
    assert "&lt;b&gt;not markup" in text


def test_the_main_figure_stands_once_and_objects_are_left_out(tmp_path):
    result = nbformat.v4.new_output("execute_result", data={"text/plain": "<matplotlib.legend.Legend at 0x7f97>"})
    bar = nbformat.v4.new_output("display_data", data={WIDGET: {"model_id": "1"}, "text/plain": "0/272"})
    shown = nbformat.v4.new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure size 1x1>"})
    text = write(tmp_path, cells("code:draw()", outputs=[result, bar, shown, stream("a number: 3")]))
    assert text.count(PIXEL) == 1
    assert "0/272" not in text
    assert text.count("<script") == 1  # a widget would bring its own
    assert "on top of this page" in body(text)
    assert "Legend" not in text
    assert "a number: 3" in text


def test_maths_become_mathml_unless_they_do_not_convert_and_money_stays_money(tmp_path):
    source = r"md:the norm $\|x_j\|_2$, a sum $$\sum_i x_i^2$$, broken $\left( x$ and $2,500 against $50,000"
    text = write(tmp_path, cells(source))
    assert text.count("<math") == 2
    assert 'display="block"' in text
    assert r"<code>$\left( x$</code>" in text
    assert "$2,500 against $50,000" in text


def test_progress_bars_are_left_out_and_warnings_stay(tmp_path):
    bar = io.StringIO()
    with tqdm(total=3, desc="pruning", file=bar, mininterval=0, leave=False) as shown:
        shown.update()
    with tqdm(total=3, desc="loading", file=bar, mininterval=0, leave=True) as shown:
        shown.update(3)
    updates = [part for part in re.split(r"(\r[^\r]*)", bar.getvalue()) if part]
    assert len(updates) > 4
    outputs = [nbformat.v4.new_output("stream", name="stderr", text=part) for part in updates]
    text = body(write(tmp_path, cells("code:work()", outputs=outputs)))
    assert "pruning" not in text
    assert "loading" not in text
    assert "output_stderr" not in text
    outputs[2].text += "UserWarning: beware [of] this\n"
    text = body(write(tmp_path, cells("code:work()", outputs=[stream("out\rput"), *outputs])))
    assert "pruning" not in text
    assert "UserWarning: beware [of] this" in text
    assert "put" in text


def test_a_notebook_that_is_none_still_has_a_page(tmp_path):
    (tmp_path / "notebook.ipynb").write_text("no JSON")
    write_page(tmp_path / "notebook.ipynb", tmp_path / "page.html", ABOUT)
    text = (tmp_path / "page.html").read_text()
    assert "How many bytes?" in text
    assert "cells cannot be shown" in text


def test_numbers_have_three_digits():
    numbers = [0.0, 0.012345, 1.0, -1.2345, 123.4, 1234.5, 12345.0, 8.259174e7, 1.86e14, 1.234e-7, math.nan, math.inf]
    shown = ["0", "0.0123", "1", "-1.23", "123", "1,234", "12,300", "82,600,000", "1.86e+14", "1.23e-07", "–", "inf"]
    assert [three_digits(number) for number in numbers] == shown
