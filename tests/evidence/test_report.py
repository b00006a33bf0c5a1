"""The index of the report, and the report as a browser shows it; without Chromium the latter tests are skipped."""

import base64
import json
import os
import re
import shutil
import subprocess
from zipfile import ZipFile

import nbformat
import pandas as pd
import pytest

from toolkit import paths
from toolkit.evidence import findings, report
from toolkit.evidence.catalogue import explorers, notebooks
from toolkit.evidence.cite import read_names
from toolkit.evidence.claims import KINDS
from toolkit.evidence.comparison import COLUMNS, DISTURBED
from toolkit.evidence.literature import PAPERS
from toolkit.evidence.meta import Meta
from toolkit.evidence.report import Outcome, pack, write_report
from toolkit.evidence.verdicts import VERDICTS
from toolkit.records import load_yaml

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--hide-scrollbars"]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SOUND = {"schema": paths.RESULTS_SCHEMA, "figures": ["plot"], "evidence": ["measured"], "git": "0123456789abcdef"}
SOUND |= {"cpu": "A CPU", "finished": "2026-01-02T03:04:05Z"}
WIDE = "<table><tr>" + "".join(f"<td>a column of number {number}</td>" for number in range(20)) + "</tr></table>"


def save(results, id, meta, figure=True, html=None):
    """A results folder as a run leaves it, with the answer of its notebook."""
    folder = results / id
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(
        meta if isinstance(meta, str) else json.dumps(meta | {"id": id, "seen": f"{id} works."})
    )
    cell = nbformat.v4.new_code_cell("1")
    if html:
        cell.outputs.append(nbformat.v4.new_output("display_data", data={"text/html": html}))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "notebook.ipynb")
    if figure:
        (folder / "plot.png").write_bytes(base64.b64decode(PIXEL))


def fill(folder):
    """Results of sound notebooks and of an explorer, of an older schema, foreign ones and damaged ones."""
    kinds = {"prediction": {"within tolerance": 2, "differs": 1}, "context": {"not run": 1}}
    score = {"n": 3, "median_error": 0.04, "largest_error": 0.25, "null_median_error": 0.5}
    card = {"caption": "ms, measured", "bars": {"dense": 20.0, "packed": 10.0}}
    save(folder, "quickstart", SOUND | {"verdicts": {"arithmetic": {"within tolerance": 2, "not run": 1}}})
    (folder / "quickstart" / "table.csv").write_text("value\n1\n")
    more = {"headline": {"gain": "It is fast.", "negative": "It is <not> always."}, "card": card, "score": score}
    save(folder, "endor/fig05", SOUND | more | {"verdicts": kinds}, html=WIDE)
    row = dict.fromkeys(COLUMNS) | {"claim": "x-1", "kind": "prediction", "stand_in": False, "published": 2.0}
    row |= {"ours": 1.8, "ratio": 0.9, "verdict": "within tolerance", "evidence": "modelled", "profile": "paper"}
    pd.DataFrame([row]).to_csv(folder / "endor" / "fig05" / "comparison.csv", index=False)
    save(folder, "endor/tab_e2e", SOUND)
    row |= {"claim": "tab_e2e-opt-endor-speedup", "published": 1.51, "ours": 1.25, "ratio": 0.83}
    row |= {"evidence": "measured", "profile": "this-machine"}
    pd.DataFrame([row]).to_csv(folder / "endor" / "tab_e2e" / "comparison.csv", index=False)
    save(folder, "flash/tab02", SOUND | {"disturbed": {"rows": 2, "of": 12}})
    room = {"system": "endor", "cost": "It takes room."}
    save(folder, "flash/fig02", SOUND | {"disturbed": {"rows": 0, "of": 5}, "headline": room})
    save(folder, "endor/fig04", SOUND | {"schema": 0})
    save(folder, "endor/fig01", {"another": "program's"} | {"schema": None})
    save(folder, "spqr/tab1_1", "{half")
    save(folder, "explore/bits", SOUND)
    book = nbformat.read(folder / "explore" / "bits" / "notebook.ipynb", 4)
    book.cells[0].outputs.append(nbformat.v4.new_output("display_data", data={"image/png": PIXEL}))
    nbformat.write(book, folder / "explore" / "bits" / "notebook.ipynb")
    page = folder / "grid" / "method+sparsity" / "report" / "index.html"
    page.parent.mkdir(parents=True)
    page.touch()
    return folder


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    return fill(tmp_path)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The report's first page."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_RESULTS_DIR", str(folder))
        fill(folder)
        yield write_report({})


