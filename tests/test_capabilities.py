"""`capabilities.yaml` names what the toolkit can do, and the test that shows it: nothing gets lost unseen."""

import argparse
import ast
import importlib
import re
import shlex
from contextlib import suppress
from functools import cache

import pytest
import yaml

from toolkit import paths

ROOT = paths.root()
LISTED = yaml.safe_load((ROOT / "tests" / "capabilities.yaml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = {  # of each command's `main`, where it is not the command itself
    "sparse-offload": "toolkit.__main__",
    "papermill_runs.sh": "toolkit.sweep.__main__",
}
ALIASES = {"toolkit": "sparse-offload", "toolkit.sweep": "papermill_runs.sh"}


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command such as "papermill_runs.sh" or "sparse-offload run"."""
    script, *names = command.split()
    main = importlib.import_module(MODULES.get(script, script)).main
    parsers = []
    with pytest.MonkeyPatch.context() as patch:

        def parsed(parser, *_):
            parsers.append(parser)
            raise KeyboardInterrupt

        patch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
        with suppress(KeyboardInterrupt):
            main([])
    (parser,) = parsers
    for name in names:
        parser = subcommands(parser)[name]
    return parser


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(*found)


def words_of(line: str) -> list[str]:
    """The words of a documented command, which begin with the name that the list has for it."""
    words = shlex.split(line.partition(" && ")[0], comments=True)
    if words[0].endswith("python") and words[1] == "-m":
        words = [ALIASES.get(words[2], words[2]), *words[3:]]
    return [words[0].rpartition("/")[2], *words[1:]]


def documented() -> list[list[str]]:
    """The words of each command that stands by itself on a page, indented."""
    texts = [re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in PAGES]
    starts = r"sparse-offload|\./|\.venv/bin/|python|pip|podman|mkdir"
    return [words_of(line) for text in texts for line in re.findall(rf"^    ((?:{starts}).*)$", text, re.MULTILINE)]


def named_tests(node: object) -> list[str]:
    """The ids of tests anywhere in the list."""
    if isinstance(node, dict):
        return [name for pair in node.items() for part in pair for name in named_tests(part)]
    return [node] if isinstance(node, str) and node.startswith("tests/") else []


def test_commands_and_flags():
    commands = [name for name in LISTED["commands"] if name != "run_tests.sh"]
    assert {name.split()[1] for name in commands if " " in name} == set(subcommands(parser_of("sparse-offload")))
    for command in commands:
        actions = [action for action in parser_of(command)._actions if action.dest != "help"]
        flags = [flag for action in actions for flag in action.option_strings or [action.dest]]
        assert sorted(" ".join(LISTED["commands"][command].values()).split()) == sorted(flags), command


def test_the_flag_of_the_tests_is_there(pytestconfig):
    assert pytestconfig.getoption(*LISTED["commands"]["run_tests.sh"].values()) in (False, True)


def test_documented_commands():
    """Each is under an entry that has some of its words, and none is left of a command that is gone."""
    entries = {entry: set(entry.split()) for entry in LISTED["documented"]}
    used = {entry for words in documented() for entry, some in entries.items() if some <= set(words)}
    assert used == entries.keys()
    assert [words for words in documented() if not any(some <= set(words) for some in entries.values())] == []


def test_documented_commands_have_options_that_exist():
    for words in documented():
        if words[0] in ("sparse-offload", "papermill_runs.sh") or words[0].startswith("toolkit."):
            parser_of(words[0]).parse_args(words[1:])


@pytest.mark.parametrize("registry", LISTED["registries"])
def test_registered_names(registry):
    module, name = registry.split(":")
    names = getattr(importlib.import_module(module), name)
    assert [str(one) for one in (names() if callable(names) else names)] == LISTED["registries"][registry]["names"]


def test_every_named_test_is_there():
    named = {name: name.split("::") for name in named_tests(LISTED)}
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file, _ in named.values()}
    functions = {file: {getattr(node, "name", "") for node in tree.body} for file, tree in trees.items()}
    assert [name for name, (file, test) in named.items() if test not in functions[file]] == []


def test_modules_that_pages_name_are_there():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"`([a-z_/0-9]+/[a-z_0-9]+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert not {name for name in named if not any((ROOT / at / name).exists() for at in ("", "toolkit"))}
