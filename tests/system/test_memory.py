"""A rank that runs out of memory: the run ends in its own words, or goes on with smaller micro-batches and the same
windows. The limit is the kernel's, and what it refuses is torch's own allocator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch
from tests.helpers import launch as launch_in
from tests.infra.runs import OWN, PROJECT, processes_of, records, summary

pytestmark = pytest.mark.slow

LIMITED = (
    *OWN, "task._target_=speech.memory.Limited", "task.samples=240", "batch.micro_size=6", "train.steps=8",
    "run.calibrate_s=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same windows with memory enough."""
    project = tmp_path_factory.mktemp("whole")
    shutil.copytree(PROJECT / "speech", project / "speech")
    done = launch_in("train", *LIMITED, "task.rank=9", "batch.micro_size=12", cwd=project)
    assert done.returncode == 0, done.stderr
    return project / "runs" / "own"


def assert_same_windows(run: Path, whole: Path) -> None:
    mine, wanted = records(run), records(whole)
    assert [record["step"] for record in mine] == [*range(1, 9)]
    for key in ("batch/samples", "batch/items", "progress/samples"):
        assert [record[key] for record in mine] == [record[key] for record in wanted]
    for key in ("train/loss", "train/grad_norm"):
        assert [record[key] for record in mine] == pytest.approx([record[key] for record in wanted], rel=1e-4)
    assert summary(run)["verdict"] == "done"
    assert processes_of(run) == []


def sizes(run: Path) -> list[tuple[Any, Any]]:
    return [(record["batch/micro_size"], record["batch/accumulation"]) for record in records(run)]


def test_the_window_is_done_again_in_smaller_micro_batches(launch: Launch, project: Path, whole: Path) -> None:
    """From the third window on one rank has room for two samples: two halvings, in the middle of the window, while the
    other rank has memory enough."""
    done = launch("train", *LIMITED, "batch.on_oom=shrink", "task.room=2", "task.after=5", "checkpoint.every=4")
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "runs" / "own"
    assert_same_windows(run, whole)
    assert sizes(run) == [(6, 2)] * 2 + [(2, 6)] * 6
    assert summary(run)["resumed"] == 0, "in place"
    log = (run / "logs" / "rank0.log").read_text()
    assert "step 3: out of memory. Continuing with 24 samples = 3 micro-batch × 4 accumulation × 2 ranks" in log
    assert json.loads((run / "fitted.json").read_text())["micro_size"] == 2


@pytest.mark.parametrize("where", ["strategy=ddp strategy.sync=every task.where=backward", "strategy=fsdp"])
def test_where_others_wait_in_a_collective_the_workers_begin_again(
    launch: Launch, project: Path, whole: Path, where: str
) -> None:
    words = ("batch.on_oom=shrink", "task.room=3", "task.after=9", "checkpoint.every=2", *where.split())
    done = launch("train", *LIMITED, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "runs" / "own"
    assert_same_windows(run, whole)
    assert sizes(run) == [(6, 2)] * 4 + [(3, 4)] * 4
    assert summary(run)["resumed"] == 1
    assert "Micro-batches of 3: larger ones did not fit" in (run / "logs" / "rank0.attempt1.log").read_text()


def test_auto_finds_the_largest_that_fits(launch: Launch, project: Path, whole: Path) -> None:
    done = launch("train", *LIMITED, "batch.micro_size=auto", "task.room=4")
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "runs" / "own"
    assert_same_windows(run, whole)
    assert sizes(run) == [(3, 4)] * 8
    assert not (run / "logs" / "rank0.attempt1.log").exists(), "in place, in the first window"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.room=3"], ["with micro-batches of 6", "Use batch.micro_size=3, or batch.on_oom=shrink"]),
        (
            ["task.room=0", "batch.micro_size=1", "batch.on_oom=shrink"],
            ["with micro-batches of 1", "The micro-batch is one sample already", "strategy.recompute=blocks"],
        ),
    ],
)
def test_what_does_not_fit_is_said_in_plain_words(launch: Launch, words: list[str], said: list[str]) -> None:
    done = launch("train", *LIMITED, *words)
    assert done.returncode == 1
    assert "Rank 1 ran out of memory at step 1" in done.stderr
    for text in said:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
