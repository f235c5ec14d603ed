"""Files around the package: version, licence, hooks. Each fact has one place, and the others agree with it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import launcher
from tests.helpers import ROOT

COME_ALONG = ("omegaconf", "markupsafe")  # with Hydra and Jinja, of whose interfaces they are a part
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_pyproject() -> None:
    assert launcher.__version__ == PROJECT["version"], "run `make lint` once: the installed package is an older one"
    assert not hasattr(launcher, "__no_such_name__")


def test_the_changelog_has_an_entry_for_what_is_not_released() -> None:
    headings = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_the_licence_is_the_declared_one() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_hooks_have_the_versions_of_the_tools() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pins = dict(re.findall(r"^(ruff|pyright)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {hook["id"]: repo["rev"] for repo in repos for hook in repo["hooks"]} == {
        "ruff-check": f"v{pins['ruff']}", "ruff-format": f"v{pins['ruff']}", "pyright": f"v{pins['pyright']}",
    }  # fmt: skip


def test_the_workflow_has_every_supported_torch() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    suite = workflow["jobs"]["suite"]
    (pin,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (least,) = re.findall(r"torch>=([\d.]+)", " ".join(PROJECT["dependencies"]))
    versions = suite["strategy"]["matrix"]["torch"]
    assert versions[0].startswith(least)
    assert versions[-1] == pin
    assert suite["steps"][-1]["run"].endswith(".ci/run")


def test_texts_name_this_distribution_and_no_other_of_its_import_name() -> None:
    """The package index has another project `launcher`, which `pip install 'launcher[hf]'` would run code of."""
    assert PROJECT["name"] == launcher.DISTRIBUTION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    extras = "|".join(PROJECT["optional-dependencies"])
    other = re.compile(
        rf"(?<![\w./-])launcher\\?\[({extras})\b|\bpip3? install\b[^\n]*?[ '\"]launcher(?![\w/.-])"
        r"|metadata\.version\(['\"]launcher"
    )
    places = [ROOT / name for name in ("launcher", "conf", "jobs", "tests", "docs", "docker", ".github", ".ci")]
    files = [file for place in places for file in place.rglob("*")] + [*ROOT.glob("*.*"), ROOT / "Makefile"]
    texts = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".cff", "")
    found = {
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        if file.is_file() and file.suffix in texts and file != Path(__file__)
        for match in other.finditer(file.read_text(encoding="utf-8", errors="replace"))
    }
    assert not found


def test_every_package_that_is_imported_is_declared() -> None:
    """Within seconds, where tests/test_wheel.py takes minutes."""
    extras = [name for names in PROJECT["optional-dependencies"].values() for name in names]
    declared = {canonicalize_name(Requirement(name).name) for name in [*PROJECT["dependencies"], *extras]}
    distributions = packages_distributions()
    missing: set[str] = set()
    for file in (ROOT / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            tops = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "launcher", *COME_ALONG}
            missing |= {top for top in tops if declared.isdisjoint(map(canonicalize_name, distributions.get(top, ())))}
    assert missing == set()
