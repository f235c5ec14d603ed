"""Files around the package: version, licence, hooks. Each fact has one place, and the others agree with it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

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


def test_the_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    _, _, after = (ROOT / "Makefile").read_text().partition("\nlint:")
    lines = [line.strip() for line in after.partition("\n\n")[0].splitlines()[1:]]
    assert [hook["entry"] for hook in hooks] == [line.replace("$(BIN)", ".venv/bin") for line in lines]


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
