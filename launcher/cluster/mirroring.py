"""The W&B mirror beside a job: started before the workers, given its time after them."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.config import WandbMode
from launcher.incarnation import Incarnation
from launcher.paths import RunPaths, read_json, write_json
from launcher.plan import LaunchPlan, RunPlan
from launcher.site import WANDB_ENV, allowed_env

# the mirror has everything on disk already; what it cannot deliver in this time, `wandb sync` delivers later
GRACE_S, HURRIED_S = 60, 5


def start(plan: LaunchPlan, own: Incarnation) -> subprocess.Popen[bytes] | None:
    """W&B runs beside the job, reading its record: it can neither slow nor stop it.

    It inherits from the agent that signals to stop are blocked, and keeps them so: it ends when its input does.
    """
    if not isinstance(plan, RunPlan) or plan.node != 0 or plan.wandb.mode is WandbMode.disabled:
        return None
    with plan.paths.wandb_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.report.mirror", plan.run.dir, str(own)],
            env=allowed_env(os.environ, (*plan.env.allow, *WANDB_ENV)),
            stdin=subprocess.PIPE,  # its end tells the mirror that no record follows, even when this process is killed
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that a Ctrl-C meant for the job does not reach it
        )


def finish(mirror: subprocess.Popen[bytes] | None, paths: RunPaths, within_s: float) -> None:
    if mirror is None or mirror.stdin is None:
        return
    mirror.stdin.close()
    try:
        mirror.wait(within_s)
    except subprocess.TimeoutExpired:
        mirror.kill()
        problem = f"W&B had not taken everything {within_s} s after the end; `wandb sync` sends the rest."
        write_json(paths.wandb_status, (read_json(paths.wandb_status) or {}) | {"problem": problem})
