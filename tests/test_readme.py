"""README is short, and its Python runs. Its commands: `test_capabilities.py`."""

import re

from toolkit import paths

TEXT = (paths.root() / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_its_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "57% of the dense bytes; decoded (1536, 576)\n"
