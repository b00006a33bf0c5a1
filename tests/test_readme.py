"""README is short, and its Python runs. Its commands: `test_capabilities.py`."""

import re

import torch

from tests.families import load_family
from toolkit import paths

TEXT = (paths.root() / "README.md").read_text(encoding="utf-8")

SHORTER = {
    '"smollm2-135m"': '"model"',
    "sparsity=0.5": "sparsity=0.5, windows=2, sequence_length=64",
    "windows=4, evaluate": "windows=4, sequence_length=64, evaluate",
    '"400MB"': '"900MB"',  # where nothing was compiled and imported before
}


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def python_of(page: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", (paths.root() / page).read_text(encoding="utf-8"), re.DOTALL))


def test_its_python_is_the_beginning_of_the_page_on_python():
    *lines, plan = python_of("README.md").splitlines(keepends=True)
    assert python_of("docs/api.md").startswith("".join(lines))
    assert plan.startswith('print(tk.plan("llama2-70b", memory="24GB"))')  # runs in tests/planner


def test_the_page_on_python_runs(tmp_path, monkeypatch, capsys):
    """With a small model in the place of the one that is downloaded, and little text."""
    load_family("Llama, tied", tmp_path / "model", torch.float32)
    monkeypatch.chdir(tmp_path)
    code = python_of("docs/api.md")
    for name, shorter in SHORTER.items():
        assert name in code
        code = code.replace(name, shorter)
    exec(compile(code, "docs/api.md", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"^\d+\.\d+\n", shown)
    assert re.search(r"^ *\d+ +total ", shown, re.MULTILINE)
    assert re.search(r"^\d+\.\d\d s, \d+ tokens, perplexity \d+\.\d ± \d+\.\d$", shown, re.MULTILINE)
    assert "% of the dense bytes; decoded (96, 64)\n" in shown