@pytest.fixture(scope="module")
def text(index):
    return index.read_text()


@pytest.fixture(scope="module")
def cards(text):
    return cards_of(text)


def cards_of(text):
    found = re.findall(r'<(article|dt)( class="card[^"]*")? id="([^"]+)">(.*?)</(?:article|dd)>', text, re.DOTALL)
    return {id: words for _, _, id, words in found}


def test_each_row_has_its_card_and_unsound_results_say_why(cards, index):
    assert cards.keys() == notebooks().keys() | explorers().keys()
    assert "quickstart works." in cards["quickstart"]
    assert "schema 0" in cards["endor/fig04"]
    assert f'<img src="data:image/png;base64,{PIXEL}"' in cards["explore/bits"]
    assert "run it again" in cards["endor/fig01"]
    assert "run it again" in cards["spqr/tab1_1"]
    assert index.with_name("quickstart.html").exists()


def test_copied_elsewhere_it_has_no_broken_link(index, tmp_path):
    shutil.unpack_archive(pack(index.parent), tmp_path)
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    found = re.compile(r'(?:href|src)="(?!data:)([^"#]*)#?([^"]*)"')
    links = [(page, *link) for page, text in pages.items() for link in found.findall(text)]
    wanted = [f"quickstart/{name}" for name in ("table.csv", "notebook.ipynb", "meta.json")]
    wanted += ["quickstart.html", "tables/comparison.csv", "grid/method+sparsity/index.html"]
    assert set(wanted) <= {link for _, link, _ in links}
    assert [link for page, link, _ in links if not (page.parent / link).exists()] == []
    assert [part for page, link, part in links if part and not link and f'id="{part}"' not in pages[page]] == []


def test_a_variants_bars_have_the_bases_numbers_over_them(results, tmp_path_factory, monkeypatch):
    own, card = tmp_path_factory.mktemp("variant"), {"caption": "ms, measured", "bars": {"packed": 5.0, "csr": 40.0}}
    save(own, "endor/fig05", SOUND | {"card": card})
    save(own, "endor/tab_e2e", SOUND)
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(own))
    cards = cards_of(write_report({}, variant=report.Variant({"repetitions": 3}, results)).read_text())
    drawn = cards["endor/fig05"]
    assert drawn.count("text-bars") == 1
    assert re.findall(r'width: ([\d.]+)%"></i>(?:<b class="base-mark" style="left: ([\d.]+)%)?', drawn) == [
        ("12.5", "25.0"),
        ("100.0", ""),  # the base has no such bar
    ]
    assert "(10)" in drawn
    assert cards["endor/tab_e2e"].count("<img") == 2  # pictures cannot lie over each other


def test_verdicts_stand_apart_by_kind_and_only_predictions_make_the_score(cards, text, index):
    card, page = cards["endor/fig05"], index.with_name("endor-fig05.html").read_text()
    chips = re.compile(r'<span class="chip ([^"]+)" title="[^"]+">([^<]+)<')
    predicted = [("within-tolerance predicted", "2 within tolerance"), ("differs predicted", "1 differs")]
    assert chips.findall(card) == predicted
    assert chips.findall(page) == [*predicted, ("not-run", "1 not run")]
    assert "3 predictions</strong>: median error 4.0 %, largest 25 %" in card
    assert "null model: 50 %" in card
    legend = text.split("Meaning of the verdicts")[1].split("</details>")[0]
    for name in (*VERDICTS, *KINDS, "limits", "stand-ins", "null model"):
        assert f"{name}</" in legend
    scores = text.split("<h2>Published numbers against ours")[1].split("<tbody>")[1].split("</tbody>")[0]
    assert re.findall(r"<td>(.*?)</td>", scores) == ["1", "10.0 %", "10.0 %", *"–––", "0", "1", "0 of 2"]


