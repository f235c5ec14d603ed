"""`launch resume RUN key=value`: what may change, what only with --force, what not, and what becomes of the plan. In
this process; tests/system/test_resume.py lets such runs go on for real."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.cli import train
from launcher.config.hydra import compose_with_yaml
from launcher.config.key_facts import Permission
from launcher.config.schema import StrategyKind
from launcher.launch import local, planner
from launcher.launch.planner import plan_job
from launcher.launch.slurm import client
from launcher.plan.resumable import rule
from launcher.plan.run_plan import RunPlan
from launcher.plan.strategy import with_memory
from launcher.plan.windows import StreamInfo
from launcher.rundir import history
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths

COMMON = (
    "run.name=own", "batch.global_size=24", "batch.micro_size=3", "train.steps=20", "wandb.mode=disabled",
    "cluster.device=cpu", "precision=fp32",
)  # fmt: skip


def started_run(*overrides: str, verdict: str = "stopped", steps: int = 10) -> RunPaths:
    """A run's directory as it is after ``steps``."""
    config, yaml = compose_with_yaml([*COMMON, *overrides])
    plan = plan_job(config)
    local.create(plan, yaml)
    paths = plan.paths
    history.add_submission(paths, dataclasses.replace(Submission.now(), ended=True))
    paths.newest_incarnation.write_text(json.dumps({"incarnation": "0.0"}))
    paths.summary.write_text(json.dumps({"verdict": verdict}))
    if steps:
        checkpoint = paths.checkpoint(steps)
        checkpoint.mkdir(parents=True)
        engine = {"progress": {"steps": steps}, "place": {"index": steps, "epoch": 0, "window": steps}}
        (checkpoint / "state.json").write_text(json.dumps({"engine": engine}))
    return paths


