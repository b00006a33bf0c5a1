"""`import toolkit as tk`: its names, and what they do on a small model. README's lines run in test_readme.py."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import toolkit as tk
from tests.families import load_family
from tests.test_capabilities import parser_of
from toolkit import memory_limits, paths
from toolkit.commands import pack
from toolkit.errors import UserError
from toolkit.offload.overhead import Overhead, ProcessLimit
from toolkit.source_facts import passed_on

SHORT = {"windows": 2, "sequence_length": 32}
IMPORT = """
import sys, time
begun = time.perf_counter()
import toolkit as tk
assert time.perf_counter() - begun < 0.1
assert dir(tk) == tk.__all__
heavy = {"torch", "numpy", "pandas", "numba", "transformers"}
assert not heavy & sys.modules.keys()
tk.open, tk.plan, tk.machine, tk.prune, tk.pack, tk.perplexity, tk.Timeline
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


@pytest.fixture
def model(tmp_path):
    return load_family("Qwen2", tmp_path / "model", torch.float32)


def test_the_import_is_quick_and_takes_nothing_with_it():
    done = subprocess.run([sys.executable, "-P", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_editor_sees_each_name_as_python_does():
    tree = ast.parse((paths.root() / "toolkit" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(seen) == tk.__all__
    for name, module in seen.items():
        assert getattr(tk, name) is getattr(sys.modules[module], name)
        assert inspect.ismodule(getattr(tk, name)) or "Raises" in inspect.getdoc(getattr(tk, name)), name
    with pytest.raises(AttributeError, match="no attribute 'prume'"):
        tk.prume  # noqa: B018


def namespaces():
    """The packages that list their names for `toolkit.lazy`."""
    for file in sorted((paths.root() / "toolkit").rglob("__init__.py")):
        if "lazy(__name__)" in (text := file.read_text()):
            name = ".".join(file.relative_to(paths.root()).parent.parts)
            yield pytest.param(import_module(name), passed_on(ast.parse(text)), id=name)


@pytest.mark.parametrize(("package", "origins"), [*namespaces()])
def test_a_namespace_lists_names_that_are_there(package, origins):
    assert dir(package) == sorted(package.__all__)
    assert {*package.__all__} == origins.keys() - {"TYPE_CHECKING", "lazy", "_environ", "_lazy"}
    for name in package.__all__:
        value, (module, original) = getattr(package, name), origins[name]
        assert value is getattr(import_module(module), original)
        assert module.startswith("toolkit"), name
        if not inspect.ismodule(value):  # else Python would put the module in its place, once that is imported
            assert importlib.util.find_spec(f"{package.__name__}.{name}") is None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        package.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize(
    ("function", "command", "renamed"),
    [
        (tk.open, "run", {"model": "folder"}),
        (tk.plan, "plan", {}),
        (tk.pack, "pack", {}),
    ],
)
def test_parameters_are_those_of_the_command(function, command, renamed):
    actions = {action.dest: action for action in parser_of(f"sparse-offload {command}")._actions}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("options", "tokenizer"):
            continue
        option = actions[renamed.get(name, name)]
        given = parameter.default
        if (command, name) == ("plan", "loss"):
            assert (given, option.default) == (0.05, "5%")
        elif given is not inspect.Parameter.empty and not (given is None or name == "context"):
            assert given == option.default, name


def test_pack_has_the_parameters_and_defaults_of_its_command():
    actions = {action.dest: action.default for action in parser_of("sparse-offload pack")._actions}
    del actions["help"]
    parameters = inspect.signature(pack.pack).parameters
    assert actions.keys() == parameters.keys()
    for name in actions.keys() - {"model", "out"}:
        assert parameters[name].default == actions[name], name


def test_bits_that_a_quantiser_chose_are_those_that_are_packed(model, tmp_path):
    records = tk.quantise(model, "spqr", outliers=0.02, **SHORT)
    assert all(record.nbytes < record.rows * record.columns for record in records)
    store = tk.pack(model, tmp_path / "packed")
    assert store.variants == ("spqr",)
    model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert tk.pack(model, tmp_path / "changed").variants == ("endor",)
    for wrong, message in {"sqpr": "did you mean 'spqr'", "rtn": "unknown setting of rtn 'outliers'"}.items():
        with pytest.raises(UserError, match=message):
            tk.quantise(model, wrong, outliers=0.02)
    assert {record.sparsity < 0.5 for record in tk.quantise(model, "rtn", bits=3, group=16)} == {True}


def test_a_folder_is_packed_as_by_the_command(model, tmp_path):
    options = {"sparsity": 0.6, "format": "csr", "evaluate": False}
    assert tk.pack(tmp_path / "model", tmp_path / "packed", "magnitude", **options).variants == ("csr",)
    with pytest.raises(UserError, match="an option of --method spqr, not of magnitude"):
        tk.pack(tmp_path / "model", tmp_path / "again", "magnitude", outliers=0.1)
    wrong = {"windows": 0, "format": "endr", "sparsty": 0.5}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name if name != "sparsty" else "did you mean 'sparsity'"):
            tk.pack(tmp_path / "model", tmp_path / "again", **{name: value})


def test_a_limit_counts_from_where_it_is_set(monkeypatch, tmp_path, model):
    monkeypatch.setattr(memory_limits, "anonymous_bytes", lambda: 700_000_000)
    overhead = Overhead(100_000_000, 0, 0, 0, 0, 0, 0)
    assert ProcessLimit.now(400_000_000, overhead, 650_000_000).budget(None) == 250_000_000
    assert ProcessLimit.now(400_000_000, overhead).budget(None) == 0
    tk.pack(model, tmp_path / "packed")
    with pytest.raises(UserError, match="a limit of 1 MB for the process is too small"):
        tk.open(tmp_path / "packed", memory="1MB")


@pytest.mark.parametrize("size", ["much", -1, True, float("nan")])
def test_sizes(size, tmp_path):
    with pytest.raises(UserError, match=f"dram {size}: expected a size such as 500MB"):
        tk.open(tmp_path, dram=size)
    assert [memory_limits.bytes_of("", it) for it in ("1.5KiB", "2 MB", 5.5, None)] == [1536, 2_000_000, 5, None]
    assert [memory_limits.bytes_of("", it) for it in ("0.5gb", "1Gib", "2TB")] == [500_000_000, 2**30, 2 * 10**12]


WRONG = [
    (lambda: tk.perplexity(torch.nn.Linear(2, 2), "a text"), "expected a tokenizer, or token ids"),
    (lambda: tk.perplexity(torch.nn.Linear(2, 2), [[1], [2, 3]]), "expected a tokenizer, or token ids"),
    (lambda: tk.prune("smollm2-135m"), "expected a model in memory"),
    (lambda: tk.quantise(None), "expected a model in memory"),
    (lambda: tk.decode(torch.zeros(2, 2)), "expected what encode gives"),
    (lambda: tk.open(None), "None is no path"),
    (lambda: tk.open("smollm2-135m", context=0), "context=0"),
    (lambda: tk.pack(torch.nn.Linear(2, 2), None), "None is no path"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_a_wrong_argument_is_one_line(call, words):
    with pytest.raises(UserError, match=words):
        call()
