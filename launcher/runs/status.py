"""Status of runs, from their directories and from Slurm.

No other state exists that could be stale: a run that was moved, or that another user started, is just as visible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from launcher.config.schema import ClusterKind, PrecisionKind
from launcher.errors import SiteError
from launcher.launch.slurm import client
from launcher.launch.slurm.client import Listed
from launcher.quantities import folded_names, seconds_left
from launcher.record.measurements import reason, task_metrics
from launcher.rundir import history
from launcher.rundir.files import last_lines, object_from_json, open_file, read_json, value_from_json
from launcher.rundir.history import Submission
from launcher.rundir.job_end import error_of
from launcher.rundir.paths import RunPaths, SweepPaths

# newest records among which the last evaluation is searched, and from which the rate of steps is taken
_SEARCHED, _TIMED = 200, 20
# lines that Slurm itself writes into the output of a task
_OF_SLURM = re.compile(r"srun: |slurmstepd|Try ['\"]srun --help")
# lines of Slurm that follow from an earlier one
_CONSEQUENCE = re.compile(r"exit code|Try ['\"]srun|Terminating|aborted|CANCELLED AT|couldn't chdir|going to /tmp")


class RunState(StrEnum):
    """State of a run.

    ``requeued``: it has run, and Slurm will restart it. ``stopped``: it was stopped and can resume. ``lost``: no
    process is left, and no verdict. ``unknown``: only another host, or a Slurm that does not answer now, could tell.
    ``impossible``: cell of a sweep whose configuration cannot run. ``unreadable``: one of its files is damaged, is
    something else, or may not be read by this user.
    """

    pending = "pending"
    running = "running"
    requeued = "requeued"
    done = "done"
    stopped = "stopped"
    failed = "failed"
    cancelled = "cancelled"
    lost = "lost"
    unknown = "unknown"
    impossible = "impossible"
    unreadable = "unreadable"


ACTIVE = frozenset({RunState.pending, RunState.running, RunState.requeued})


@dataclass(frozen=True, kw_only=True)
class Run:
    """Status of one run; of a cell without a run only the state, the detail and the cell are known.

    Args:
        detail: reason for ``state``, in a few words.
        nodes: nodes on which it runs, or ran last.
        ranks: world size; None before the first start.
        submissions: number of accepted submissions.
        step, steps: optimizer steps recorded, and planned.
        sweep, cell: directory of the sweep, and what distinguishes this cell from the others.
        held_out: loss of the last evaluation (eval/loss).
        left_s: seconds to the last step at the newest rate; None if that is unknown, or if the run is not running.
        resumes_from: step of the newest checkpoint, from which `launch resume` continues; None without one.
        metrics: those of the task's own loss in the last record, see ``task_metrics``.
        best: metric, step, value and directory of the best evaluation by checkpoint.best; None without one.
        precision: number format of the forward and backward pass; auto before it is decided, None for a script of
            `launch run`.
    """

    name: str = ""
    dir: str = ""
    kind: str = ""
    state: RunState
    detail: str
    user: str = ""
    created: str = ""
    job: str | None = None
    nodes: str = ""
    ranks: int | None = None
    submissions: int = 0
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    held_out: float | None = None
    left_s: float | None = None
    resumes_from: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    failure: dict[str, Any] | None = None
    sweep: str | None = None
    cell: str | None = None
    precision: str | None = None
    best: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def statuses_of(runs: Iterable[RunPaths], *, brief: bool = False) -> list[Run]:
    """Return the status of ``runs``, with one query to Slurm for all of them.

    Args:
        brief: do not read what the state does not depend on: step, loss, metrics, best evaluation and precision.
    """
    runs = [*runs]
    found = [_attempted(paths, partial(_Read.of, paths)) for paths in runs]
    read = [r for r in found if isinstance(r, _Read)]
    jobs = [r.job for r in read if r.job is not None and not r.is_over]
    unrecorded = [r.job_name for r in read if r.lacks_job]
    answers: dict[str, Listed] | None = {}
    if (jobs or unrecorded) and client.available():
        try:
            answers = client.jobs(jobs)
            if unrecorded:
                listed = client.named(unrecorded)
                read = [r.with_job_among(listed) if r.lacks_job else r for r in read]
                answers = listed | answers
        except SiteError:
            answers = None
    elif jobs:
        answers = None
    judged = {r.paths: _attempted(r.paths, partial(r.judge, answers, brief=brief)) for r in read}
    first = {paths: judged.get(paths, each) for paths, each in zip(runs, found, strict=True)}
    return [cast("Run", first[paths]) for paths in runs]


Result = TypeVar("Result")


def _attempted(paths: RunPaths, read: Callable[[], Result]) -> Result | Run:
    """Return the result of ``read``, or that the run is unreadable: it must not hide the others, whatever its files
    contain."""
    try:
        return read()
    except Exception as error:
        detail = reason(error, paths.root)
        return Run(name=paths.root.name, dir=str(paths.root), state=RunState.unreadable, detail=detail)


def newest(runs: Sequence[RunPaths], number: int) -> list[RunPaths]:
    """Return the ``number`` runs that were created last, without reading more of the others than their plans."""
    if len(runs) <= number:
        return [*runs]

    def created(paths: RunPaths) -> str:
        found = _attempted(paths, lambda: _created(_object(paths.plan)))
        return found if isinstance(found, str) else ""

    return sorted(runs, key=created)[-number:]


@dataclass(frozen=True)
class _Read:
    """Content of a run's directory, as far as it can be read.

    Attributes:
        found: Slurm's id of the last submission's job if the directory does not have it.
    """

    paths: RunPaths
    plan: dict[str, Any]
    summary: dict[str, Any]
    newest_incarnation: dict[str, Any]
    submissions: Sequence[Submission]
    found: str | None = None

    @classmethod
    def of(cls, paths: RunPaths) -> _Read:
        """Return the content, of which all can be read on which a question to Slurm depends."""
        read = cls(
            paths,
            _object(paths.plan),
            _object(paths.summary),
            _object(paths.newest_incarnation),
            history.parse_submissions(_object(paths.job)),
        )
        _ = read.is_over, read.lacks_job, read.job_name
        return read

    @property
    def name(self) -> str:
        return self.plan.get("run", {}).get("name") or self.paths.root.name

    @property
    def number(self) -> int:
        """Number of the last submission that was not refused, from 0; -1 without one."""
        return history.last_accepted(self.submissions)

    @property
    def last(self) -> Submission | None:
        return self.submissions[self.number] if self.number >= 0 else None

    @property
    def has_started(self) -> bool:
        """True if the last submission has started."""
        return history.has_started(self.newest_incarnation, self.number)

    @property
    def job(self) -> str | None:
        """Slurm's id of the last submission; if `launch` was killed before noting it, the id that the job wrote, or
        under which Slurm has it."""
        if self.last is None or self.kind != ClusterKind.slurm:
            return None
        return self.last.job or (self.newest_incarnation.get("job") if self.has_started else None) or self.found

    @property
    def lacks_job(self) -> bool:
        """True if the run was perhaps submitted, and its directory does not have the job's id."""
        return self.last is not None and self.kind == ClusterKind.slurm and self.job is None

    def with_job_among(self, listed: Mapping[str, Listed]) -> _Read:
        """Return this with the id of its job if Slurm has one that was submitted from the run's directory."""
        assert self.last is not None
        known = {submission.job for submission in self.submissions}
        # cells of a sweep are submitted from the sweep's directory
        folders = {self.paths.slurm.resolve(), SweepPaths(self.paths.root.parent).slurm.resolve()}
        task = self.last.array_task
        for job, each in listed.items():
            is_task = job.partition("_")[2] == ("" if task is None else str(task))
            if each.name == self.job_name and is_task and job not in known and Path(each.folder).resolve() in folders:
                return replace(self, found=job)
        return self

    @property
    def job_name(self) -> str:
        return (self.last.name if self.last else None) or self.name

    @property
    def kind(self) -> str:
        return self.plan.get("cluster", {}).get("kind", "")

    @property
    def precision(self) -> str | None:
        kind = self.plan.get("precision", {}).get("kind")
        return _object(self.paths.precision).get("kind", kind) if kind == PrecisionKind.auto else kind

    @property
    def verdict(self) -> str | None:
        return history.verdict_of(self.summary, self.newest_incarnation, self.submissions)

    @property
    def is_over(self) -> bool:
        """True if Slurm cannot change the state any more: rank 0 writes "done" once everything is saved."""
        return self.verdict == "done"

    def judge(self, answers: dict[str, Listed] | None, *, brief: bool) -> Run:
        """Return the run's status. ``answers``: Slurm's jobs by id; None if Slurm does not answer."""
        listed = None if answers is None or self.job is None else answers.get(self.job)
        if listed is not None and listed.name != self.job_name:  # a job of another cluster with the same id
            listed = None
        silent = answers is None and not self.is_over
        state, detail = self._of_slurm(listed, silent) if self.kind == ClusterKind.slurm else self._of_this_host()
        records, held_out = ([], None) if brief else _last_records(self.paths.metrics)
        record = records[-1] if records else {}
        since = record.get("progress/measured_since")
        timed = [each for each in records if each.get("progress/measured_since") == since]
        steps = self.plan.get("train", {}).get("steps")
        names = folded_names(self.newest_incarnation.get("nodes", []))
        run = Run(
            name=self.name,
            dir=str(self.paths.root),
            kind=self.kind,
            state=state,
            detail=detail,
            user=self.last.user if self.last else "",
            created=_created(self.plan),
            job=self.job,
            nodes=(listed.nodes if listed else "") or names,
            ranks=self.newest_incarnation.get("ranks"),
            submissions=sum(not submission.refused for submission in self.submissions),
            step=record.get("step"),
            steps=steps,
            loss=record.get("train/loss"),
            held_out=held_out,
            left_s=seconds_left(timed[0], record, steps) if timed and state is RunState.running else None,
            resumes_from=None if brief else self.paths.newest_step() or None,
            metrics=task_metrics(record),
            failure=self.summary.get("failure") if state is RunState.failed else None,
            precision=None if brief else self.precision,
            best=self._best(record),
        )
        return value_from_json(Run, run.to_json())  # checks the types

    def _best(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Return the best evaluation. ``record``: the last one."""
        metric, step = self.plan.get("checkpoint", {}).get("best"), record.get("best/step")
        if metric is None or step is None:
            return None
        directory = self.paths.checkpoint(int(step))
        saved = str(directory) if directory.exists() else None
        value = value_from_json(float, value) if (value := record.get("best/value")) is not None else None
        return {"metric": str(metric), "step": int(step), "value": value, "directory": saved}

    def _of_slurm(self, listed: Listed | None, silent: bool) -> tuple[RunState, str]:
        if self.is_over:
            return RunState.done, history.early_end(self.summary)
        if listed is not None and listed.state not in client.ENDED:
            return self._active(listed)
        if silent:
            return RunState.unknown, "Slurm does not answer here"
        ended = listed.state if listed is not None else ""
        if ended == "CANCELLED" or (self.last is not None and self.last.cancelled):
            return RunState.cancelled, ""
        if (found := self._of_verdict("Slurm")) is not None:
            return found
        if ended == "PREEMPTED":
            return RunState.stopped, "by Slurm"
        if ended:
            began = "" if self.has_started else f" before its first line: {self._reason_without_start()}"
            begin = self.newest_incarnation.get("output_from", 0) if self.has_started else 0
            if self.job and (cause := client.cause_of_end(self.paths, self.job, begin)):
                began = f": {cause}"  # no task was left that could report it
            return RunState.failed, f"Slurm reports {ended}{began}"
        if self.job is None:
            return RunState.lost, "it was never submitted"
        return RunState.lost, "Slurm no longer knows the job, and it left no verdict"

    def _reason_without_start(self) -> str:
        """Return the last line that a task of the job has written, which is that of a container that did not start.
        Without one, return the first line of Slurm itself that is no consequence of another one."""
        of_slurm: list[str] = []
        for log in sorted(self.paths.slurm.glob(f"{self.job}_*_log.out")):
            lines = [line for line in last_lines(log, 20) if line.strip()]
            if own := [line for line in lines if not _OF_SLURM.match(line)]:
                return own[-1]
            of_slurm += [line for line in lines if not _CONSEQUENCE.search(line)]
        return of_slurm[0] if of_slurm else "does the node see the run's directory?"

    def _active(self, listed: Listed) -> tuple[RunState, str]:
        reason = "" if listed.reason in ("", "None") else listed.reason
        if "held" in reason.lower():  # by Slurm after a failed launch, or by a person
            reason += f": `scontrol release {self.job}` releases it"
        if listed.state in client.WAITING:
            return (RunState.requeued if self.has_started else RunState.pending), reason
        if listed.state == "COMPLETING":
            return RunState.running, "ending"
        if not self.has_started:
            return RunState.running, "starting"
        return RunState.running, "its nodes lost contact; waiting for Slurm" if self.verdict == "failed" else ""

    def _of_this_host(self) -> tuple[RunState, str]:
        alive = self.last.runs_here() if self.last is not None else False
        if alive:
            return RunState.running, ""
        if self.verdict is None and alive is None:
            return RunState.unknown, f"only {self.last.host} can tell: run the command there" if self.last else ""
        if self.last is not None and self.last.cancelled and self.verdict != "done":
            return RunState.cancelled, ""
        return self._of_verdict() or (RunState.lost, "its `launch` is gone, and it left no verdict")

    def _of_verdict(self, by: str = "") -> tuple[RunState, str] | None:
        """Return state and detail of a run that is over; None without a verdict.

        Args:
            by: what stopped it, if the summary does not say; empty: unknown.
        """
        by = self.summary.get("stopped_by", by)
        match self.verdict:
            case "done":
                return RunState.done, history.early_end(self.summary)
            case "failed":
                return RunState.failed, error_of(self.summary.get("failure") or {}).partition("\n")[0]
            case "stopped":
                return RunState.stopped, f"by {by or 'a signal'}"
            case "killed":
                return (RunState.stopped, f"by {by}, before it could save") if by else (RunState.failed, "killed")
            case _:
                return None


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; empty if there is none."""
    return read_json(path) or {}


def _created(plan: Mapping[str, Any]) -> str:
    created = plan.get("run", {}).get("created", "")
    if created:
        datetime.fromisoformat(created)  # checks it
    return created


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Return ``train/accuracy 0.912, eval/accuracy 0.9``."""
    values = {name: "not finite" if value is None else f"{value:.4g}" for name, value in metrics.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _last_records(metrics: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return the last complete records of metrics.jsonl, and the loss of the last evaluation; None without one."""
    with suppress(FileNotFoundError):
        open_file(metrics).close()  # checks that it can be read
    lines = last_lines(metrics, _SEARCHED)
    # rank 0 may be writing the last one
    records = [record for line in lines[-_TIMED:] if (record := object_from_json(line)) is not None]
    evaluated = next((line for line in reversed(lines) if '"eval/loss"' in line), "")
    return records, (object_from_json(evaluated) or {}).get("eval/loss")
