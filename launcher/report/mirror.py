"""The W&B mirror: a process beside the job that copies metrics.jsonl to Weights & Biases, line by line.

    python -m launcher.report.mirror RUN_DIR        standard input: ends when no record follows

A run that was begun again gets a mirror again, for the same W&B id: it goes on after the last step that an earlier one
is known to have delivered. Steps that it repeats, because an earlier one was killed, W&B drops.

The record is on disk before this process sees it, so nothing here can slow the job, stop it, or lose a step. What goes
wrong is said once, in wandb.json, for whoever shows the run.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Any

from launcher.config import WandbMode
from launcher.paths import RunPaths, read_json, write_json
from launcher.plan import RunPlan
from launcher.report.record import Tail

POLL_S = 0.5
INIT_TIMEOUT_S = 30


def main(run_dir: str, trial: str = "first") -> None:
    plan = RunPlan.load(RunPaths(Path(run_dir)).plan)
    try:
        _mirror(plan)
    except Exception as error:
        if trial != "first":
            _say(plan, problem=f"{type(error).__name__}: {error}")
            raise
        # a scheduler that ends a job may end W&B's own process too, which a fresh interpreter starts again
        traceback.print_exc()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "launcher.report.mirror", run_dir, "again"])


def _mirror(plan: RunPlan) -> None:
    known: dict[str, Any] = read_json(plan.paths.wandb_status) or {}
    if known.get("problem"):  # an earlier mirror's
        _say(plan, problem=None)
    run = _open(plan)
    _say(plan, dir=str(Path(run.dir).parent), url=run.url)
    # online the server says where the run goes on; what an earlier mirror kept offline has yet to reach it
    done = run.step - 1 if run.url else known.get("delivered", 0)
    tail = Tail(plan.paths.metrics)
    more = True
    while more:
        # first look whether the job is over, then read: what it wrote before its end is read after
        more = not _ended()
        for line in tail.lines():
            record: dict[str, Any] = json.loads(line)
            if record["step"] > done:  # a record that was cut back is read again, and its steps come again
                done = record["step"]
                run.log(record, step=done)
    summary = read_json(plan.paths.summary) or {}
    run.summary.update({name: value for name, value in summary.items() if value is not None})
    run.finish(exit_code=0 if summary.get("verdict") in ("done", "stopped") else 1)
    _say(plan, delivered=done)


def _open(plan: RunPlan) -> Any:
    """The W&B run; offline, said once, where the server cannot be reached."""
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
            tags=plan.wandb.tags,
            config=json.loads(plan.to_json()),
            resume="allow" if mode is WandbMode.online else None,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", disable_git=True, disable_code=True),
        )

    try:
        run = init(plan.wandb.mode)
    except wandb.Error as error:
        if plan.wandb.mode is WandbMode.offline:
            raise
        _say(plan, problem=f"W&B did not answer ({error}); the run is kept offline, and `wandb sync` sends it later.")
        wandb.teardown()
        run = init(WandbMode.offline)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _ended() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _say(plan: RunPlan, **words: str | int | None) -> None:
    path = plan.paths.wandb_status
    write_json(path, (read_json(path) or {}) | words)


if __name__ == "__main__":
    main(*sys.argv[1:])
