"""The environment that Binder and conda build: read by their rules, and the same packages as pyproject.toml names."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11 on")

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plan():
    return yaml.safe_load((REPO / "environment.yml").read_text(encoding="utf-8"))


def pip_lines():
    return next(entry["pip"] for entry in plan()["dependencies"] if isinstance(entry, dict))


def test_it_is_an_environment_of_conda_forge():
    found = plan()
    assert set(found) == {"name", "channels", "dependencies"} and found["channels"] == ["conda-forge"]
    names = [entry for entry in found["dependencies"] if isinstance(entry, str)]
    assert "pip" in names, "conda wants pip named where it is used"
    python = next(name for name in names if name.startswith("python=")).partition("=")[2]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)


def test_it_installs_this_package_with_all_that_the_notebooks_need_as_tested():
    lines = pip_lines()
    assert "-e .[lab]" in lines and "-c constraints.txt" in lines
    pins = {}
    for line in (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if "==" in line and not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name.lower()] = next(iter(pin.specifier)).version
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lab"])]
    assert len(wanted) > 20
    unpinned = [r.name for r in wanted if r.name.lower() not in pins]
    assert unpinned == [], "constraints.txt lacks a pin"
    outside = [str(r) for r in wanted if not r.specifier.contains(pins[r.name.lower()], prereleases=True)]
    assert outside == [], "the tested version is outside the range"


def test_binder_reads_the_files_at_the_root():
    """A folder named binder or .binder would make it look nowhere else; other recipes would come first or beside."""
    for other in ("binder", ".binder", "Dockerfile", "requirements.txt", "Pipfile", "runtime.txt"):
        assert not (REPO / other).exists(), other
    script = REPO / "postBuild"
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").startswith("#!")
    subprocess.run(["bash", "-n", script], check=True)
