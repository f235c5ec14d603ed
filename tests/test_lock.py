"""constraints.txt is a lock: what an installation brings, however deep, has one version there."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher import DISTRIBUTION
from tests.helpers import ROOT

# pinned by torch itself, which asks for exactly one version of each; a CPU build brings none of them
TORCHS_OWN = re.compile(r"nvidia-.*|cuda-.*|triton")


def pinned() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def brought_by(name: str, extras: frozenset[str], python: str) -> dict[str, str]:
    """Everything that this distribution needs on that Python, with who asks for it. What is not installed here has no
    requirements that could be followed."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        for requirement in map(Requirement, _requires(name)):
            if not any(_applies(requirement, extra, python) for extra in extras or {""}):
                continue
            wanted = canonicalize_name(requirement.name)
            if wanted not in found or requirement.extras:
                waiting.append((wanted, frozenset({"", *requirement.extras})))
            found.setdefault(wanted, name)
            assert len(found) < 1000, "two distributions ask for each other's extras"
    return found


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _applies(requirement: Requirement, extra: str, python: str) -> bool:
    environment: Any = {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", ["3.11", "3.12"])  # of Debian 12 and of Ubuntu 24.04
def test_everything_that_comes_along_is_pinned(python: str) -> None:
    pins = pinned()
    missing = {
        name: by
        for name, by in brought_by(DISTRIBUTION, frozenset(), python).items()
        if name not in pins and not TORCHS_OWN.fullmatch(name)
    }
    assert not missing, "constraints.txt lacks " + ", ".join(
        f"{name} ({by} asks for it)" for name, by in missing.items()
    )


def test_the_walk_finds_what_is_deep() -> None:
    found = brought_by(DISTRIBUTION, frozenset(), "3.11")
    assert found["antlr4-python3-runtime"] in ("omegaconf", "hydra-core")
    assert {"mpmath", "mdurl", "cloudpickle"} <= found.keys()
    assert "pytest" not in found, "extras are not asked for"


def test_names_are_written_one_way() -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    names = [line.split("==")[0] for line in lines if line]
    assert names == [canonicalize_name(name) for name in names]
    assert len(set(names)) == len(names), "a name twice"
