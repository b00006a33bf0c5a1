from pathlib import Path

import pytest

from toolkit import paths, sources


@pytest.fixture
def project(tmp_path, monkeypatch):
    files = {
        "toolkit/__init__.py": "",
        "toolkit/a.py": "from toolkit import b\n",
        "toolkit/b.py": "def f():\n    from toolkit.pack.c import thing\n",
        "toolkit/pack/__init__.py": "",
        "toolkit/pack/c.py": "from .d import x\nimport json\n",
        "toolkit/pack/d.py": "from toolkit.kernels import k\nfrom ..a import nothing\n",
        "toolkit/unused.py": "import toolkit.a\n",
        "kernels/__init__.py": "",
        "kernels/k.py": "import numpy\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    return tmp_path


def names(files: list[Path], root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in files]


def test_imports_are_followed_lazily_relatively_through_packages_and_cycles(project):
    everything = ["__init__.py", "a.py", "b.py", "pack/__init__.py", "pack/c.py", "pack/d.py"]
    expected = ["kernels/__init__.py", "kernels/k.py", *(f"toolkit/{name}" for name in everything)]
    assert names(sources.dependencies("toolkit.a"), project) == expected
    assert names(sources.imports("from toolkit.a import f"), project) == expected
    assert names(sources.imports("import toolkit.kernels.k, numpy"), project) == [*expected[:2], "toolkit/__init__.py"]
    assert sources.imports("import torch") == []


def test_fingerprint_sees_code_and_not_comments(project):
    files = sources.dependencies("toolkit.a")
    before = sources.fingerprint(files)
    (project / "toolkit/b.py").write_text("# why\n\n\ndef f( ):\n    from toolkit.pack.c import (thing)\n")
    assert sources.fingerprint(files) == before
    (project / "toolkit/b.py").write_text("def f():\n    from toolkit.pack.c import other\n")
    assert sources.fingerprint(files) != before


def test_an_edited_file_is_read_again(project):
    assert "toolkit/unused.py" not in names(sources.dependencies("toolkit.a"), project)
    (project / "toolkit/a.py").write_text("from toolkit import b, unused\n")
    assert "toolkit/unused.py" in names(sources.dependencies("toolkit.a"), project)
