"""Outer steps of real jobs, step by step in fp64, against an independent implementation of the published algorithms."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Launch
from tests.helpers import launch_command, patience
from tests.infra import warm
from tests.infra.checkpoints import assert_same_tensors, tensors
from tests.infra.runs import records, wait_for_steps, worker_of
from tests.user_project.speech.fitted import Net, Samples

RECORDER = "callbacks=[{_target_: speech.hooked.Recorder}]"
JOB = [
    "task._target_=speech.fitted.Fit", "precision=fp32", "precision.parameters=keep", "wandb.mode=disabled",
    "batch.global_size=24", "batch.micro_size=3", "schedule=constant", "schedule.warmup_steps=0", "run.calibrate_s=0",
    "optimizer.lr=0.01", "optimizer.weight_decay=0", "train.clip_norm=null", "train.shuffle=false",
    "train.log_every=1", "outer=diloco",
]  # fmt: skip
STEPS = 8
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Site:
    """One site on its own: a model and its optimizer."""

    def __init__(self, start: list[Tensor], optimizer: str) -> None:
        self.parameters = [nn.Parameter(value.clone()) for value in start]
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, data: Samples, positions: Iterable[int]) -> None:
        net = Net()
        for layer, parameter in zip(net.layers, self.parameters, strict=True):
            layer.weight = parameter
        chosen = [*positions]
        error = (net(data.first[chosen], data.second[chosen]) - data.wanted[chosen]).square().mean(1)
        weights = data.weights[chosen]
        self.optimizer.zero_grad()
        ((weights * error).sum() / weights.sum()).backward()
        self.optimizer.step()


def reference(
    start: list[Tensor], sites: int, *, steps: int = STEPS, every: int = 3, lr: float = 0.7, momentum: float = 0.9,
    parts: int = 1, delay: int = 0, mixing: float = 0.0, optimizer: str = "adamw",
) -> tuple[list[list[list[Tensor]]], list[Tensor]]:  # fmt: skip
    """Return the parameters of each site after each step, and the shared ones at the end."""
    data, everyone = Samples(96), [Site(start, optimizer) for _ in range(sites)]
    shared = [nn.Parameter(value.clone()) for value in start]
    size = len(start) // parts
    groups = [[*range(part * size, (part + 1) * size)] for part in range(parts)]
    outer = [torch.optim.SGD([shared[n] for n in group], lr=lr, momentum=momentum, nesterov=momentum > 0)
             for group in groups]  # fmt: skip
    under_way: dict[int, tuple[int, Tensor]] = {}
    history: list[list[list[Tensor]]] = []

    def send(part: int, now: int) -> None:
        arriving = [
            torch.cat([(shared[n] - site.parameters[n]).detach().flatten() for n in groups[part]]) for site in everyone
        ]
        under_way[part] = now + delay, torch.stack(arriving).mean(0)

    def apply(part: int, kept: float) -> None:
        _, mean = under_way.pop(part)
        for n, gradient in zip(groups[part], mean.chunk(size), strict=True):
            shared[n].grad = gradient.view_as(shared[n]).clone()
        outer[part].step()
        for site in everyone:
            for n in groups[part]:
                site.parameters[n].data = kept * site.parameters[n].data + (1 - kept) * shared[n].data

    for now in range(1, steps + 1):
        first = (now - 1) * 24 % 96
        for number, site in enumerate(everyone):
            site.step(data, range(first + number * 24 // sites, first + (number + 1) * 24 // sites))
        for part in [part for part, (due, _) in under_way.items() if now >= due or now == steps]:
            apply(part, mixing)
        for part in range(parts):
            if now % every == every * (part + 1) // parts % every or now == steps:
                send(part, now)
                if not delay or now == steps:
                    apply(part, 0.0)
        history.append([[p.detach().clone() for p in site.parameters] for site in everyone])
    return history, [value.detach() for value in shared]


def events(project: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / f"events-{rank}.jsonl").read_text().splitlines()]


def parameters_in(event: dict[str, Any]) -> list[Tensor]:
    return [torch.tensor(each, dtype=torch.float64).view(8, 8) for each in event["parameters"].values()]


TWO_OF_TWO = ["cluster.workers_per_node=4", "outer.group=2"]
TWO_OF_ONE = ["cluster.workers_per_node=2", "outer.group=1"]
STREAMING = {"parts": 2, "delay": 1, "mixing": 0.5}
CASES: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "ddp": (TWO_OF_TWO, 2, {}),
    "fsdp": ([*TWO_OF_TWO, "strategy=fsdp"], 2, {}),
    "hsdp by shard groups": (
        ["cluster.workers_per_node=4", "strategy=hsdp", "strategy.shard_size=2", "outer.group=shard"], 2, {}
    ),
    "hsdp inside a site, streaming": (
        ["cluster.workers_per_node=8", "batch.micro_size=1", "strategy=hsdp", "strategy.shard_size=2",
         "outer.group=4", "outer.fragments=2", "outer.delay=1"], 2, STREAMING,
    ),
    "three sites, streaming": (
        ["cluster.workers_per_node=3", "batch.micro_size=4", "outer.group=1", "outer.fragments=2", "outer.delay=1"],
        3, STREAMING,
    ),
    "no momentum": ([*TWO_OF_ONE, "outer.momentum=0"], 2, {"momentum": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_that_of_the_published_algorithm(case: str, launch: Launch, project: Path) -> None:
    overrides, sites, settings = CASES[case]
    launch("train", *JOB, *overrides, "outer.every=3", f"train.steps={STEPS}", "run.name=r", RECORDER, status=0)
    seen = events(project, 0)
    start = parameters_in(next(each for each in seen if each["event"] == "start"))
    history, shared = reference(start, sites, **settings)
    taken = [parameters_in(each) for each in seen if each["event"] == "step"]
    assert len(taken) == STEPS
    # sharded gradients are summed in fp32 (precision.reduce_dtype)
    near = {"rtol": 1e-4, "atol": 1e-5} if "hsdp" in case or "fsdp" in case else {"rtol": 1e-9, "atol": 1e-11}
    for number, (found, wanted) in enumerate(zip(taken, history, strict=True), 1):
        for one, other in zip(found, wanted[0], strict=True):
            torch.testing.assert_close(one, other, **near, msg=lambda text, n=number: f"step {n}: {text}")
    # after the last step every site has the same model, in a checkpoint of its own
    for site in range(sites):
        root = project / "runs" / "r" / ("" if site == 0 else f"sites/{site}")
        model = tensors(root / "checkpoints" / f"step_{STEPS:06d}")
        for number, wanted in enumerate(shared):
            torch.testing.assert_close(model[f"model.layers.{number}.weight"], wanted, **near)
    assert not torch.allclose(history[0][0][0], history[0][1][0]), "sites differ between outer steps"


def test_averages_after_each_step_are_the_synchronous_step(launch: Launch, project: Path) -> None:
    """Equal shares and items are needed: the mean of the sites' means is that of the window then."""
    job = [word for word in JOB if not word.startswith("outer")]
    job += ["cluster.workers_per_node=2", "optimizer=sgd", "optimizer.lr=0.05", "train.steps=6", RECORDER]
    job += ["task._target_=speech.fitted.Even", "optimizer.weight_decay=0"]
    averaged = ["outer=diloco", "outer.group=1", "outer.every=1", "outer.lr=1", "outer.momentum=0"]
    steps: list[list[list[Tensor]]] = []
    for name, more in (("together", list[str]()), ("averaged", averaged)):
        launch("train", *job, *more, f"run.name={name}", status=0)
        steps.append([parameters_in(each) for each in events(project, 0) if each["event"] == "step"])
        (project / "events-0.jsonl").unlink()
    for found, wanted in zip(*steps, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lacking", [["", "sites/1"], ["sites/1"]], ids=["both sites", "one site"])
def test_resumed_bit_by_bit_within_a_round(lacking: list[str], launch: Launch, project: Path) -> None:
    """A site that has later checkpoints than another one writes them again: they are of steps that are repeated."""
    job = [*JOB, *TWO_OF_ONE, "outer.every=4", "outer.fragments=2", "outer.delay=2"]
    job += ["checkpoint.every=3", "checkpoint.keep=null", "train.steps=9", "+task.buffer=true", "train.clip_norm=1"]
    launch("train", *job, "run.name=whole", status=0)
    whole = project / "runs" / "whole"
    shutil.copytree(whole, project / "kept")
    # step 3 is between the step after which a fragment was sent and the step after which it is applied
    for site in lacking:
        for step in (6, 9):
            shutil.rmtree(whole / site / "checkpoints" / f"step_{step:06d}")
    (whole / "summary.json").unlink()
    launch("resume", "whole", status=0)
    resumed = (whole / "logs" / "rank1.attempt1.log").read_text()
    assert "Resuming from" in resumed
    assert "instead of" not in resumed, "sites, ranks and global batch are those of before"
    for site in ("", "sites/1"):
        assert_same_tensors(
            whole / site / "checkpoints" / "step_000009", project / "kept" / site / "checkpoints" / "step_000009"
        )
    record = records(whole)[-1]
    assert record["batch/samples"] == record["batch/global_size"] == 24
    assert record["progress/samples"] == 9 * 24
    assert record["outer/sites"] == 2


def test_a_run_resumes_with_more_sites(launch: Launch, project: Path) -> None:
    job = [*JOB, *TWO_OF_ONE, "batch.micro_size=2", "outer.every=2", "checkpoint.every=3", "checkpoint.keep=null"]
    launch("train", *job, "train.steps=3", "run.name=more", status=0)
    run = project / "runs" / "more"
    launch("resume", "more", "cluster.workers_per_node=3", "train.steps=6", status=0)
    models = [tensors(run / site / "checkpoints" / "step_000006") for site in ("", "sites/1", "sites/2")]
    for name, value in models[0].items():
        if name.startswith("model."):
            assert all(torch.equal(each[name], value) for each in models[1:]), name
    assert [each["outer/sites"] for each in records(run)] == [2, 2, 2, 3, 3, 3]
    assert records(run)[-1]["progress/samples"] == 6 * 24
    # with fewer sites and then more again, the third one does not go back to what it has of its own
    for workers, steps in ((2, 9), (3, 12)):
        launch("resume", "more", f"cluster.workers_per_node={workers}", f"train.steps={steps}", status=0)
    assert [each["step"] for each in records(run)] == [*range(1, 13)]
    assert (
        tensors(run / "sites" / "2" / "checkpoints" / "step_000012").keys()
        == tensors(run / "sites" / "1" / "checkpoints" / "step_000012").keys()
    )


def test_sites_have_one_model_at_the_end_although_a_part_was_frozen_within_a_round(
    launch: Launch, project: Path
) -> None:
    freezer = "callbacks=[{_target_: speech.fitted.Freezer, after: 2}]"
    launch("train", *JOB, *TWO_OF_ONE, "outer.every=3", "train.steps=5", "run.name=frozen", freezer, status=0)
    run = project / "runs" / "frozen"
    models = [tensors(run / site / "checkpoints" / "step_000005") for site in ("", "sites/1")]
    different = [name for name in models[0] if name.startswith("model.") and not models[0][name].equal(models[1][name])]
    assert different == []


def test_a_stop_at_one_site_stops_all_after_the_same_step(project: Path) -> None:
    job = [*JOB, *TWO_OF_ONE, "outer.every=5", "train.steps=100000", "+task.pause_s=0.02", "run.name=stop"]
    command = launch_command("train", *job)
    process = warm.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = project / "runs" / "stop"
    wait_for_steps(run, 8)
    worker_of(run, 1).send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 75, output
    newest = [max(path.name for path in (run / site / "checkpoints").glob("step_*")) for site in ("", "sites/1")]
    assert newest[0] == newest[1]


def test_the_cost_of_a_synchronous_step_is_measured_and_changes_nothing(launch: Launch, project: Path) -> None:
    finals = []
    for seconds in ("0", "1"):
        words = ["outer.every=3", "train.steps=4", f"run.calibrate_s={seconds}", f"run.name=measured{seconds}"]
        done = launch("train", *JOB, *TWO_OF_ONE, *words, "task._target_=speech.fitted.Even", status=0)
        run = project / "runs" / f"measured{seconds}"
        measured = [record.get("outer/synchronous_s", 0) > 0 for record in records(run)]
        assert measured == [seconds == "1"] * 4
        assert ("of a synchronous job would take" in done.stdout) == (seconds == "1")
        finals.append((tensors(run / "checkpoints" / "step_000004"), [r["outer/payload_bytes"] for r in records(run)]))
    assert finals[0][1] == finals[1][1], "the measurement is no traffic of the job"
    for name, value in finals[0][0].items():
        if name.startswith("model."):
            assert value.equal(finals[1][0][name])


def test_sites_whose_parameters_have_another_order_are_refused(launch: Launch, project: Path) -> None:
    """They would share values by position."""
    (project / "different").write_text("order of parameters on rank 1")
    more = ["task._target_=speech.fitted.Different", "train.shuffle=true", "outer.every=3", "train.steps=3"]
    done = launch("train", *JOB, *TWO_OF_ONE, *more, status=2)
    assert "The model differs between ranks: the order of its parameters." in done.stderr


@pytest.mark.usefixtures("project")
def test_more_fragments_than_parameters_are_one_message(launch: Launch) -> None:
    done = launch("train", *JOB, *TWO_OF_ONE, "outer.every=9", "outer.fragments=5", "train.steps=9", status=2)
    assert " failed: outer.fragments=5: the model has 4 trained parameters to divide." in done.stderr
    assert "Callback" not in done.stderr
