"""Settings and files of a run that W&B receives in addition to the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb

from launcher.api import typed
from launcher.plan.host import batch_env
from launcher.plan.run_plan import RunPlan
from launcher.report.trackers import _open
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan

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
    fence: Any = None  # for trouble only
    make_plan(*own, run_dir=str(tmp_path)).save()
    run = _open(RunPlan.load(RunPaths(tmp_path).plan), fence)  # as the mirror's process reads it
    shown = (set(run.tags), run.notes, run.job_type, run.group)
    run.finish()
    wandb.teardown()
    ours, theirs = ({"a", "b"}, NOTES, "train", "g"), ({"theirs", "too"}, "their notes", "theirs", "all")
    assert shown == (ours if configured else theirs)


def test_a_job_of_slurm_s_takes_them_along() -> None:
    assert batch_env(WANDB | {"WANDB_API_KEY": "secret"}, ()) == WANDB
