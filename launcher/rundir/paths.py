"""Paths: every file of a run and of a sweep has its one name here; and which runs and sweeps there are."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# of a checkpoint: all that is no tensor
STATE = "state.json"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, from its directory."""

    root: Path

    @property
    def plan(self) -> Path:
        """What was decided before the start: the only thing a worker reads."""
        return self.root / "plan.json"

    def plan_of(self, node: int) -> Path:
        """The plan that one host's agent and workers read: hosts differ in directories, addresses and interfaces, and
        may share the disk."""
        return self.plan if node == 0 else self.root / f"plan.node{node}.json"

    def plan_for(self, nodes: int, node: int = 0) -> Path:
        """The plan that workers read where a job that may have fewer hosts than planned has so many. ``node``: whose,
        where hosts have plans of their own."""
        return self.root / f"plan.nodes{nodes}{f'.node{node}' if node else ''}.json"

    @property
    def config(self) -> Path:
        """The composed config, to type the same run again."""
        return self.root / "config.yaml"

    def plan_until(self, submission: int) -> Path:
        """The plan up to and with a submission, where the next one was sent off with another."""
        return self.root / f"plan.{submission}.json"

    def config_until(self, submission: int) -> Path:
        return self.root / f"config.{submission}.yaml"

    @property
    def metrics(self) -> Path:
        """The record: one JSON object a logged step, appended by rank 0."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The verdict and the last values."""
        return self.root / "summary.json"

    @property
    def fitted(self) -> Path:
        """Which micro-batches fit into memory, where that was found by trying."""
        return self.root / "fitted.json"

    @property
    def precision(self) -> Path:
        """The number format that the first start of a run with precision=auto has decided on."""
        return self.root / "precision.json"

    @property
    def certificate(self) -> Path:
        """What `launch verify` measured."""
        return self.root / "certificate.json"

    def summary_of(self, node: int) -> Path:
        """How it went on one host; on node 0 it becomes the run's."""
        return self.summary if node == 0 else self.root / f"summary.node{node}.json"

    @property
    def job(self) -> Path:
        """Who sent the run off, when, as which job; once more for each time it was resumed."""
        return self.root / "job.json"

    def submission(self, number: int) -> Path:
        """That the number is taken."""
        return self.root / f".submission.{number}"

    @property
    def events(self) -> Path:
        """What happened to the run beside training: one JSON object a start, a stop, a requeue."""
        return self.root / "events.jsonl"

    @property
    def code(self) -> Path:
        """The user's code as it was when the run was submitted."""
        return self.root / "code"

    @property
    def slurm(self) -> Path:
        """submitit's folder: the batch script of each submission, and what was written before the agent's own log."""
        return self.root / "slurm"

    @property
    def incarnation(self) -> Path:
        """Which start of the run is the newest: only that one may write."""
        return self.root / "incarnation.json"

    def failure_of(self, node: int) -> Path:
        """How the workers of one node of a Slurm job failed; the summary has the earliest of them."""
        return self.root / f"failure.node{node}.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def node_log(self, node: int) -> Path:
        return self.logs / f"node{node}.log"

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        """Standard output and error of one rank; a restarted rank writes a new file."""
        return self.logs / (f"rank{rank}.log" if attempt == 0 else f"rank{rank}.attempt{attempt}.log")

    def newest_rank_log(self, rank: int) -> Path:
        """The log of the rank's last attempt so far."""
        attempt = 0
        while self.rank_log(rank, attempt + 1).exists():
            attempt += 1
        return self.rank_log(rank, attempt)

    def next_attempt(self) -> int:
        """The number of the attempt that follows those that have left a log."""
        numbers = [re.fullmatch(r"rank\d+(?:\.attempt(\d+))?\.log", path.name) for path in self.logs.glob("rank*.log")]
        return max((int(number[1] or 0) + 1 for number in numbers if number), default=0)

    def rank_error(self, rank: int, attempt: int = 0) -> Path:
        """Where torch's ``@record`` leaves a rank's exception."""
        return self.logs / f"rank{rank}.attempt{attempt}.error.json"

    @property
    def launch_log(self) -> Path:
        """What a `launch` printed that nobody watched: of the runs of a drill."""
        return self.logs / "launch.log"

    @property
    def wandb_log(self) -> Path:
        return self.logs / "wandb.log"

    @property
    def wandb_status(self) -> Path:
        """What the W&B mirror has to say: mode, directory or address, the one problem it met."""
        return self.root / "wandb.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def latest(self) -> Path:
        """A line with the name of the newest whole checkpoint, for people and their scripts. It may be behind after a
        crash: a resume looks at the directories."""
        return self.checkpoints / "latest"

    def partial_checkpoint(self, step: int, incarnation: object) -> Path:
        """A checkpoint that is being written. Two incarnations never share one."""
        return self.checkpoints / f".step_{step:06d}.{incarnation}.partial"

    def discarded_checkpoint(self, step: int, incarnation: object) -> Path:
        """One that is being taken away. A new place each time: the last one may not have gone yet."""
        return self.checkpoints / f".step_{step:06d}-{secrets.token_hex(4)}.{incarnation}.partial"

    def partial_checkpoints(self) -> list[tuple[str, Path]]:
        """What is there of both, each with its incarnation."""
        return [
            (path.name.split(".", 2)[2].removesuffix(".partial"), path)
            for path in self.checkpoints.glob(".step_*.*.partial")
        ]

    def committed_checkpoints(self) -> list[Path]:
        """The whole ones, the newest first."""
        found = [path for path in self.checkpoints.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step_")))  # a person's copies are none

    def newest_step(self) -> int:
        """Of the whole checkpoints; 0 without one."""
        return max((int(path.name.removeprefix("step_")) for path in self.committed_checkpoints()), default=0)

    def refused_checkpoint(self, checkpoint: Path) -> Path:
        """Where one goes that was found to be damaged: out of the way, but still there."""
        first = self.checkpoints / f"refused_{checkpoint.name}"
        others = (first.with_name(f"{first.name}.{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([first], others) if not path.exists())


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep, from its directory, in which those of its runs lie."""

    root: Path

    @property
    def book(self) -> Path:
        """Which cells there are, and the run of each."""
        return self.root / "sweep.json"

    @property
    def code(self) -> Path:
        """The user's code as it was when cells were submitted: a directory for each time that it was another one."""
        return self.root / "code"

    @property
    def slurm(self) -> Path:
        """submitit's folder for the arrays."""
        return self.root / "slurm"

    @property
    def report(self) -> Path:
        """The page of `launch report`."""
        return self.root / "report.html"


@dataclass(frozen=True)
class DrillPaths:
    """The files of one drill, from its directory, in which those of its runs lie."""

    root: Path

    @property
    def found(self) -> Path:
        """What it found out, as `launch drill --json` prints it."""
        return self.root / "drill.json"


def find(runs: Path) -> list[RunPaths]:
    """Every run in a directory of runs; those of a sweep are in the sweep's."""
    return [RunPaths(place) for place in _places(runs, is_run)]


def find_sweeps(runs: Path) -> list[SweepPaths]:
    return [SweepPaths(place) for place in _places(runs, is_sweep)]


def is_run(directory: str | Path) -> bool:
    """Whether this is a run's directory; another user's, closed to this one, is none."""
    return os.path.isfile(os.path.join(directory, "plan.json"))  # noqa: PTH113, PTH118 (pathlib raises where closed)


def is_sweep(directory: str | Path) -> bool:
    return os.path.isfile(os.path.join(directory, "sweep.json"))  # noqa: PTH113, PTH118


def _places(runs: Path, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        with os.scandir(runs.absolute()) as entries:
            return sorted(Path(entry.path) for entry in entries if wanted(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return []
