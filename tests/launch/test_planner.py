"""Plans for hosts that are not at hand: `launch plan` makes them, and nothing starts them."""

from __future__ import annotations

import os

import pytest

from launcher.cli.train import launch_train
from launcher.config.hydra import compose
from launcher.config.schema import ClusterKind
from launcher.errors import ConfigError, UserError
from launcher.launch import planner
from launcher.launch.planner import emulation_notes, new_run, plan_job
from launcher.launch.slurm import client
from launcher.plan.clusters import require_at_hand
from launcher.plan.run_plan import RunPlan
from launcher.trackers.installed import require_trackers
from tests.conftest import Launch
from tests.helpers import make_plan

QUIET = ("task=digits", "wandb.mode=disabled", "batch.norm=leave")


def planned(*overrides: str) -> RunPlan:
    return plan_job(compose([*QUIET, *overrides]), starts=False)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (("cluster.nodes=2",), 4),
        (("cluster.nodes=128", "cluster.workers_per_node=8", "batch.micro_size=2", "batch.accumulation=3"), 1024),
        (("cluster=elsewhere",), 2),
        (("cluster.nodes=2", "cluster.device=cuda", "cluster.workers_per_node=8", "batch.micro_size=1"), 16),
        (("cluster.nodes=2:4", "batch.global_size=48"), 8),
    ],
)
def test_several_hosts_need_no_cluster(overrides: tuple[str, ...], world: int) -> None:
    plan = planned(*overrides)
    assert plan.cluster.kind == ClusterKind.elsewhere
    assert plan.cluster.slurm is None
    assert plan.cluster.world_size == plan.batch.world_size == world
    assert RunPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("gpu", "precision", "noted"), [
    ("t4", "bf16", True), ("v100", "bf16", True), ("t4", "fp16", False), ("t4", "auto", False), ("a100", "bf16", False),
])  # fmt: skip
def test_a_gpu_that_emulates_bf16_is_noted(gpu: str, precision: str, noted: bool) -> None:
    plan = make_plan("cluster=elsewhere", f"cluster.gpu={gpu}", f"precision={precision}")
    assert any(f"{gpu.upper()} has no units for it" in note for note in emulation_notes(plan)) is noted
    assert precision != "auto" or plan.precision.reason == "auto: T4 emulates bf16"


def test_a_trial_of_wandb_has_the_id_of_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "tr1al0id")
    assert new_run(compose([]).run, "", "/").id != "tr1al0id", "of an outer run"
    monkeypatch.setenv("WANDB_SWEEP_ID", "5weep")
    assert new_run(compose([]).run, "", "/").id == "tr1al0id"
    with pytest.raises(ConfigError, match=r"wandb.mode=offline: sends no results to sweep 5weep"):
        require_trackers(compose([]), os.environ)
    require_trackers(compose(["wandb.mode=online"]), os.environ)
    with pytest.raises(UserError, match="a trial of W&B sweep 5weep is one run"):
        launch_train(["-m", "train.seed=1,2"])


def test_one_host_is_this_machine() -> None:
    assert planned().cluster.kind == ClusterKind.local


def test_a_batch_that_the_ranks_can_share_is_assumed_where_none_is_given() -> None:
    hosts = ("cluster.nodes=2048", "cluster.workers_per_node=8")
    plan = planned(*hosts)
    assert (plan.batch.global_size, plan.batch.micro_size, plan.batch.accumulation) == (16384, 1, 1)
    assert any("batch.micro_size=1 and batch.accumulation=1 are assumed" in note for note in plan.notes)
    assert planned(*hosts, "batch.accumulation=3").batch.global_size == 3 * 16384
    with pytest.raises(ConfigError, match=r"batch.global_size=64: 64 samples cannot be shared by 16,384 ranks"):
        planned(*hosts, "batch.global_size=64")


def test_too_few_samples_for_the_world() -> None:
    words = ("cluster.nodes=2048", "cluster.workers_per_node=8", "batch.micro_size=1", "batch.accumulation=1")
    plan = planned(*words)
    assert plan.strategy.forecast is not None
    assert plan.strategy.forecast.payload_bytes
    (note,) = [note for note in plan.notes if "cannot start" in note]
    assert note.startswith("The task has 1,438 samples, fewer than one window of 16384")
    with pytest.raises(ConfigError, match="the task has 1,438 samples, fewer than one window"):
        plan_job(compose([*QUIET, "batch.global_size=2000"]))
    assert [note for note in planned("batch.global_size=2000").notes if "cannot start" in note]
    with pytest.raises(ConfigError, match="cluster=local is one machine"):
        plan_job(compose([*QUIET, "cluster.nodes=2"]))


def test_a_slurm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise client.SlurmSilent("Slurm does not answer: Connection refused")

    monkeypatch.setattr(client, "available", lambda: True)
    monkeypatch.setattr(client, "partitions", silent)
    words = ("cluster=slurm", "cluster.nodes=2", "cluster.partition=gpu", "cluster.time=01:00:00")
    plan = planned(*words)
    assert plan.cluster.slurm is not None
    assert plan.cluster.slurm.options["partition"] == "gpu"
    assert [note for note in plan.notes if note.startswith("Slurm does not answer: Connection refused. The plan was")]
    with pytest.raises(client.SlurmSilent):
        plan_job(compose([*QUIET, *words]))


def test_what_belongs_to_another_cluster() -> None:
    with pytest.raises(ConfigError, match=r"cluster.rendezvous=a:1: has no effect with cluster=elsewhere"):
        planned("cluster.nodes=2", "cluster.rendezvous=a:1")
    with pytest.raises(ConfigError, match=r"cluster.partition=gpu: has no effect with cluster=elsewhere"):
        planned("cluster.nodes=2", "cluster.partition=gpu")


def test_the_memory_of_hosts_elsewhere_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded plan is still weighed, by its bytes alone."""

    def weigh(plan: RunPlan, _: object, *, choose: bool) -> RunPlan:
        assert choose
        return plan.with_notes(["weighed"])

    monkeypatch.setattr(planner, "weigh_memory", weigh)
    assert "weighed" in planned("cluster.nodes=2", "strategy=hsdp").notes


def test_nothing_starts_elsewhere(launch: Launch) -> None:
    words = (*QUIET, "cluster=elsewhere", "cluster.nodes=2")
    for command in ("train", "verify", "drill", "doctor"):
        done = launch(command, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "cluster=elsewhere: is for `launch plan`" in done.stderr
    with pytest.raises(ConfigError, match="cluster=elsewhere: is for `launch plan`"):
        require_at_hand(compose(words).cluster)
    done = launch("plan", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 hosts × 2 workers" in done.stdout
