"""The GPU acceptance on a machine without a GPU: it runs, and reports what fails, hangs, dies or is not reached."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.gpu import acceptance, checks, llama, memory, wheels
from jobs.gpu.registry import CHECKS, ROOT, Check, Environment
from jobs.gpu.tasks import Nested, Words
from tests.helpers import make_plan, patience
from tests.infra import warm


def accept(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.gpu.acceptance", "--device", "cpu", "--out", str(out), *arguments]
    return warm.run(command, patience(240), cwd=ROOT)


def rows(out: Path) -> dict[str, str]:
    """State by check, from the table."""
    header, *lines = (out / "table.txt").read_text().partition("\n\n")[0].splitlines()
    at = header.index("state")
    return {line[:at].strip(): line[at:].split("  ")[0] for line in lines}


@pytest.mark.slow
def test_it_reports_what_passes_and_what_does_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = ("random numbers", "micro_size=auto", "selftest fails", "selftest sleeps", "selftest dies")
    done = accept(out, "--patience", "20", "--budget", "3000", "--parallel", "2", "--only", ";".join(names))
    assert done.returncode == 1, done.stdout + done.stderr
    wanted = ("ok", "skipped", "failed", "failed", "failed")
    assert rows(out) == dict(zip(names, wanted, strict=True)), done.stdout
    assert "there is no such key" in done.stdout, "why it failed"
    assert "not over within" in done.stdout
    assert "ended with status -6" in done.stdout
    assert "1 ok, 3 failed, 1 skipped" in done.stdout
    log = (out / "selftest-fails" / "log").read_text()
    assert "$ launch train no.such.key=1" in log
    left = [line for line in subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines() if str(out) in line]
    assert not left, "a check that is ended takes its processes with it"


@pytest.mark.slow
def test_a_run_of_the_acceptance_is_compared_with_a_plain_loop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = accept(out, "--patience", "20", "--budget", "3000", "--only", "single fp32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(out) == {"single fp32": "ok"}
    assert "of a plain loop" in done.stdout


@pytest.mark.slow
def test_the_checks_that_call_the_strategies_directly_fit_the_code(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = accept(out, "--patience", "20", "--budget", "3000", "--parallel", "2", "--only", "NCCL;random")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(rows(out).values()) == {"ok"}
    assert "4 ok" in done.stdout


LLAMAS = ("llama 1b", "llama 1b, float8", "llama 8b", "llama 8b, float8", "llama documents")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("names", [LLAMAS])
def test_the_llamas_run_on_a_cpu_in_a_small_shape(names: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = names[0] if len(names) == 1 else "llama"
    done = accept(out, "--patience", "20", "--budget", "3000", "--only", only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(out) == dict.fromkeys(names, "ok"), done.stdout
    assert names != LLAMAS or "tokens/s, MFU unknown; predicted 0.0" in done.stdout


def test_what_the_budget_does_not_reach_is_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = accept(out, "--budget", "0", "--only", "single")
    assert done.returncode == 1
    assert set(rows(out).values()) == {"not run"}
    assert not list(out.glob("*/log"))


def test_the_order_is_by_importance_and_what_is_measured_comes_alone() -> None:
    names = acceptance.ordered(list(CHECKS))
    assert sorted(names) == sorted(CHECKS)
    alone = [CHECKS[name].alone for name in names]
    assert alone == sorted(alone)
    for begin in acceptance.FIRST:
        assert any(name.startswith(begin) for name in names), begin


class Typed(Exception):
    """Raised in place of the first command of a check, with its arguments."""


def module_of(check: Check) -> str:
    return getattr(check.function, "func", check.function).__module__


class Recorded(Environment):
    def launch(self, *arguments: str, status: int = 0, **env: str) -> str:  # noqa: ARG002
        raise Typed(status, *arguments)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, check in CHECKS.items()
        if module_of(check) in (checks.__name__, llama.__name__, memory.__name__) and name != "llama documents"
    ],
)
def test_each_check_gives_keys_that_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that needs a GPU is typed here too. Its device is replaced: this machine may have none."""
    monkeypatch.setattr(checks, "need_cuda", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda _: "cc")
    with pytest.raises(Typed) as typed:
        CHECKS[name].function(Recorded("cpu", tmp_path, 60))
    _, verb, *words = typed.value.args
    if verb != "doctor":
        keys = [word for word in words if not word.startswith(("-", "cluster.device="))]
        plan = make_plan(*keys, "cluster.device=cuda", gpus=8)
        assert plan.batch.global_size % plan.batch.world_size == 0


def test_a_batch_that_stays_elsewhere_is_seen() -> None:
    """The check would always pass if its task did not look."""
    task = Nested()
    batch = task.collate([task.train_data()[i] for i in range(3)])
    model = task.model()
    assert task.loss(model, batch).items == Words.loss(task, model, batch["words"]).items
    batch["dataclass"].words = batch["dataclass"].words.to("meta")
    with pytest.raises(RuntimeError, match="not on cpu: dataclass"):
        task.loss(model, batch)


def test_the_wheels_are_all_that_the_launcher_needs_beside_torch() -> None:
    names = {requirement.partition("==")[0] for requirement in wheels.needed("3.12")}
    assert {
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime",
        "submitit",
        "wandb",
        "rich",
        "orjson",
        "numpy",
    } <= names
    assert not {"torch", "sympy", "networkx", "fsspec"} & names


def test_without_a_folder_of_wheels_it_says_how_to_make_one(tmp_path: Path) -> None:
    command = [sys.executable, "jobs/gpu/wheels.py", "install", str(tmp_path), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "make gpu-wheels" in done.stderr
