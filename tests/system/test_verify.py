"""`launch verify` as a command; tests/extensions/verify/test_verify_worker.py tests the verdicts."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli import run
from tests.conftest import Launch
from tests.helpers import launch_command, patience
from tests.infra import warm

OWN = ("task._target_=speech.tasks.Tagger", "batch.global_size=24", "batch.micro_size=3")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for temporary files of this test alone; its path is short enough for the names of sockets."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def leftovers(directory: Path) -> list[Path]:
    return [*directory.glob("launch-verify-*")]


@pytest.mark.slow
def test_a_printed_certificate_and_nothing_left(launch: Launch, project: Path, temporary: Path) -> None:
    done = launch("verify", *OWN, "strategy=fsdp", "cluster.workers_per_node=2", "precision=bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("24 samples = 3 micro-batch × 4 accumulation × 2 ranks", "fsdp, sync", "window 1: agrees",
                  "short: agrees", "in bf16 ", "(limit ", "Verdict: exact."):  # fmt: skip
        assert words in done.stdout
    assert leftovers(temporary) == []
    assert not (project / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_certificate_for_scripts(launch: Launch) -> None:
    done = launch("verify", *OWN, "task.trouble=unused", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_status"] == 1
    assert found["outcome"] == "training would fail"
    assert "forgotten" in found["reason"]
    assert [hazard["name"] for hazard in found["hazards"]] == ["unused parameters"]


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once(project: Path, temporary: Path) -> None:
    command = launch_command("verify", *OWN, "task.trouble=slow", "task.samples=2000", "batch.accumulation=100",
                             "batch.global_size=null")  # fmt: skip
    with warm.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        assert any("windows on 2 ranks" in line for line in job.stderr)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=patience(20))  # the workers are given more than that to save, and have nothing to save
    assert job.returncode == 130
    assert leftovers(temporary) == []


@pytest.mark.parametrize(
    ("argument", "words"),
    [("batch.globalsize=3", "did you mean 'batch.global_size'"), ("cluster=slurm", "runs its ranks on this machine")],
)
def test_wrong_input_is_one_message(
    argument: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["verify", argument]) == 2
    assert words in capsys.readouterr().err