@pytest.fixture(autouse=True)
def in_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Plans that were sent off, in place of their start."""
    plans: list[RunPlan] = []

    def go_on(plan: RunPlan, *_: Any, **__: Any) -> int:
        plans.append(RunPlan.load(plan.paths.plan))
        history.add_submission(plan.paths, dataclasses.replace(Submission.now(), ended=True))
        return 0

    monkeypatch.setattr(train, "restart", go_on)
    return plans


def files(paths: RunPaths) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "contract": (
        ["batch.global_size=48", "optimizer.lr=0.1", "train.clip_norm=null", "task.width=64"],
        [
            "batch.global_size=48 (was 24): it defines what a", "optimizer.lr=0.1 (was 0.003)", "--force allows it",
            "train.clip_norm=null (was 1.0)", "task.width=64 (was null)",
        ],
    ),
    "never": (
        ["run.name=other", "train.seed=5", "task=digits", "optimizer=sgd", "batch.short_window=drop", "--force"],
        [
            "run.name=other (was own): it identifies the run", "train.seed=5 (was 0): the order of the samples",
            "task._target_=launcher.tasks.digits.Digits", "optimizer.kind=sgd (was adamw)", "batch.short_window=drop",
        ],
    ),
    "shards": (["train.data_shards=2"], ["train.data_shards=2 (was 1): it is the order of the samples"]),
    "cluster": (["cluster=slurm"], ["cluster.kind=slurm (was local)"]),
    "mirror": (["wandb.project=x", "sweep.at_once=3"], ["wandb.project=x (was launcher): W&B stores the run there"]),
    "no checkpoints": (["checkpoint.enabled=false"], ["checkpoint.enabled=false (was true): a run resumes from"]),
    "scale": (["precision.growth_interval=5"], ["precision.growth_interval=5 (was null): the loss scale continues"]),
    "less": (["train.steps=9"], ["train.steps=9: 10 steps are done already", "train.steps of 10 or more"]),
    "nothing to force": (["train.steps=30", "--force"], ["--force: has no effect"]),
    "no key": (["train.stepz=30"], ["train.stepz=30: there is no such key.", "train.steps"]),
    "no override": (["train.steps"], ["train.steps: is not an override"]),
    "option": (["strategy=foo"], ["strategy=foo: there is no such option", "ddp, fsdp, hsdp, single"]),
    "value": (["optimizer.lr=much"], ["optimizer.lr: must be a number, not 'much'"]),
    "impossible": (["strategy=hsdp"], ["2 ranks cannot be split into several shard groups"]),
    "sizes": (["batch.micro_size=5"], ["24 samples cannot be shared by 2 ranks in units of 5", "batch.uneven=true"]),
}  # fmt: skip


def test_what_may_not_change_is_said_before_anything_is(
    sent: list[RunPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = started_run()
    before = files(paths)
    for name, (overrides, says) in REFUSED.items():
        assert cli.run(["resume", "own", *overrides]) == 2, name
        told = capsys.readouterr().err
        assert not [words for words in says if words not in told], told
        assert told.startswith("launch: error: ")
        assert "Traceback" not in told
    assert files(paths) == before
    assert not sent


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: &a [1, 2]\nb: [*a, *a]\n", "config.yaml: has an alias"), ("a: [", "config.yaml: is not YAML"),
        ("[" * 200 + "]" * 200, "config.yaml: is nested too deeply"), (None, "config.yaml: is no regular file"),
    ],
)  # fmt: skip
def test_a_config_that_others_have_written(
    content: str | None, says: str, sent: list[RunPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    """A few nested aliases would take hours, and the writer of a FIFO may never come."""
    paths = started_run()
    paths.config.unlink()
    os.mkfifo(paths.config) if content is None else paths.config.write_text(content)
    assert cli.run(["resume", "own", "train.steps=30"]) == 2
    assert says in capsys.readouterr().err
    assert not sent


def test_the_shards_of_a_stream_are_kept(sent: list[RunPlan]) -> None:
    """Also if a new run would have another number."""
    paths = started_run()
    old = RunPlan.load(paths.plan)
    task = dataclasses.replace(old.task, samples=None, stream=StreamInfo(shards=8, automatic=True))
    dataclasses.replace(old, task=task, train=dataclasses.replace(old.train, data_shards=6)).save()
    assert cli.run(["resume", "own", "train.steps=30"]) == 0
    assert sent[-1].train.data_shards == 6


def test_the_world_follows_and_the_old_plan_is_kept(sent: list[RunPlan]) -> None:
    paths = started_run("batch.accumulation=4")
    old = RunPlan.load(paths.plan)
    more = ("cluster.workers_per_node=4", "strategy=fsdp", "strategy.sync=boundary", "train.steps=40")
    assert cli.run(["resume", "own", *more, "--quiet"]) == 0
    assert cli.run(["resume", "own", "cluster.workers_per_node=5", "--quiet"]) == 0
    assert cli.run(["resume", "own", "cluster.workers_per_node=1", "strategy=single", "batch.micro_size=6"]) == 0
    assert cli.run(["resume", "own", "checkpoint.every=5"]) == 0
    four, five, one, same = sent
    assert (four.batch.micro_size, four.batch.accumulation, four.batch.world_size) == (3, 2, 4)
    assert (five.batch.micro_size, five.batch.accumulation, five.batch.world_size) == (3, 2, 5)
    assert (one.batch.micro_size, one.batch.accumulation, one.batch.world_size) == (6, 4, 1)
    assert same.batch == one.batch
    assert same.checkpoint.every == 5
    assert {plan.batch.global_size for plan in sent} == {24}
    assert (four.strategy.kind.value, five.strategy.kind.value, five.strategy.shard_size) == ("fsdp", "fsdp", 5)
    assert (four.train.steps, same.train.steps) == (40, 40)
    for plan in sent:
        assert dataclasses.replace(plan.run, version=old.run.version) == old.run
        assert (plan.cluster.cwd, plan.cluster.import_from) == (old.cluster.cwd, old.cluster.import_from)
        assert plan.forced == ()
    assert "stretched from 20 to 40 steps" in " ".join(four.notes)
    assert RunPlan.load(paths.plan_until(0)) == old
    assert [RunPlan.load(paths.plan_until(number)) for number in (1, 2, 3)] == [four, five, one]
    assert "workers_per_node: 1" in paths.config.read_text()
    happened = [json.loads(text) for text in paths.events.read_text().splitlines()]
    assert happened[0]["cluster.workers_per_node"] == "null -> 4"


def test_with_force_the_contract_changes_where_the_run_stands(sent: list[RunPlan]) -> None:
    started_run("optimizer.lr_scaling=linear", "optimizer.reference_batch=24")
    change = ["batch.global_size=48", "train.clip_norm=0.5", "--force", "--quiet"]
    assert cli.run(["resume", "own", *change]) == 0
    (plan,) = sent
    assert [(stage.windows, stage.global_size) for stage in plan.batch.ramp] == [(10, 24)]
    assert (plan.batch.global_size, plan.batch.accumulation) == (48, 8)
    assert plan.forced == ("batch.global_size", "train.clip_norm")
    assert plan.optimizer.lr == pytest.approx(0.006)
    assert cli.run(["resume", "own", "train.log_every=2", "--quiet"]) == 0
    assert (sent[1].batch, sent[1].forced) == (plan.batch, plan.forced), "and it stays so"


def test_a_batch_in_tokens_changes_in_either_unit(sent: list[RunPlan], capsys: pytest.CaptureFixture[str]) -> None:
    started_run("batch.global_size=null", "batch.global_tokens=3K")  # 24 samples of 128
    resumes = [[], ["batch.global_tokens=6K", "batch.global_size=null"], ["batch.global_size=72"]]
    for words in resumes:
        assert cli.run(["resume", "own", *words, *["--force"] * bool(words), "--quiet"]) == 0
    assert [plan.batch.global_size for plan in sent] == [24, 48, 72]
    assert [stage.global_size for stage in sent[1].batch.ramp] == [24]
    assert cli.run(["resume", "own", "batch.global_tokens=6K", "--quiet"]) == 2
    assert "is 48 samples of 128 tokens, and batch.global_size=72." in capsys.readouterr().err


def test_a_run_that_is_done_needs_more_to_do(sent: list[RunPlan], capsys: pytest.CaptureFixture[str]) -> None:
    started_run(verdict="done", steps=20)
    for overrides in ([], ["train.log_every=5"], ["train.steps=20"]):
        assert cli.run(["resume", "own", *overrides]) == 2
        assert "own: is done" in capsys.readouterr().err
    assert cli.run(["resume", "own", "train.steps=30", "--quiet"]) == 0
    assert sent[0].train.steps == 30


def test_a_start_that_does_not_come_about_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = started_run()
    before = files(paths)

    def refuses(plan: RunPlan, *_: Any, **__: Any) -> int:
        assert plan.train.steps == RunPlan.load(plan.paths.plan).train.steps == 33
        history.add_submission(plan.paths, Submission.now())
        history.amend_submission(plan.paths, refused=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "restart", refuses)
    assert cli.run(["resume", "own", "train.steps=33", "--quiet"]) == 130
    after = files(paths)
    changed = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    assert {Path(name).name for name in changed} <= {"job.json", ".submission.1", "events.jsonl"}


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_plan_with_which_the_run_has_started_stays(earlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = started_run()
    if not earlier:
        paths.job.unlink()
        paths.submission(0).unlink()

    def breaks_later(plan: RunPlan, *_: Any, **__: Any) -> int:
        history.add_submission(plan.paths, dataclasses.replace(Submission.now(), ended=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "restart", breaks_later)
    assert cli.run(["resume", "own", "train.steps=33", "--quiet"]) == 130
    assert RunPlan.load(paths.plan).train.steps == 33
    assert "steps: 33" in paths.config.read_text()


def test_other_trackers_are_checked_as_for_a_new_run(
    sent: list[RunPlan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_run()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    assert cli.run(["resume", "own", "trackers=[mlflow]"]) == 2
    assert "mlflow is not installed" in capsys.readouterr().err
    assert sent == []


def test_of_a_sweep_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    paths = started_run("run.dir=runs/study")
    (paths.root.parent / "sweep.json").write_text(json.dumps({"format": 1, "fixed": [], "at_once": None, "cells": []}))
    for word in ("study", "study/own"):
        assert cli.run(["resume", word, "train.steps=40"]) == 2
        assert "whose runs cannot change" in capsys.readouterr().err


def test_a_rule_is_that_of_the_key_or_of_its_groups_class() -> None:
    assert rule("optimizer.lr") != rule("optimizer.kind")
    assert rule("optimizer.amsgrad") == rule("optimizer.lr")
    assert rule("schedule.anything").permission is rule("task._target_").permission is Permission.never
    assert rule("task.width").permission is Permission.force
    assert {rule(key).permission for key in ("cluster.nodes", "strategy.sync", "precision.kind")} == {Permission.change}


def test_a_fixed_number_of_nodes_becomes_a_range(sent: list[RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "available", lambda: False)
    started_run("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=2")
    assert cli.run(["resume", "own", "cluster.nodes=1:3", "train.steps=40"]) == 0
    (plan,) = sent
    assert all("stretched from 20 to 40 steps" in " ".join(world.notes) for world in plan.worlds())
    assert [world.batch.world_size for world in plan.worlds()] == [6, 4, 2]
    assert {(world.batch.global_size, world.batch.micro_size) for world in plan.worlds()} == {(24, 3)}
    assert plan.cluster.slurm is not None
    assert plan.cluster.slurm.options["nodes"] == "1-3"


def test_a_chosen_strategy_stays_until_the_user_names_one(sent: list[RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the launcher would choose another one now."""
    fitting = {"kind": StrategyKind.fsdp}

    def weigh(plan: RunPlan, *_: object, **__: Any) -> RunPlan:
        peak = 10 if plan.strategy.kind is fitting["kind"] else 5000
        forecasts = [dataclasses.replace(each, peak_bytes=peak) for each in plan.strategy.forecasts]
        return dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, 1000))

    monkeypatch.setattr(planner, "weigh_memory", weigh)
    paths = started_run("strategy=auto")
    chosen = RunPlan.load(paths.plan).strategy
    assert chosen.kind is StrategyKind.fsdp
    fitting["kind"] = StrategyKind.ddp
    expected = {"train.log_every=2": "fsdp", "strategy=auto": "fsdp", "strategy=fsdp": "fsdp", "strategy=ddp": "ddp"}
    for word, kind in expected.items():
        assert cli.run(["resume", "own", word]) == 0
        assert sent[-1].strategy.kind.value == kind, word
        reason = chosen.kind_reason if word in ("train.log_every=2", "strategy=auto") else ""
        assert sent[-1].strategy.kind_reason == reason, word
    assert cli.run(["resume", "own", "strategy=auto"]) == 0, "asked for again"
    assert sent[-1].strategy.kind is StrategyKind.ddp
    assert sent[-1].strategy.kind_reason.startswith("the simplest one that is predicted to fit")
