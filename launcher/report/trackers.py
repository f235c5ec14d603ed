"""W&B mirror: a process beside the job that copies metrics.jsonl to Weights & Biases, line by line.

    python -m launcher.report.trackers RUN_DIR INCARNATION        end of standard input: no further records

Each start of a run has its own mirror, with the same W&B id. It continues after the last step that an earlier mirror
delivered. If that one was killed and steps are sent again, W&B drops the repeated ones.

Records are on disk before this process reads them, so nothing here can slow the job, stop it, or lose a step. A problem
is reported once, in wandb.json, for the commands that show the run. As soon as a newer attempt of the run starts,
its mirror owns the W&B run, and this one exits silently.
"""

from __future__ import annotations

import html
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from launcher.config.schema import PrecisionKind, WandbMode
from launcher.errors import EXIT_DONE, Superseded
from launcher.plan.run_plan import RunPlan
from launcher.rundir.fencing import Attempt, Fence
from launcher.rundir.files import Tail, read_json, write_json
from launcher.rundir.paths import RunPaths

POLL_S = 0.5
INIT_TIMEOUT_S = 30
# Limit after the end of input: W&B waits for an unresponsive server without a limit, and a killed agent cannot end
# this process. A live agent waits less long (launcher/launch/agent.py).
ENDS_WITHIN_S = 90


def main(run_dir: str, attempt: str, trial: str = "first") -> None:
    paths = RunPaths(Path(run_dir))
    fence = Fence(paths, Attempt.parse(attempt))
    while (plan := RunPlan.of_record(paths)) is None:  # a script of `launch run` has yet to make its engine
        if _ended():
            return
    if plan.wandb.mode is WandbMode.disabled:
        return
    try:
        _mirror_with_retry(plan, fence, trial)
    except Superseded as error:
        print(error, flush=True)
        os._exit(EXIT_DONE)  # a normal exit would let W&B finish the run, which now belongs to the newer mirror


def _mirror_with_retry(plan: RunPlan, fence: Fence, trial: str) -> None:
    try:
        _mirror(plan, fence)
    except Superseded:
        raise
    except Exception as error:
        if trial != "first":
            _set_status(plan, fence, problem=f"{type(error).__name__}: {error}")
            raise
        # a scheduler that ends a job may kill W&B's own process too; a new interpreter starts it again
        traceback.print_exc()
        sys.stderr.flush()
        retry = ["launcher.report.trackers", plan.run.dir, str(fence.own), "again"]
        os.execv(sys.executable, [sys.executable, "-P", "-m", *retry])


def _mirror(plan: RunPlan, fence: Fence) -> None:
    fence.check()
    status: dict[str, Any] = read_json(plan.paths.wandb_status) or {}
    if status.get("problem"):  # reported by an earlier mirror
        _set_status(plan, fence, problem=None)
    while plan.precision.kind is PrecisionKind.auto and not _ended():  # wait for the workers' decision
        plan = RunPlan.of_record(plan.paths) or plan
    run = _open(plan, fence)
    _set_status(plan, fence, dir=str(Path(run.dir).parent), url=run.url)
    # online, the server knows the last step; steps that an earlier mirror stored offline have not reached it yet
    done = run.step - 1 if run.url else status.get("delivered", 0)
    tail = Tail(plan.paths.metrics)
    more = True
    while more:
        # check for the job's end before reading, so that the last read includes everything written before it
        more = not _ended()
        lines = tail.lines()
        fence.check()  # after reading: a newer attempt registers before it writes records
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            if record["step"] > done:  # a truncated file is read again from the start and repeats steps
                done = record["step"]
                run.log(record | samples_of(plan.paths, done) if plan.callbacks else record, step=done)
    signal.alarm(ENDS_WITHIN_S)
    summary = read_json(plan.paths.summary) or {}
    fence.check()
    run.summary.update({name: value for name, value in summary.items() if value is not None})
    run.finish(exit_code=0 if summary.get("verdict") in ("done", "stopped") else 1)
    _set_status(plan, fence, delivered=done)


def samples_of(paths: RunPaths, step: int) -> dict[str, Any]:
    """Return what the model generated after ``step``, by name, as W&B's texts and images. The files are complete
    before the record of that step is written."""
    directory = paths.samples(step)
    if not directory.is_dir():
        return {}
    import wandb

    samples: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        name = f"samples/{path.stem}"
        if path.suffix == ".txt":
            text = html.escape(path.read_text(encoding="utf-8", errors="replace"))
            samples[name] = wandb.Html(f'<pre style="white-space: pre-wrap">{text}</pre>', inject=False)
        elif path.suffix == ".png":
            try:
                samples[name] = wandb.Image(str(path))
            except wandb.Error as error:  # it needs Pillow
                print(f"{path} is not in W&B: {error}", flush=True)
    return samples


def _open(plan: RunPlan, fence: Fence) -> Any:
    """Return the W&B run; if the server cannot be reached, report that once and use offline mode."""
    import wandb

    def init(mode: WandbMode) -> Any:
        return wandb.init(
            id=plan.run.id,
            name=plan.run.name,
            dir=plan.run.dir,
            mode=mode.value,
            project=plan.wandb.project,
            entity=plan.wandb.entity,
            group=plan.wandb.group,
            tags=plan.wandb.tags or None,  # None: use W&B's own environment variable
            notes=plan.wandb.notes,
            job_type=plan.wandb.job_type,
            config=json.loads(plan.to_json()),
            resume="allow" if mode is WandbMode.online else None,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", disable_git=True, disable_code=True),
        )

    try:
        run = init(plan.wandb.mode)
    except wandb.Error as error:
        if plan.wandb.mode is WandbMode.offline:
            raise
        problem = f"W&B did not answer ({error}). The run is stored offline; `wandb sync` uploads it later."
        _set_status(plan, fence, problem=problem)
        wandb.teardown()
        run = init(WandbMode.offline)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _ended() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _set_status(plan: RunPlan, fence: Fence, **fields: str | int | None) -> None:
    """Set ``fields`` in wandb.json."""
    fence.check()
    path = plan.paths.wandb_status
    write_json(path, (read_json(path) or {}) | fields)


if __name__ == "__main__":
    main(*sys.argv[1:])
