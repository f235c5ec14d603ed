"""One job on a real Slurm, and what it must come to whatever happens to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import launch, launch_command, patience
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import OWN, PROJECT, records, summary
from tests.infra.slurm import Cluster

STEPS = 100
# ten steps a second, so that there is time to disturb it
JOB = (
    *OWN, "batch.global_size=12", "batch.micro_size=3", f"train.steps={STEPS}", "checkpoint.every=10",
    "run.calibrate_s=2", "precision=bf16",
)  # fmt: skip


@dataclass
class Project:
    """A user's directory on the login host of a cluster."""

    there: Cluster
    place: Path

    def launch(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.there.login(*launch_command(*arguments), cwd=self.place, check=False, timeout=patience(120))
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str) -> str:
        """Submit the job; its id."""
        said = self.launch("train", "cluster=slurm", *JOB, "task.trouble=slow", *arguments).stdout
        return said.partition("as Slurm job ")[2].partition(":")[0]

    @property
    def run(self) -> Path:
        return self.place / "runs" / "own"

    def state(self) -> str:
        return json.loads(self.launch("status", "own", "--json").stdout)["state"]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert not self.count("failed"), self.launch("status", "own").stdout
            return (self.run / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(self.run))

        self.there.wait(reached, f"step {step}", 90)

    def wait_for_start(self, number: int) -> None:
        self.there.wait(lambda: self.count("started") >= number, f"start {number}", 90)

    def newest(self, event: str) -> dict[str, Any]:
        return [known for known in self.events() if known["event"] == event][-1]

    def count(self, event: str) -> int:
        return sum(known["event"] == event for known in self.events())

    def finish(self) -> None:
        self.there.wait(lambda: self.count("done") or self.count("failed"), "the end", 120)
        assert self.state() == "done", self.launch("status", "own").stdout

    def nothing_is_left(self) -> None:
        self.there.wait(lambda: self.there.jobs() == [], "the queue to empty")
        for node in self.there.nodes:
            self.there.wait(lambda node=node: self.there.pids(node) == [], f"the processes on {node} to end", 100)
        assert [path.name for path in (self.run / "checkpoints").glob(".*")] == []


def train_undisturbed(place: Path, *overrides: str) -> Path:
    """The same job on this machine, with nothing in its way; its run."""
    shutil.copytree(PROJECT / "speech", place / "speech")
    done = launch("train", *JOB, *overrides, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "runs" / "own"


def assert_as_undisturbed(run: Path, undisturbed: Path) -> None:
    """Every step once, and bit by bit the same parameters and optimizer."""
    mine, wanted = records(run), records(undisturbed)
    assert [record["step"] for record in mine] == list(range(1, STEPS + 1))
    assert [record["train/loss"] for record in mine] == [record["train/loss"] for record in wanted]
    last = f"step_{STEPS:06d}"
    assert_same_tensors(run / "checkpoints" / last, undisturbed / "checkpoints" / last)
    assert summary(run)["eval/loss"] == summary(undisturbed)["eval/loss"]
