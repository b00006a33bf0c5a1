"""README is short, and a reader can type its commands."""

import re
import shlex

from toolkit import paths
from toolkit.__main__ import _parser

TEXT = (paths.root() / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_its_commands_have_options_that_exist():
    lines = re.findall(r"^    sparse-offload (.+)$", TEXT, re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"plan", "pack", "run"}
    for line in lines:
        _parser().parse_args(shlex.split(line))


def test_its_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "57% of the dense bytes; decoded (1536, 576)\n"
