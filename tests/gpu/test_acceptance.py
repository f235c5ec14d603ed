"""The GPU acceptance on a machine without a GPU: it runs, and reports what fails, hangs, dies or is not reached."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from jobs.gpu import acceptance, checks, llama, node, wheels
from jobs.gpu.engine_checks import idle_us
from jobs.gpu.registry import CHECKS, ROOT, Check, Environment
from jobs.gpu.tasks import Nested, Words
from launcher.plan import host
from tests.helpers import make_plan, patience
from tests.infra import warm
from tests.infra.runs import wait_for


def accept(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.gpu.acceptance", "--device", "cpu", "--out", str(out), *arguments]
    return warm.run(command, patience(240), cwd=ROOT)


def rows(out: Path) -> dict[str, str]:
    """State by check, from the table."""
    (table,) = out.rglob("table.md")
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: state for name, state, *_ in cells}


@pytest.mark.slow
def test_it_reports_what_passes_and_what_does_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wanted = {
        "HSDP on a (1, 1) mesh, delayed": "ok", "DDP's hook, delayed": "ok", "single fp32": "ok",
        "flags of a window": "ok", "micro_size=auto": "skipped", "selftest fails": "failed", "selftest dies": "failed",
        "selftest lingers": "ok",
    }  # fmt: skip
    done = accept(out, "--patience", "20", "--budget", "3000", "--parallel", "2", "--only", ";".join(wanted))
    assert done.returncode == 1, done.stdout + done.stderr
    assert rows(out) == wanted, done.stdout
    assert "of a plain loop" in done.stdout
    assert "there is no such key" in done.stdout, "why it failed"
    assert "ended with status -6" in done.stdout
    assert "5 ok, 2 failed, 1 skipped. On: no GPU, torch" in done.stdout
    log = (out / "part" / "selftest-fails" / "log").read_text()
    assert "$ launch train no.such.key=1" in log


@pytest.fixture
def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "facts", lambda: "a card")  # a process with torch


@pytest.mark.usefixtures("no_facts")
def test_what_is_over_its_limit_has_failed_and_what_the_parts_time_ends_has_not_run(tmp_path: Path) -> None:
    for budget, patience_, state, status in (("300", "1", "failed", 1), ("1.5", "100", "not run", 3)):
        arguments = ["--device", "cpu", "--out", str(tmp_path), "--budget", budget, "--patience", patience_]
        assert acceptance.main([*arguments, "--only", "selftest sleeps"]) == status
        assert rows(tmp_path) == {"selftest sleeps": state}


def test_a_check_that_is_ended_takes_its_processes_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    worker = f"import os, time; os.close(os.open({str(started)!r}, os.O_CREAT)); time.sleep(3600)"
    check = f"import subprocess; subprocess.run({[sys.executable, '-IS', '-c', worker]!r}, start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-IS", "-c", check], start_new_session=True)
    wait_for(started.exists, "the worker")
    (own,) = psutil.Process(process.pid).children()
    acceptance.end_with_descendants(process)
    wait_for(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE, "the end of the worker")


@pytest.mark.usefixtures("no_facts")
def test_what_the_budget_does_not_reach_is_not_run(tmp_path: Path) -> None:
    assert acceptance.main(["--device", "cpu", "--out", str(tmp_path), "--budget", "0", "--only", "single"]) == 3
    assert set(rows(tmp_path).values()) == {"not run"}
    assert not list(tmp_path.rglob("log"))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", ["1", "2", "3"])
def test_a_cpu_runs_what_it_can_of_each_part(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.gpu.acceptance", "--device", "cpu", "--out", str(tmp_path), "--part", part]
    done = warm.run([*command, "--patience", "20", "--budget", "3000"], patience(3000), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(rows(tmp_path).values()) <= {"ok", "skipped"}, done.stdout


def test_each_check_is_in_one_part() -> None:
    listed = [name for names in acceptance.PARTS.values() for name in names]
    assert sorted(listed) == sorted(name for name, check in CHECKS.items() if not check.selftest)


def test_idle_time_before_the_optimizer_is_read_from_a_trace() -> None:
    """Two steps: the backward pass, on thread 2, ends at 30 and at 130; the norm runs in between."""
    events: list[dict[str, Any]] = []
    kernels = [
        (2, 0, 10, "gemm"), (2, 12, 18, "gemm"), (1, 35, 5, "norm"), (1, 47, 9, "FusedAdam"), (1, 60, 9, "FusedAdam"),
        (1, 90, 5, "forward"), (2, 100, 30, "gemm"), (1, 131, 2, "FusedAdam"),
    ]  # fmt: skip
    for number, (thread, start, duration, name) in enumerate(kernels):
        args = {"correlation": number}
        events.append(
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": thread, "ts": 0, "dur": 1, "args": args}
        )
        events.append({"cat": "kernel", "name": name, "tid": 7, "ts": start, "dur": duration, "args": args})
    assert idle_us(events) == [5 + 7, 1]


def module_of(check: Check) -> str:
    return getattr(check.function, "func", check.function).__module__


class Recorded(Environment):
    """Environment in which `launch` does nothing; ``typed`` has the arguments of each call."""

    typed: ClassVar[list[tuple[str, ...]]] = []

    def launch(self, *arguments: str, status: int = 0, **env: str) -> str:  # noqa: ARG002
        self.typed.append(arguments)
        for report in (word.partition("=")[2] for word in arguments if word.startswith("task.report=")):
            Path(report).write_text("matmul 1e-7\n")
        return ""


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, check in CHECKS.items()
        if module_of(check) in (checks.__name__, llama.__name__, node.__name__) and name != "llama documents"
    ],
)
def test_each_check_gives_keys_that_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check runs up to the files that its commands would have made, also as on a GPU."""
    monkeypatch.setattr(checks, "need_cuda", lambda _: None)
    monkeypatch.setattr(node, "need_gpus", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(host, "missing_for_compiling", lambda *_: "")
    monkeypatch.setattr(checks, "plain_loop", lambda *_: None)
    monkeypatch.setattr(checks, "seconds_of", lambda *_: [1.0])
    monkeypatch.setattr(Recorded, "typed", [])
    for device in ("cpu", "cuda") if module_of(CHECKS[name]) == checks.__name__ else ("cpu",):
        with suppress(Exception):
            CHECKS[name].function(Recorded(device, tmp_path))
    assert Recorded.typed
    if name == "fp32 and TF32":
        assert any("precision.tf32=true" in words for words in Recorded.typed)
    commands = {(verb, *(w for w in words if not w.startswith("cluster.device="))) for verb, *words in Recorded.typed}
    for _, *words in (command for command in commands if command[0] != "doctor"):
        keys = [word for word in words if not word.startswith("-")]
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
