"""Mistakes in checkpoint.best, checkpoint.best_mode and train.patience."""

from __future__ import annotations

import dataclasses
import re

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import BestMode
from launcher.errors import ConfigError
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve_best_mode
from tests.helpers import make_plan

TASK = TaskPlan.unknown(100)
EVERY = "train.eval_every=5"


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], None),
        (["checkpoint.best=eval/loss"], BestMode.min),
        (["checkpoint.best=eval/loss_box"], BestMode.min),
        (["checkpoint.best=eval/far/Perplexity"], BestMode.min),
        (["checkpoint.best=eval/loss", "checkpoint.best_mode=max"], BestMode.max),
        (["checkpoint.best=eval/accuracy", "checkpoint.best_mode=max"], BestMode.max),
        (["checkpoint.best=eval/loss", EVERY, "train.patience=2", "checkpoint.enabled=false"], BestMode.min),
    ],
)
def test_the_direction_follows_from_the_name_or_is_given(overrides: list[str], mode: BestMode | None) -> None:
    plan = make_plan(*overrides)
    assert plan.checkpoint.best_mode is mode
    assert RunPlan.from_json(plan.to_json()).checkpoint.best_mode is mode


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.best=eval/accuracy"], "checkpoint.best_mode: is needed with checkpoint.best=eval/accuracy"),
        (["checkpoint.best=eval/loss_free/accuracy"], "checkpoint.best_mode: is needed"),
        (["checkpoint.best=train/loss"], "checkpoint.best=train/loss: is not a metric of the evaluation"),
        (["checkpoint.best=loss"], "checkpoint.best=loss: is not a metric of the evaluation"),
        (["checkpoint.best_mode=max"], "checkpoint.best_mode=max: has no effect without checkpoint.best."),
        (["train.patience=2", EVERY], "train.patience=2: has no effect without checkpoint.best."),
        (["train.patience=2", "checkpoint.best=eval/loss"], "train.patience=2: has no effect: the only evaluation"),
        (["train.patience=0", "checkpoint.best=eval/loss", EVERY], "train.patience=0: must be at least 1."),
        (["checkpoint.best=eval/loss", "checkpoint.enabled=false"], "checkpoint.best=eval/loss: has no effect"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_plan(*overrides)


@pytest.mark.parametrize(
    ("sets", "metric", "words"),
    [
        ((), "eval/loss", "the task has no held-out data, so no evaluation takes place."),
        (("dev", "noisy"), "eval/nosy/loss", "eval_data() has no set 'nosy'.\n  did you mean 'noisy'?"),
        (("dev", "noisy"), "eval/noisy/loss", None),
        (("dev", "noisy"), "eval/loss", None),
        (("",), "eval/a/loss", None),  # the task's metric may have such a name
        (None, "eval/far/loss", None),
    ],
)
def test_the_sets_are_known(sets: tuple[str, ...] | None, metric: str, words: str | None) -> None:
    config = compose([f"checkpoint.best={metric}"])
    task = dataclasses.replace(TASK, eval_sets=sets)
    if words is None:
        assert solve_best_mode(config.checkpoint, config.train, task) is BestMode.min
        return
    with pytest.raises(ConfigError, match=re.escape(words)):
        solve_best_mode(config.checkpoint, config.train, task)


def test_a_single_evaluation_is_pointed_out() -> None:
    (note,) = [note for note in make_plan("checkpoint.best=eval/loss").notes if "checkpoint.best" in note]
    assert "one evaluation to choose from" in note
    assert not [note for note in make_plan("checkpoint.best=eval/loss", EVERY).notes if "checkpoint.best" in note]
