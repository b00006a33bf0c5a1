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
    expected = ["kernels/k.py", *(f"toolkit/{name}" for name in ("a.py", "b.py", "pack/c.py", "pack/d.py"))]
    assert names(sources.dependencies("toolkit.a"), project) == expected
    assert names(sources.imports("from toolkit.a import f"), project) == expected
    assert names(sources.imports("import toolkit.kernels.k, numpy"), project) == ["kernels/k.py"]
    assert sources.imports("import torch") == []


def found(code, project):
    return names(sources.imports(code), project)


def test_a_name_that_a_package_passes_on_leads_to_where_it_is_from(project):
    door = """from toolkit.pack.c import thing
from .d import x as other, y
from json import loads
def own(): ...
def y(): ...
REGISTRY = {"thing": thing}
"""
    (project / "toolkit/pack/__init__.py").write_text(door)
    (project / "toolkit/pack/c.py").write_text("")
    (project / "toolkit/pack/d.py").write_text("import toolkit.unused")
    (project / "toolkit/unused.py").write_text("")
    (project / "toolkit/a.py").write_text("from toolkit.pack import other")
    assert found("from toolkit.pack import thing", project) == ["toolkit/pack/c.py"]
    assert found("from toolkit.pack import other", project) == ["toolkit/pack/d.py", "toolkit/unused.py"]
    assert found("from toolkit.a import other", project) == ["toolkit/a.py", "toolkit/pack/d.py", "toolkit/unused.py"]
    assert found("from toolkit.pack import d", project) == ["toolkit/pack/d.py", "toolkit/unused.py"]
    everything = [f"toolkit/{name}.py" for name in ("pack/__init__", "pack/c", "pack/d", "unused")]
    for defined in ("own", "y", "REGISTRY", "loads", "thing, own", "*"):  # in the package itself, or it cannot be told
        assert found(f"from toolkit.pack import {defined}", project) == everything
    assert found("import toolkit.pack", project) == everything


def test_what_is_left_out_and_what_only_that_imports(project):
    assert names(sources.dependencies("toolkit.b", without=["toolkit.pack.d"]), project) == [
        "toolkit/b.py",
        "toolkit/pack/c.py",
    ]
    (project / "toolkit/cache.py").write_text("import toolkit.a")
    (project / "toolkit/unused.py").write_text("import toolkit.cache")
    assert names(sources.dependencies("toolkit.unused"), project) == ["toolkit/unused.py"]
    assert "toolkit/cache.py" in found("import toolkit.unused", project)  # a notebook runs again all the same


def test_fingerprint_sees_code_and_not_comments(project):
    files = sources.dependencies("toolkit.a")
    before = sources.fingerprint(files)
    (project / "toolkit/b.py").write_text("# why\n\n\ndef f( ):\n    from toolkit.pack.c import (thing)\n")
    assert sources.fingerprint(files) == before
    (project / "toolkit/b.py").write_text("def f():\n    from toolkit.pack.c import other\n")
    assert sources.fingerprint(files) != before


def test_data_that_a_module_reads_belongs_to_what_imports_it(project):
    (project / "toolkit/pack/d.py").write_text('READS = ("data/{paper}.yaml", "data/machines/*.yaml")\n')
    (project / "data/machines").mkdir(parents=True)
    for name in ("one", "two", "machines/m"):
        (project / "data" / f"{name}.yaml").write_text("- value: 1\n")
    named = names(sources.imports("import toolkit.b", paper="one"), project)
    assert [name for name in named if name.startswith("data")] == ["data/machines/m.yaml", "data/one.yaml"]
    found = names(sources.dependencies("toolkit.pack.c"), project)
    every = [f"data/{name}.yaml" for name in ("machines/m", "one", "two")]
    assert [name for name in found if name.startswith("data")] == every
    assert not any("data" in name for name in names(sources.imports("import toolkit.kernels.k", paper="one"), project))


def test_a_name_of_the_front_door_leads_to_where_it_is_from(project):
    door = """from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from toolkit.pack.c import thing
    from toolkit.unused import other
"""
    (project / "toolkit/__init__.py").write_text(door)
    (project / "toolkit/pack/c.py").write_text("")
    (project / "toolkit/unused.py").write_text("")
    assert found("import toolkit as tk\ntk.thing()", project) == ["toolkit/pack/c.py"]
    assert found("import toolkit\ntoolkit.other()", project) == ["toolkit/unused.py"]
    assert found("import toolkit as tk", project) == []


NAMESPACE = """from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from toolkit.pack import d
    from toolkit.pack.c import thing
else:
    __getattr__, __dir__ = lazy(__name__)
def own(): ...
"""


def test_an_attribute_of_a_package_leads_to_where_it_is_from(project):
    (project / "toolkit/pack/__init__.py").write_text(NAMESPACE)
    (project / "toolkit/pack/c.py").write_text("")
    (project / "toolkit/pack/d.py").write_text("import toolkit.unused")
    (project / "toolkit/unused.py").write_text("")
    (project / "toolkit/__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toolkit import pack\n"
    )
    d, everything = ["toolkit/pack/d.py", "toolkit/unused.py"], ["__init__", "c", "d"]
    everything = [*(f"toolkit/pack/{name}.py" for name in everything), "toolkit/unused.py"]
    for line, name in (
        ("from toolkit import pack", "pack"),
        ("from toolkit import pack as p", "p"),
        ("import toolkit.pack as p", "p"),
        ("import toolkit as tk", "tk.pack"),
        ("import toolkit", "toolkit.pack"),
    ):
        assert found(f"{line}\n{name}.thing(1).own", project) == ["toolkit/pack/c.py"]
        assert found(f"{line}\ndef f(): return [{name}.d.f.own]", project) == d
        assert found(f"{line}\n{name}.thing, {name}.d", project) == ["toolkit/pack/c.py", *d]
        for used_as_a_whole in (
            f"getattr({name}, 'thing')",
            f"{name}.own()",
            f"{name}.nothing",
            f"p, q = {name}.d, {name}",
        ):
            assert found(f"{line}\n{used_as_a_whole}", project) == everything
    assert found("from toolkit import pack", project) == everything
    (project / "toolkit/a.py").write_text("from . import pack\npack.thing")
    assert found("from toolkit.a import f", project) == ["toolkit/a.py", "toolkit/pack/c.py"]


def test_names_of_the_rooms_and_papers_lead_to_few_files():
    code = "import toolkit as tk\nfrom toolkit.papers import hermes\ntk.residency.SlidingWindow, hermes.greedy"
    read = names(sources.imports(code), paths.root())
    assert {"toolkit/residency/policies.py", "toolkit/papers/hermes/mapping.py"} <= {*read}
    assert not {"toolkit/__init__.py", "toolkit/residency/__init__.py", "toolkit/papers/hermes/__init__.py"} & {*read}
    assert "toolkit/papers/hermes/systems.py" not in read
