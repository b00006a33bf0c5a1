"""Finds the packages of both folders: `kernels/` is imported as `toolkit.kernels`. Notebooks and data come along."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {"toolkit": "toolkit", "toolkit.kernels": "kernels"}
FILES = ["toolkit.notebooks", "toolkit.data"]  # no Python; `pyproject.toml` says which files

packages = [*FOLDERS, *FILES]
for package, folder in FOLDERS.items():
    packages += [f"{package}.{name}" for name in find_packages(str(Path(__file__).parent / folder))]
setup(packages=packages)
