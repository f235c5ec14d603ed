"""Writing checkpoints beside the steps, and on disks that refuse: nothing of what was there is lost, nobody hangs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.rundir.paths import RunPaths
from tests.conftest import Launch
from tests.infra.checkpoints import assert_same_tensors, tensors
from tests.infra.runs import OWN, records, run_jobs, start, wait_for
from tests.train.checkpoint.test_load import COMMON, DDP, PLAIN, POWERSGD, assert_same

WORKER = Path(__file__).parent.parent / "train" / "checkpoint" / "saving_worker.py"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

EVERY_2 = [*COMMON, *DDP, "batch.micro_size=4", "checkpoint.every=2"]
AT_ONCE = ["checkpoint.async_save=false"]
GOES_ON = ["checkpoint.on_error=continue"]


def run(jobs: list[dict[str, Any]], place: Path) -> str:
    return run_jobs(WORKER, jobs, 2, place)


def said_of(job: dict[str, Any], output: str) -> list[str]:
    _, _, after = output.partition(f"begins {job['run']}\n")
    return after.partition("begins ")[0].splitlines()


def committed(place: str) -> list[str]:
    """Return the names of all checkpoints, complete or not."""
    return sorted(path.name for path in RunPaths(Path(place)).checkpoints.iterdir())


def names(*steps: int) -> list[str]:
    return ["latest", *(f"step_{step:06d}" for step in steps)]


@contextmanager
def disk(run: Path, options: str) -> Iterator[None]:
    """One of its own for the checkpoints of ``run``."""
    place = run / "checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "checkpoints", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_what_is_written_beside_the_steps_is_what_would_be_written_at_once(tmp_path: Path) -> None:
    options = {
        "ddp": ([*COMMON, *DDP, "batch.micro_size=4"], {}),
        "fsdp": ([*COMMON, "strategy=fsdp", "batch.micro_size=2", "precision=bf16"], PLAIN),
        "powersgd": ([*COMMON, *POWERSGD, "batch.micro_size=4"], {}),
    }
    jobs = [
        {"run": str(tmp_path / name), "overrides": [*overrides, "checkpoint.every=4"], "task": task, "hold": (4, 7)}
        for name, (overrides, task) in options.items()
    ]
    at_once = [
        {"run": f"{job['run']} at once", "overrides": [*job["overrides"], *AT_ONCE], "task": job["task"]}
        for job in jobs
    ]
    output = run([*jobs, *at_once], tmp_path)
    for job in jobs:
        for step in (4, 8, 10):
            ours, theirs = (Path(f"{job['run']}{end}/checkpoints/step_{step:06d}") for end in ("", " at once"))
            assert_same_tensors(ours, theirs)
            assert (ours / "state.json").exists()
        first, later = (tensors(Path(job["run"]) / "checkpoints" / f"step_{step:06d}") for step in (4, 8))
        trained = [name for name in first if name.startswith(("model.layers.0.", "optimizer.state.layers.0.weight."))]
        assert len(trained) > 2
        assert not [name for name in trained if torch.equal(first[name], later[name])], "training went on"
        assert_same(Path(job["run"]), Path(f"{job['run']} at once"), resumed=0)

        copies = [
            json.loads(line.removeprefix("copied ")) for line in said_of(job, output) if line.startswith("copied")
        ]
        whole = sum(t.nbytes for name, t in first.items() if name.startswith(("model.", "optimizer.")))
        kept = sum(t.nbytes for name, t in first.items() if not name.startswith(("model.", "optimizer.", "buffers.")))
        for rank in (0, 1):  # all saved but the last, which is written at once
            one, two = (entry for entry in copies if entry["rank"] == rank)
            assert one["places"] == two["places"], "the memory of the first copy serves the second"
            assert one["bytes"] == two["bytes"] <= 0.55 * whole + 0.5 * kept + 1000, "a rank copies what it writes"
        (seconds,) = (r["time/checkpoint_write_s"] for r in records(Path(job["run"])) if r["step"] == 8)
        assert seconds > 0


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    job = {"run": str(tmp_path / "stopped"), "overrides": [*EVERY_2, "checkpoint.every=4"], "task": {}}
    whole = job | {"run": str(tmp_path / "whole")}
    output = run([whole, job | {"hold": (4, 6), "term": 6}], tmp_path)
    assert committed(job["run"]) == names(4, 6)
    assert (Path(job["run"]) / "checkpoints" / "latest").read_text() == "step_000006\n"
    written = [line for line in said_of(job, output) if line.endswith("written")]
    assert [line.split()[-3] for line in written] == ["4", "6"]
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["verdict"] == "stopped"
    run([job], tmp_path)
    assert_same(tmp_path / "stopped", tmp_path / "whole", resumed=1)


# a full disk at once, and beside the steps a limit that one of two ranks meets. What happens between the saves of steps
# 4 and 8; those of 2 and 4 have ended by then, and so has that of 6
FULL = {"fill": 5, "free": 7, "await": {"5": 2, "7": 3}}
LIMITED = {"limit": 5, "unlimit": 7, "await": {"5": 2, "7": 3}}
REFUSALS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "full": (FULL, AT_ONCE, "rank 0: [Errno 28] No space left on device"),
    "limited beside": (LIMITED, [], "rank 1: [Errno 27] File too large"),
}


def test_a_disk_that_refuses_ends_the_run_or_does_not(tmp_path: Path) -> None:
    jobs = {
        (name, policy): {
            "run": str(tmp_path / f"{name} {policy}"),
            "overrides": [*EVERY_2, *options, f"checkpoint.on_error={policy}"],
            "task": {},
            **events,
            **({"raises": "CheckpointFailed"} if policy == "stop" else {}),
        }
        for name, (events, options, _) in REFUSALS.items()
        for policy in ("stop", "continue")
    }
    whole: dict[str, Any] = {"run": str(tmp_path / "whole"), "overrides": EVERY_2, "task": {}}
    disks = [disk(Path(job["run"]), "size=4m") for (name, _), job in jobs.items() if name.startswith("full")]
    for entered in disks:
        entered.__enter__()
    try:
        output = run([whole, *jobs.values()], tmp_path)
        for (name, policy), job in jobs.items():
            place, said = Path(job["run"]), said_of(job, output)
            (reason,) = {line for line in said if REFUSALS[name][2] in line and "rank 1 of" not in line}
            assert "The checkpoint of step 6 could not be written" in reason
            (room,) = {line for line in said if "The newest complete one is step_000004" in line and "It needs" in line}
            assert "were free" in room
            if policy == "continue":
                assert any(
                    "Training continues (checkpoint.on_error=continue); the next checkpoint is due at step 8" in line
                    for line in said
                )
                assert committed(job["run"]) == names(2, 4, 8, 10)
                summary = json.loads((place / "summary.json").read_text())
                assert (summary["verdict"], summary["checkpoint/failed"]) == ("done", 1)
                assert [r.get("checkpoint/failed", 0) for r in records(place)][-4:] == [1, 1, 1, 1]
                assert_same_tensors(*(p / "checkpoints" / "step_000010" for p in (place, tmp_path / "whole")))
            else:
                assert len([line for line in said if line.startswith("CheckpointFailed on rank")]) == 2
                assert committed(job["run"]) == names(2, 4)
                assert not (place / "summary.json").exists()
                assert len(records(place)) in (6, 7), "those beside it end with the window in which it was noticed"
        again = [
            {key: job[key] for key in ("run", "overrides", "task")}
            for (_, policy), job in jobs.items()
            if policy == "stop"
        ]
        run(again, tmp_path)
        for job in again:
            assert_same(Path(job["run"]), tmp_path / "whole", resumed=1)
    finally:
        for entered in disks:
            entered.__exit__(None, None, None)


def test_no_step_is_taken_where_no_checkpoint_can_be_written(tmp_path: Path) -> None:
    jobs = {
        name: {"run": str(tmp_path / name), "overrides": [*EVERY_2, *GOES_ON], "task": {}, "raises": "CheckpointFailed"}
        for name in ("full", "small", "read only", "in the way")
    }
    (tmp_path / "in the way").mkdir()
    (tmp_path / "in the way" / "checkpoints").touch()
    with (
        disk(tmp_path / "full", "size=4k"), disk(tmp_path / "small", "size=80k"), disk(tmp_path / "read only", "ro")
    ):  # fmt: skip
        output = run([*jobs.values()], tmp_path)
    wanted = {
        "full": "No space left on device",
        "small": "kB are free on that disk",
        "read only": "Read-only file system",
        "in the way": "File exists",
    }
    for name, why in wanted.items():
        said = said_of(jobs[name], output)
        assert [line for line in said if "Checkpoints cannot be written to" in line and why in line], said
        assert not (tmp_path / name / "metrics.jsonl").exists()


def test_a_run_directory_on_a_full_disk_is_one_message(launch: Launch, project: Path) -> None:
    options = (*OWN, "run.dir=disk/checkpoints", "train.steps=50", "task.width=2000")
    with disk(project / "disk", "size=400k"):
        done = launch("train", *options)
        assert done.returncode == 1, done.stderr
        assert re.match(r"launch: rank [01] failed: Checkpoints cannot be written to", done.stderr)
        assert "are free on that disk" in done.stderr
        assert "Traceback" not in done.stderr + done.stdout
    with disk(project / "full", "size=8k"):
        done = launch("train", *options, "run.dir=full/checkpoints")
        assert done.returncode == 2, done.stderr
        assert "cannot be made: No space left on device" in done.stderr
        assert not [*(project / "full" / "checkpoints").iterdir()], "nothing is left behind"


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_that_fills_up_under_the_whole_run_loses_no_step(project: Path, policy: str) -> None:
    """The record, the logs and the verdict lie there too."""
    with disk(project / "disk", "size=2m"):
        options = (
            "run.dir=disk/checkpoints", "task.trouble=slow", "train.steps=40", "checkpoint.every=3",
            "checkpoint.keep=2", f"checkpoint.on_error={policy}", "run.calibrate_s=0",
        )  # fmt: skip
        job = start(project, *options)
        place = project / "disk" / "checkpoints" / "own"
        wait_for(lambda: (place / "checkpoints" / "step_000006").exists(), "two checkpoints")
        filler = project / "disk" / "checkpoints" / "filler"
        fill(filler)
        with job:
            assert job.stdout is not None
            # training continues on the full disk
            out = "".join(takewhile(lambda line: "could not be written" not in line, job.stdout))
            if policy == "continue":
                filler.unlink()
            out += job.stdout.read()
        assert "Traceback" not in out, out
        recorded = [record["step"] for record in records(place)]
        assert recorded == [*range(1, len(recorded) + 1)]
        if policy == "continue":
            assert job.returncode == 0, out
            assert len(recorded) == 40
            assert (place / "checkpoints" / "step_000040").exists()
        else:
            assert job.returncode == 1, out
            assert "No space left on device" in out
            assert (place / "checkpoints" / "step_000006").exists()


def fill(file: Path) -> None:
    """All that is left of its disk."""
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(1 << 10)):
            pass
