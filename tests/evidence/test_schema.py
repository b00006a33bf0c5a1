"""What notebooks' parameters may be: over every notebook, preset and parameter there is."""

import copy
import math
import subprocess
import sys

import pytest

from toolkit import pruning
from toolkit.errors import UserError
from toolkit.evaluation import HUB_TASKS, LOCAL_TASKS
from toolkit.evidence import schema
from toolkit.evidence.catalogue import PRESETS, notebooks
from toolkit.evidence.schema import check_parameters, rules
from toolkit.formats.packed import DTYPES
from toolkit.machines.hardware import profiles
from toolkit.machines.probe import ProbeSettings
from toolkit.models import SHAPES
from toolkit.papers.endor.passes import MAPS, PASS_METHODS
from toolkit.policies.methods import METHODS
from toolkit.policies.ways import POLICIES
from toolkit.studies.forms import CALIBRATED, FORMS
from toolkit.studies.mixtures import MIXTURES
from toolkit.text import CORPORA

BOOKS = notebooks()
every_notebook = pytest.mark.parametrize("id", BOOKS)
OPS = {op for shapes in SHAPES.values() for op in shapes}
NEVER = (
    None,
    {},
    {"a": 1},
    [],
    [[]],
    [None],
    [{}],
    "",
    [""],
    "no such\nthing",
    math.nan,
    [math.nan],
    math.inf,
    -1,
    [-1],
)

ANY_MODEL = (
    "model",
    "second_model",
    "draft_model",
    "sharded_model",
    "quality_model",
)  # a folder or a Hugging Face id as well


def check(id, **parameters):
    check_parameters(id, parameters, BOOKS[id].parameters)


@every_notebook
def test_every_parameter_has_an_entry(id):
    assert BOOKS[id].parameters.keys() <= rules(id).keys()


def test_every_entry_is_of_a_parameter_that_is_there():
    common, special = schema._entries(schema.paths.root() / schema.FILE)
    assert common.keys() == {name for book in BOOKS.values() for name in book.parameters}
    for id, entries in special.items():
        assert entries.keys() <= BOOKS[id].parameters.keys()


@every_notebook
def test_all_presets_pass(id):
    for preset in PRESETS:
        check_parameters(id, BOOKS[id].preset(preset), BOOKS[id].parameters)


@every_notebook
def test_wrong_values_of_each_parameter_are_refused_in_one_line_that_names_them(id):
    for name, value in BOOKS[id].parameters.items():
        wrong = [*NEVER, [value], *([value * 2, value[0]] if isinstance(value, list) else [])]
        wrong += [1, 0] if isinstance(value, bool) else [True, [True]]
        wrong += [float(value), 1.5] if type(value) is int else []
        wrong += [f"{value}x", f"x{value}"] if isinstance(value, str) and name not in ANY_MODEL else []
        for item in wrong:
            with pytest.raises(UserError) as refused:
                check(id, **{name: copy.deepcopy(item)})
            assert str(refused.value).startswith(f"{id}: {name} = ")
            assert ": expected " in str(refused.value)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("id", "name", "registry"),
    [
        ("quickstart", "corpus", CORPORA),
        ("quickstart", "method", pruning.METHODS),
        ("endor/tab_perplexity", "methods", pruning.METHODS),
        ("endor/tab_perplexity", "few_bits", FORMS),
        ("spqr/tab_perplexity", "few_bits", FORMS | CALIBRATED),
        ("spqr/tab_perplexity", "mixtures", MIXTURES),
        ("endor/tab_perplexity", "tasks", LOCAL_TASKS | HUB_TASKS),
        ("endor/fig04", "dtypes", DTYPES),
        ("endor/fig04", "twin_layer", OPS),
        ("endor/fig05", "ops", OPS),
        ("endor/fig05", "methods", METHODS),
        ("endor/fig05", "machine", profiles()),
        ("endor/fig05", "measured_model", SHAPES),
        ("endor/fig07", "policies", POLICIES),
        ("endor/tab_e2e", "twin_models", MAPS),
        ("endor/tab_e2e", "measured_methods", PASS_METHODS),
        ("endor/tab_e2e", "rival_model", [name for name, ops in SHAPES.items() if "gate_proj" in ops]),
        ("flash/fig02", "machines", profiles()),
        ("flash/fig02", "many_threads", ProbeSettings().threads),
        ("spqr/tab1_1", "shown", ["this-machine", *profiles()]),
    ],
)
def test_choices_are_what_the_toolkit_has(id, name, registry):
    rule = rules(id)[name]
    assert sorted(schema._names(rule.choices)) == sorted(registry)


