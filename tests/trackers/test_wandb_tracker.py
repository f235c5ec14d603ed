"""W&B: what its files have after kills and resumes, and which of its variables count."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb

from launcher.config.key_facts import typed
from launcher.plan.run_plan import RunPlan
from launcher.process import AGENT_PID
from launcher.rundir.paths import RunPaths
from launcher.trackers.tracker import StepEntry, entries_of, sample_files
from launcher.trackers.wandb_tracker import WandbTracker, wandb_media
from tests.helpers import make_plan
from tests.infra.mirrored import differences, in_wandb, record_of, saved_plan, wandb_records
from tests.infra.runs import wait_for

WANDB = {"WANDB_TAGS": "theirs,too", "WANDB_NOTES": "their notes", "WANDB_JOB_TYPE": "theirs", "WANDB_RUN_GROUP": "all"}

NOTES = """it's the "last" one:
  lr = {0.1, [0.2  \\ $HOME"""


@pytest.mark.slow
@pytest.mark.parametrize("configured", [False, True])
def test_the_environment_says_what_the_config_does_not(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WANDB.items():
        monkeypatch.setenv(name, value)
    own = (
        ["wandb.tags=[a,b]", f"wandb.notes={typed(NOTES)}", "wandb.job_type=train", "wandb.group=g"]
        if configured
        else []
    )
    make_plan(*own, run_dir=str(tmp_path)).save()
    adapter = WandbTracker(RunPlan.load(RunPaths(tmp_path).plan), {})  # as the tracker's process reads it
    adapter.open()
    run = adapter._run
    shown = (set(run.tags), run.notes, run.job_type, run.group)
    run.finish()
    wandb.teardown()
    ours, theirs = ({"a", "b"}, NOTES, "train", "g"), ({"theirs", "too"}, "their notes", "theirs", "all")
    assert shown == (ours if configured else theirs)


@pytest.mark.slow
def test_wandb_offline_continues_after_the_last_step_in_its_files(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path / "run", "wandb.mode=offline")
    lines = [json.dumps(record_of(step)) for step in range(1, 1201)]
    for number, end in enumerate((700, 1200)):  # several blocks of a file, in which records are divided
        adapter = WandbTracker(plan, {})
        delivered = adapter.open()["delivered"]
        assert delivered == (0, 700)[number]
        adapter.log([*entries_of(plan, lines[:end], delivered)])
        directory = Path(adapter._run.dir).parent
        adapter._run.finish()
        wandb.teardown()
        directory.rename(f"{directory}-{number}")  # the second one in a second has such a name
    stored = in_wandb(tmp_path / "run")
    assert [values.pop("step") for values in stored.values()] == [*stored]
    assert differences(stored, 1200) == []


def last_summary(run: Path) -> dict[str, Any]:
    """Return the summary as it stands at the end of a run's newest offline file."""
    values: dict[str, Any] = {}
    for record in wandb_records(max(run.glob("wandb/offline-run-*/run-*.wandb"))):
        if record.HasField("summary"):
            values |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    return values


@pytest.mark.slow
def test_the_summary_in_wandb_is_the_runs(tmp_path: Path) -> None:
    """The last row has the numbers of one step, and the summary those of the whole run, at an end and after it."""
    plan = saved_plan(tmp_path / "run", "wandb.mode=offline")
    lines = [json.dumps(record_of(step)) for step in range(1, 13)]
    for start, end in ((0, 8), (8, 12)):  # the second one is a requeue
        adapter = WandbTracker(plan, {})
        adapter.open()
        adapter.log([*entries_of(plan, lines[start:end], start)])
        adapter.finish({"verdict": "done", "step": end, "train/loss": 0.5, "time/total_s": 1000.0 + end})
        wandb.teardown()
        found = last_summary(tmp_path / "run")
        assert (found["train/loss"], found["time/total_s"], found["verdict"]) == (0.5, 1000.0 + end, "done")
        assert found["progress/items"] == 4096 * end
        for directory in (tmp_path / "run" / "wandb").glob("offline-run-*"):
            if start == 0:  # the second one may start in the same second
                directory.rename(f"{directory.parent}/offline-run-0-{directory.name}")


HOLDS = "import sys; held = bytearray(200_000_000); print('ready', flush=True); sys.stdin.read()"
AGENT = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {HOLDS!r}])"


@pytest.mark.slow
def test_wandb_shows_the_job_and_not_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a worker, which is below the agent; the user's commit; what rank 0 has printed."""
    project = tmp_path / "project"
    project.mkdir()
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (
        ["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"],
        ["remote", "add", "origin", "https://me:secret@example.org/mine.git"],
    ):  # fmt: skip
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    plan = saved_plan(tmp_path / "run", "wandb.mode=offline")
    cluster = dataclasses.replace(plan.cluster, cwd=str(project), import_from=(str(project),), nodes=2)
    plan = dataclasses.replace(plan, cluster=cluster)
    agent = subprocess.Popen([sys.executable, "-S", "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        monkeypatch.setenv(AGENT_PID, str(agent.pid))
        adapter = WandbTracker(plan, {})
        often = adapter._system_settings() | {"x_stats_sampling_interval": 0.1}
        monkeypatch.setattr(adapter, "_system_settings", lambda: often)
        adapter.open()
        adapter.log_output(["epoch 1", "epoch 2"])
        (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
        name = f"proc.memory.rssMB/l:node 0, {socket.gethostname()}"

        def memory() -> float:
            items = [item for record in wandb_records(file) for item in record.stats.item if item.key == name]
            return max((float(item.value_json) for item in items), default=0)

        wait_for(lambda: memory() > 150, "the worker's memory", every_s=0.5)  # the library buffers 32 KiB
    finally:
        agent.communicate()
    adapter.finish({"verdict": "done"})
    wandb.teardown()
    assert b"secret" not in file.read_bytes()
    found: dict[str, list[Any]] = {kind: [] for kind in ("environment", "output_logger", "run")}
    for record in wandb_records(file):
        if (kind := record.WhichOneof("record_type")) in found:
            found[kind].append(getattr(record, kind))
    assert "".join(each.line for each in found["output_logger"]) == "epoch 1\nepoch 2\n"
    programs = {(each.program, *each.args) for each in found["environment"] if each.program}
    assert programs == {("-P -m launcher.train.worker",)}
    (of_git,) = [each.git for each in found["environment"] if each.HasField("git")]
    assert of_git.commit == commit
    assert of_git.remote_url.endswith("example.org/mine.git")
    assert not [*file.parent.glob("files/diff*.patch")]

    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    assert adapter._commit() is None
    monkeypatch.delenv(AGENT_PID)
    assert WandbTracker(plan, {})._system_settings() == {"x_disable_stats": True}, "the run is over"


def test_wandb_shows_texts_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(wandb, "Html", lambda text, inject: made.append((text, inject)) or "html")
    monkeypatch.setattr(wandb, "Image", lambda path: made.append(path) or "image")
    paths = RunPaths(tmp_path)
    assert sample_files(paths, 3) == ()
    paths.samples(3).mkdir(parents=True)
    (paths.samples(3) / "story.txt").write_text("a < b")
    (paths.samples(3) / "face.png").write_bytes(b"an image")
    (paths.samples(3) / ".partial").write_text("")
    entry = StepEntry({"step": 3}, sample_files(paths, 3), 0)
    assert wandb_media(entry) == {"samples/face": "image", "samples/story": "html"}
    assert made == [str(paths.samples(3) / "face.png"), ('<pre style="white-space: pre-wrap">a &lt; b</pre>', False)]
