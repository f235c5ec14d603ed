"""Jobs whose output nobody reads, and whose threads do not end: neither holds the end of the job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.errors import EXIT_RESUMABLE
from tests.conftest import Launch
from tests.helpers import patience
from tests.infra.runs import OWN, records, start, summary, wait_for_steps

pytestmark = pytest.mark.slow


def test_output_that_nobody_reads_does_not_hold_a_stop(project: Path) -> None:
    """The pipe is full after the first micro-batch: 2,000 lines of 100 characters."""
    run = project / "runs" / "own"
    with start(project, "task.trouble=chatter", "train.steps=100000") as process:
        wait_for_steps(run, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(60)) == EXIT_RESUMABLE
    assert summary(run)["verdict"] == "stopped"
    assert (run / "checkpoints" / f"step_{records(run)[-1]['step']:06d}").is_dir()


@pytest.mark.usefixtures("project")
def test_a_thread_that_never_ends_does_not_hold_the_end(launch: Launch) -> None:
    done = launch("train", *OWN, "task.trouble=thread", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "The process ends, although threads of the task still run: uploader" in done.stdout