def test_the_index_begins_with_a_sentence_and_a_row_a_paper(text):
    head, rest = text.split("Five papers, and what was found")
    found = re.findall(r"<p>(<strong>.*?)</p>", head, re.DOTALL)
    sentences = [" ".join(re.sub("<[^>]+>", "", words).split()) for words in found]
    assert len(sentences) == len(PAPERS)  # beyond the papers is a real model, from kept results
    assert sentences[0].startswith("ENDOR claims a speed-up of 1.51 over dense weights, for")
    assert "; here it is 1.25 for" in sentences[0]
    assert sentences[0].endswith("(measured).")
    assert all(words.endswith("; it was not run here.") for words in sentences[1:-1])
    assert sentences[-1].startswith("A real model under a limit. Within 600 MB for the whole process, Qwen2.5-Coder")
    rows = re.findall(r"<tr>(.*?)</tr>", rest.split("<tbody>")[1].split("</tbody>")[0], re.DOTALL)
    columns = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in rows]
    assert [row[1] for row in columns] == ["1.25", *["not run here"] * 4]
    assert [row[4] for row in columns] == ["direction only", *["not run"] * 4]
    assert "Of 5 papers&#39; headline speed-ups: 4 not run, 1 direction only." in head


CLAIMED = {"claim": "1.50", "here": "1.40", "bytes": "1.77", "rival": "1.20", "price": "2.06"}
MEASURED = {"evidence": "measured", "ours_low": 1.3, "disturbed": 0.0}
WHOLE = {"rows": 0, "of": 4}


@pytest.mark.parametrize(
    ("numbers", "evidence", "row", "disturbed", "expected"),
    [
        ({"here": "1.40"}, "measured", {}, WHOLE, "same effect"),  # 0.4 of 0.5
        ({"here": "1.40"}, "measured", {"ours_low": 0.9}, WHOLE, "direction only"),  # within the spread of runs
        ({"here": "0.73"}, "measured", {}, WHOLE, "differs"),
        ({"here": "1.40", "claim": "1.00"}, "measured", {}, WHOLE, "differs"),  # no effect is published
        ({"here": "1.45"}, "modelled", {}, WHOLE, "within tolerance"),
        ({"here": "1.45"}, "measured", {}, WHOLE, "same effect"),  # another machine is never within the tolerance
        ({"here": "1.90"}, "measured", {}, WHOLE, findings.FAULTY),
        ({"here": "0.73"}, "measured", {"reason": DISTURBED}, WHOLE, findings.UNUSABLE),
        ({"here": "0.73"}, "measured", {}, {"rows": 3, "of": 4}, findings.UNUSABLE),
        ({"here": "1.45"}, "modelled", {}, {"rows": 3, "of": 4}, "within tolerance"),  # nothing disturbs a model
        ({"here": None}, "measured", {}, WHOLE, "not run"),
    ],
)
def test_the_verdict_of_a_headline_follows_from_the_runs_numbers(
    numbers, evidence, row, disturbed, expected, monkeypatch
):
    monkeypatch.setattr(findings, "row_of", lambda *_: pd.Series(MEASURED | row))
    names = {"machine": ".", "x-here": "x/y/comparison ours claim=z"}
    assert findings._verdict("x", CLAIMED | numbers, evidence, Meta(disturbed=disturbed), names) == expected


def test_the_conclusion_counts_verdicts_and_faster_rivals_of_usable_numbers():
    found = [("same effect", "1.2"), ("same effect", "1.3"), (findings.UNUSABLE, "3"), ("not run", None)]
    rows = [{"verdict": verdict, "numbers": {"rival": rival}} for verdict, rival in found]
    assert findings.conclusion(rows) == (
        "Of 4 papers' headline speed-ups: 2 same effect, 1 too disturbed to use, 1 not run; today's best software is "
        "faster than ours in 0 of 2."
    )
    assert findings.conclusion([]) == ""


