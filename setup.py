"""Finds the packages of both folders: `kernels/` is imported as `toolkit.kernels`."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {"toolkit": "toolkit", "toolkit.kernels": "kernels"}

packages = list(FOLDERS)
for package, folder in FOLDERS.items():
    packages += [f"{package}.{name}" for name in find_packages(str(Path(__file__).parent / folder))]
setup(packages=packages)
