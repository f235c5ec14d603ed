"""Measurement of windows on one rank: what runs, and what is recorded of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.hydra import compose
from launcher.config.schema import Sync
from launcher.plan.batch import Batch
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.work import LONG, SHORT
from launcher.rundir.files import value_from_json
from launcher.train.inspection import step_measurement
from launcher.train.inspection.cpu_use import CpuUse
from launcher.train.inspection.lone_rank import alone_in_group
from launcher.train.inspection.measured_windows import WindowSizes
from launcher.train.inspection.step_measurement import Measurement, Request
from launcher.train.inspection.task_probe import probe
from tests.helpers import inspection_of

TASKS = "tests.train.inspection.measured_tasks"
RUN = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")


def plan_of(task: str, *overrides: str, **params: Any) -> RunPlan:
    inspected = value_from_json(TaskPlan, probe(inspection_of(f"{TASKS}.{task}", *overrides, **params)))
    config = compose(
        ["batch.micro_size=2", "train.loader_workers=0", "precision=fp32", "cluster.workers_per_node=1", *overrides]
    )
    return solve(config, Site(gpus=0, cores=2, cwd="/nowhere"), inspected, RUN)


def measurement(plan: RunPlan, *policies: Sync, budget_s: float = 1e4) -> Measurement:
    request = Request(
        plan=plan.to_json(), policies=[*policies], number=0, ranks=1, collectives=plan.cluster.nodes == 1, port=0,
        listener=None, budget_s=budget_s,
    )  # fmt: skip
    return Measurement(request, RunPlan.from_json(request.plan), dist.HashStore())


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEWEST_TURNS": 2, "MOST_TURNS": 2, "MOST_COUNTED": 1}.items():
        monkeypatch.setattr(step_measurement, name, value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        ("Plain", ["batch.global_size=20", "batch.norm=window"]),  # of 25 samples, and the longest window has 12
        ("Plain", ["batch.global_size=10", "batch.micro_size=4", "batch.uneven=true"]),
        ("Several", ["batch.accumulation=3", "train.loader_workers=1"]),
        ("Stream", ["batch.accumulation=1"]),
        ("WindowLoss", ["batch.accumulation=2"]),
        pytest.param(
            "Plain",
            ["train.compile=true", "batch.accumulation=2"],
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")],  # imports of inductor
        ),
    ],
)
def test_each_size_of_window_is_measured(task: str, overrides: list[str]) -> None:
    plan = plan_of(task, *overrides)
    measured = measurement(plan, Sync.every)
    before = [
        parameter.detach().clone() for parameter in measured._engine.model.parameters() if parameter.requires_grad
    ]
    timings = measured.run()["timings"]
    assert timings["windows"].keys() == {"every"}
    assert timings["windows"]["every"].keys() == {1, SHORT, LONG}
    counts = {len(seconds) for seconds in timings["windows"]["every"].values()}
    assert counts == {len(timings["optimizer"])} == {2}
    assert len(timings["forward"]) == len(timings["backward"]) == (LONG - 1) * len(timings["optimizer"])
    numbers = [number for name in ("forward", "backward", "optimizer", "window") for number in timings[name]]
    assert all(number >= 0 and math.isfinite(number) for number in numbers)
    after = [parameter for parameter in measured._engine.model.parameters() if parameter.requires_grad]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True)), "real steps were taken"


@pytest.mark.usefixtures("alone")
def test_data_smaller_than_a_window_is_repeated() -> None:
    plan = plan_of("Plain", "batch.global_size=8", "batch.micro_size=8")
    timings = measurement(plan, Sync.every).run()["timings"]  # the longest window has 48 samples, the data 25
    assert timings["windows"]["every"].keys() == {1, SHORT, LONG}


@pytest.mark.usefixtures("alone")
def test_a_stream_that_ends_within_a_window() -> None:
    answer = measurement(plan_of("ShortStream", "batch.micro_size=8", "batch.global_size=8"), Sync.every).run()
    assert "no window" in answer["problem"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("limit_s", "sizes"), [(32.0, {1, LONG}), (31.0, {1, SHORT}), (20.0, {1, SHORT}), (19.0, None)]
)
def test_a_slow_job_has_fewer_sizes_of_windows_and_the_slowest_none(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, sizes: set[int] | None
) -> None:
    """Windows of 1 and 2 micro-batches alone were 40% off for one of 16."""
    measured = measurement(plan_of("Several"), Sync.every, budget_s=8.0)
    monkeypatch.setattr(measured, "_warm_up", lambda: 1.0)  # seconds of a micro-batch
    monkeypatch.setattr(step_measurement, "LIMIT_S", limit_s)
    answer = measured.run()
    if sizes is None:
        assert "the limit is 19 s" in answer["too_slow"]
        return
    timings = answer["timings"]
    assert timings["windows"]["every"].keys() == sizes
    assert len(timings["forward"]) == len(timings["backward"]) == (max(sizes) - 1) * len(timings["optimizer"])


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a rank of two hosts with four ranks each, the others of which do not exist."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with alone_in_group(8):
        yield
    dist.destroy_process_group()


HOSTS = ("cluster=hosts", "cluster.nodes=2", "cluster.workers_per_node=4", "cluster.rendezvous=localhost:1")


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("strategy", "share"), [("strategy=ddp", 1), ("strategy=fsdp", 8), ("strategy=hsdp strategy.shard_size=4", 4)]
)
def test_a_rank_of_several_hosts_holds_and_trains_its_shard(strategy: str, share: int) -> None:
    plan = plan_of("Several", *HOSTS, *strategy.split(), "batch.accumulation=2")
    policies = [Sync(forecast.sync) for forecast in plan.strategy.forecasts]
    measured = measurement(plan, *policies)
    timings = measured.run()["timings"]
    assert timings["windows"].keys() == set(policies)
    assert all(sizes.keys() >= {1, SHORT} for sizes in timings["windows"].values())
    rows = {name: len(getattr(p, "_local_tensor", p)) for name, p in measured._engine.model.named_parameters()}
    assert rows["blocks.0.weight"] == 8 // share
    assert all(torch.isfinite(getattr(p, "_local_tensor", p)).all() for p in measured._engine.model.parameters())


@given(
    micro=st.integers(1, 8), world=st.integers(1, 8), accumulation=st.integers(1, 9), missing=st.integers(0, 63),
    sizes=st.lists(st.sampled_from([1, SHORT, LONG]), min_size=1, max_size=9),
)  # fmt: skip
def test_windows_have_the_wanted_sizes(
    micro: int, world: int, accumulation: int, missing: int, sizes: list[int]
) -> None:
    unit = micro * world
    full = accumulation * unit - min(missing, unit - 1)
    batch = Batch(global_size=full, micro_size=micro, accumulation=accumulation, world_size=world)
    found = WindowSizes.of(batch, sizes)
    assert [found.accumulation_at(index) for index in range(len(sizes))] == sizes
    for index, size in enumerate(sizes):
        assert found.global_size_at(index) <= size * unit
        if batch.even:
            assert found.global_size_at(index) == size * unit
    assert dataclasses.replace(found, accumulation=1).sizes == found.sizes


def test_the_cpu_seconds_of_others(tmp_path: Path) -> None:
    stat, core = tmp_path / "stat", min(os.sched_getaffinity(0))
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9\ncpu{core} 100 0 0 500 0 0 0 0 0 0\n")
    use = CpuUse(stat)
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9\ncpu{core} {100 + ticks} {ticks} 0 900 700 0 0 {ticks} 5 5\n")
    assert use.since()["busy_s"] == pytest.approx(3.0)
    assert json.dumps(use.since())