def test_findings_have_their_cells_and_say_of_each_paper_what_the_readme_says():
    names = read_names()
    known = load_yaml(paths.root() / "data" / "findings.yaml")
    readme = (paths.checkout() / "README.md").read_text(encoding="utf-8").splitlines()
    assert known.pop(findings.BEYOND)["notebook"] in notebooks()
    for paper, finding in known.items():
        assert f"{paper}-claim" in names
        assert findings.EVIDENCE.search(names[f"{paper}-here"])
        (row,) = [line for line in readme if line.startswith("| ") and f"<!--cell {paper}-here-->" in line]
        assert ("price" in finding) == (f"{paper}-price" in names)
        assert finding["idea"] in row
        assert finding.get("rival", "") in row
        assert notebooks()[finding["notebook"]].path.name in row


def test_disturbed_rows_are_told_on_top_on_the_card_and_on_the_page(cards, text, index):
    assert "2 of 17 measured rows were disturbed by other work." in text
    words = "2 of 12 measured rows were disturbed by other work."
    assert words in cards["flash/tab02"]
    assert words in index.with_name("flash-tab02.html").read_text()
    assert "disturbed" not in cards["flash/fig02"]


def test_failures_are_shown_and_rebuilding_leaves_the_results_as_they_are(results, monkeypatch):
    """A run that fails, by its own notebook; then a page that cannot be made."""
    failed = results / ".sweep" / "failed" / "endor__tab_e2e.ipynb"
    failed.parent.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise")]), failed)
    (results / "quickstart" / "page.html").write_text("of an older toolkit")
    index = write_report({"endor/tab_e2e": Outcome(False, "ValueError: on purpose", 3, failed)})
    assert "ValueError: on purpose" in cards_of(index.read_text())["endor/tab_e2e"]
    assert "ValueError: on purpose" in index.with_name("endor-tab_e2e.html").read_text()
    assert "older" in index.with_name("quickstart.html").read_text()

    def fail(executed, page, about, error):
        if about.id == "quickstart":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_page", fail)
    found = cards_of(write_report({}, rebuild=True).read_text())
    assert "cannot be shown" in found["quickstart"]
    assert "No space left" in found["quickstart"]
    assert "cannot be shown" not in found["endor/fig05"]
    assert (results / "quickstart" / "page.html").read_text() == "of an older toolkit"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
@pytest.mark.parametrize(("name", "width"), [("index.html", 400), ("endor-fig05.html", 400)])
def test_a_browser_shows_it_within_the_window_and_asks_for_nothing(index, name, width):
    asked = "performance.getEntriesByType('resource').filter(entry => !entry.name.startsWith('data:')).length"
    wide = "document.documentElement.scrollWidth"
    probe = f"<script>onload = () => parent.postMessage({wide} + ' ' + {asked}, '*')</script>"
    text = index.with_name(name).read_text()
    index.with_name("probe.html").write_text(text.replace("</body>", probe + "</body>"))
    # a headless window is 500 wide at least: a frame is as narrow as it is told to be
    frame = index.with_name("frame.html")
    listen = "<script>onmessage = message => document.title = message.data</script>"
    frame.write_text(f'{listen}<iframe src="probe.html" style="border: 0; width: {width}px; height: 900px"></iframe>')
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={index.with_name('profile')}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"<title>(.*)</title>", dom)[1] == f"{width} 0"


def test_a_packed_report_holds_its_own_files_and_no_link(tmp_path):
    """A link could lead to any file; a time before 1980 is none that a zip can have."""
    own, outside = tmp_path / "report", tmp_path / "outside"
    for folder in (own / "a", outside):
        folder.mkdir(parents=True)
        (folder / "page.html").write_text(folder.name)
    (own / "link.html").symlink_to(outside / "page.html")
    (own / "folder").symlink_to(outside)
    (own / "lost").symlink_to(tmp_path / "nowhere")
    os.mkfifo(own / "pipe")
    os.utime(own / "a" / "page.html", (0, 0))
    with ZipFile(pack(own)) as packed:
        assert {name: packed.read(name) for name in packed.namelist()} == {"report/a/page.html": b"a"}
