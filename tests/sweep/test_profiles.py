"""Profiles of Snakemake: which folder is meant, and what is said where the executor or its scheduler is not there."""

import os
import sys

import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.records import load_yaml
from toolkit.sweep import profiles
from toolkit.sweep.profiles import find_profile, more_arguments


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """`profile(executor)` makes the profile `mine`; it returns its folder. Whatever plugin is asked for is there."""
    monkeypatch.setattr(profiles.importlib.util, "find_spec", lambda name: name)

    def write(executor: str):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump({"executor": executor}))
        return tmp_path / "mine"

    return write


def test_ours_are_found_by_name_and_have_rules_that_the_snakefile_has(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "_check_executor", lambda name, config: None)
    found = find_profile("slurm", tmp_path)
    assert found == (paths.root() / "data" / "cluster" / "slurm").resolve()
    config = load_yaml(found / "config.yaml")
    snakefile = (paths.root() / "toolkit" / "sweep" / "Snakefile").read_text()
    assert config["executor"] == "slurm"
    assert all(f"rule {rule}" in snakefile or f" as {rule} with" in snakefile for rule in config["set-resources"])


@pytest.mark.parametrize("text", ["[1, 2]", "executor: ..", "a: ["])
def test_a_profile_of_anything_else_is_one_line(profile, tmp_path, text):
    mine = profile("slurm")
    (mine / "config.yaml").write_text(text)
    for read in (lambda: find_profile("mine", tmp_path), lambda: more_arguments(mine)):
        with pytest.raises(UserError, match=r"config.yaml: [^\n]*$"):
            read()


def test_a_scheduler_that_is_not_there_is_one_line(profile, tmp_path, monkeypatch):
    mine = profile("slurm")
    for query, told in (
        (["no-such-command"], "the scheduler is not there: there is no command no-such-command; start"),
        ([sys.executable, "-c", "import sys; sys.exit('cannot reach it')"], ": cannot reach it; start on a login"),
    ):
        monkeypatch.setattr(profiles, "QUERIES", {"slurm": query})
        with pytest.raises(UserError, match=told):
            find_profile("mine", tmp_path)
    monkeypatch.setattr(profiles, "QUERIES", {"slurm": [sys.executable, "-c", ""]})
    assert find_profile("mine", tmp_path) == mine
    monkeypatch.setattr(profiles.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"snakemake-executor-plugin-slurm is not installed"):
        find_profile("mine", tmp_path)
    with pytest.raises(UserError, match=r"--profile slrum: .* did you mean 'slurm'"):
        find_profile("slrum", tmp_path)


def test_without_accounting_squeue_tells_the_states(tmp_path, monkeypatch):
    disabled, squeue = "sys.exit('Slurm accounting storage is disabled')", ["--slurm-status-command", "squeue"]
    for config, accounting, arguments in (
        ({"executor": "slurm"}, disabled, squeue),
        ({"executor": "slurm"}, "", []),
        ({"executor": "slurm", "slurm-status-command": "sacct"}, disabled, []),
        ({"executor": "local"}, disabled, []),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(profiles, "ACCOUNTING", [sys.executable, "-c", f"import sys; {accounting}"])
        assert more_arguments(tmp_path) == arguments


def test_what_a_killed_snakemake_left_in_the_queue_is_cancelled_by_its_run(tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    command = tmp_path / "scancel"
    command.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    log = tmp_path / "snakemake.log"
    log.write_text("Using profile local\n")
    profiles.cancel_jobs(log)
    assert not asked.exists()
    log.write_text("Using profile slurm\nSLURM run ID: 1a2b-3c\nSubmitted job 7\n")
    profiles.cancel_jobs(log)
    assert asked.read_text() == "--name 1a2b-3c\n"