def test_parts_of_a_twin():
    for name in ("opt-66b", "opt-66b/8", "llama2-70b/16"):
        check("endor/fig05", measured_model=name)
    for name in ("opt-66b/", "opt-66b/0", "opt-66b/-8", "opt-66b/8/2", "opt-66b/eight", "opt-66b/٣", "/8"):
        with pytest.raises(UserError, match="NAME/8"):
            check("endor/fig05", measured_model=name)


@pytest.mark.parametrize(
    ("id", "parameters", "message"),
    [
        (
            "quickstart",
            {"method": "wandaa"},
            "quickstart: method = \"wandaa\": expected one of magnitude, sparsegpt, wanda; did you mean 'wanda'?",
        ),
        (
            "beyond/bytes_quality",
            {"sparsities": [1.5]},
            "beyond/bytes_quality: sparsities = [1.5]: expected a list of 1 or more, none of them twice, each a number "
            "from 0 below 1",
        ),
        (
            "endor/tab_perplexity",
            {"patterns": ["50%"]},
            'endor/tab_perplexity: patterns = ["50%"]: expected a list of 1 or more, none of them twice, each one of '
            "50 %, 2:4; did you mean '50 %'?",
        ),
        (
            "endor/fig04",
            {"sparsities": [0.3]},
            "endor/fig04: sparsities = [0.3]: expected a list of 1 or more, none of them twice, each a number from 0 "
            "below 1; it must have 0.5",
        ),
    ],
)
def test_what_is_said(id, parameters, message):
    with pytest.raises(UserError) as refused:
        check(id, **parameters)
    assert str(refused.value) == message


def test_a_long_value_is_cut():
    with pytest.raises(UserError) as refused:
        check("quickstart", seed="7" * 10**6)
    assert len(str(refused.value)) < 400


def test_without_an_entry_values_are_like_the_default():
    check_parameters("toy", {"a": 2, "b": 1, "c": [3], "d": object()}, {"a": 1, "b": 0.5, "c": [1], "d": None})
    for name, value in {"a": 1.5, "b": "x", "c": 1, "e": None}.items():
        with pytest.raises(UserError, match=f"toy: {name} = "):
            check_parameters("toy", {name: value}, {"a": 1, "b": 0.5, "c": [1], "e": True})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameters: {value: {tpye: integer}}", "key of value .*'tpye'.* did you mean 'type'"),
        ("parameters: {value: {type: int}}", "type of value .*'int'; choose from"),
        ("parameters: {value: 3}", "cannot read .*parameters.yaml"),
        ("parameters: [value]", "cannot read"),
        ("notebooks: {toy/a: [value]}", "cannot read"),
        ("[", "cannot read"),
        ("parameters: {value: {choices: ['toolkit/alpha.py:NAMES']}}", "no table NAMES with literal keys in"),
        ("parameters: {value: {choices: ['toolkit/none.py:NAMES']}}", "cannot read .*none.py"),
    ],
)
def test_a_broken_schema_is_named(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(schema.paths, "root", lambda: tmp_path)
    for folder in ("notebooks", "toolkit"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notebooks" / "parameters.yaml").write_text(text)
    (tmp_path / "toolkit" / "alpha.py").write_text("NAMES = dict(a=1)\n")
    with pytest.raises(UserError, match=words):
        check_parameters("toy/a", {"value": "a"}, {"value": "a"})


def test_checking_imports_no_torch():
    code = "import sys; from toolkit.sweep.plan import make_jobs; make_jobs(['quickstart'])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
