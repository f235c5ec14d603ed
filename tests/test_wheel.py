"""The wheel in an empty environment: what it declares is all that it needs, and it runs from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from email.parser import Parser
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import CORPUS, ROOT

pytestmark = pytest.mark.slow

SMALL = (CORPUS, "task.width=16", "task.heads=1", "task.depth=1", "task.seq_len=16", "task.eval_samples=32")
BATCH = ("batch.global_size=8", "batch.micro_size=2", "wandb.mode=disabled")
ONE = "cluster.workers_per_node=1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    built = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(ROOT)]
    subprocess.run(command, check=True)
    return next(built.glob("*.whl"))


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"launcher/conf/config.yaml", "launcher/py.typed"} <= {*names}
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert {
        f"launcher/extensions/page/{name}" for name in ("page.html.j2", "scripts.html.j2", "page.css", "page.js")
    } <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "jobs/"))]
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "launcher").rglob("*.py")}
    assert modules <= {*names}, "hatchling leaves out what .gitignore names"


def needed_by(wheel: Path) -> list[Distribution]:
    """Return the installed distributions that ``wheel`` asks for, and what these ask for in their turn."""
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    declared = Parser().parsestr(zipfile.ZipFile(wheel).read(metadata).decode()).get_all("Requires-Dist", [])
    waiting, seen = [("", line) for line in declared], {}
    while waiting:
        extra, line = waiting.pop()
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        for extra in ("", *asked.extras):
            if (canonicalize_name(asked.name), extra) not in seen:
                found = distribution(asked.name)
                seen[canonicalize_name(asked.name), extra] = found
                waiting += [(extra, line) for line in found.requires or []]
    return list({str(found.locate_file("")) + found.name: found for found in seen.values()}.values())


def linked_environment(wheel: Path, venv: Path) -> None:
    """Make an environment with the wheel, and of other packages only those that it declares, with what they need.

    These are links to the files of this environment: to unpack and compile torch once more takes a minute.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    owners = Counter(top for found in distributions() for top in {Path(file).parts[0] for file in found.files or []})
    for found in needed_by(wheel):
        files = [Path(file) for file in found.files or []]
        # a directory of several distributions has files of its own here
        for path in {file if owners[file.parts[0]] > 1 else Path(file.parts[0]) for file in files}:
            if path.parts[0] not in ("..", "__pycache__"):
                (site / path).parent.mkdir(parents=True, exist_ok=True)
                (site / path).symlink_to(Path(str(found.locate_file(path))))
    # pip looks whether everything that the wheel asks for is there, and has no place to take it from
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "-q", "--no-index"]
    subprocess.run([*pip, str(wheel)], env={**os.environ, "PIP_FIND_LINKS": ""}, check=True)


def installed_environment(wheel: Path, venv: Path) -> None:
    """Make an environment as a user does: pip finds and unpacks everything that the wheel declares."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin/pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "torch"], check=True)  # first: where a CPU build is at hand, its pin finds it
    subprocess.run([*install, str(wheel)], check=True)


@pytest.mark.parametrize("make", [linked_environment, pytest.param(installed_environment, marks=pytest.mark.nightly)])
def test_it_works_in_an_empty_environment(make: Callable[[Path, Path], None], wheel: Path, tmp_path: Path) -> None:
    """Only with what the wheel declares: a package that the tests bring along once hid a missing one."""
    venv, place = tmp_path / "venv", tmp_path / "elsewhere"
    place.mkdir()
    make(wheel, venv)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def launch(*arguments: str) -> str:
        done = subprocess.run(
            [str(venv / "bin/launch"), *arguments],
            cwd=place, env=plain, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = (*SMALL, *BATCH)
    first = ("strategy=fsdp", ONE, "train.steps=2", "run.name=first", "wandb.mode=offline")
    trained = launch("train", *job, *first)
    assert "global batch" in trained
    assert "Numpy" not in trained
    assert (place / "runs/first/checkpoints/step_000002/.metadata").exists()
    launch("resume", "first", "train.steps=4", "cluster.workers_per_node=2")
    assert (place / "runs/first/checkpoints/step_000004/.metadata").exists()
    if make is installed_environment:
        assert "planned 2 of 2" in launch("plan", "-m", *SMALL, BATCH[0], "batch.micro_size=1,2", ONE)
        assert "Verdict" in launch("verify", *job, ONE)
        sweep = ("batch.accumulation=2", "batch.global_size=null", "train.steps=2", "sweep.name=grid")
        launch("train", "-m", *job, ONE, *sweep)
        assert "grid" in launch("runs", "grid")
    launch("report", "runs")
    assert (place / "runs/report.html").exists()
