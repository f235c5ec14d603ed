"""Time of a step on several hosts: computed by hand, and an interval that contains what is not known."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from launcher.config.schema import Device, Sync
from launcher.plan import work
from launcher.plan.forecast import StepTime
from launcher.plan.host import is_virtual
from launcher.plan.links import Level, Links
from launcher.plan.replay import Mark
from launcher.plan.run_plan import RunPlan
from launcher.plan.step_forecast import Trace, step_time
from launcher.plan.sync_policy import Collective
from launcher.plan.work import Seconds, Work
from tests.helpers import make_plan

RATE = 10**6  # bytes per second between the hosts
BACKWARD, END, REDUCE = Mark.backward.value, Mark.end.value, Collective.all_reduce.value


def predicted(plan: RunPlan, *, busy: bool = False) -> StepTime:
    """Forward pass 1 s, backward pass 2 s; a bucket of 1.5 MB, ready in the middle of it, needs 1.5 s."""
    payload = 1_500_000
    spans = [(1.0, BACKWARD, 0), (1.0, REDUCE, payload), (1.0, END, 0), (0.5, Mark.optimizer.value, 0)]
    trace = Trace(
        spans={Sync.boundary: spans}, on_gpu=False, peak_flops=None, items_per_sample=None, flops_per_sample=None
    )
    level = Level(latency_s=0.0, bytes_per_s=RATE, error=0.0)

    def exactly(seconds: float) -> Seconds:
        return Seconds(value=seconds, error=0.0)

    measured = Work(
        forward=exactly(1.0), backward=exactly(2.0), optimizer=exactly(0.5), window=exactly(0.25), collectives=False,
        windows={Sync.boundary: {1: exactly(3.75), 2: exactly(6.75)}}, busy=busy,
    )  # fmt: skip
    links = Links(inside=level, between=level, gloo=True, source="")
    step = step_time(plan, Sync.boundary, trace, links, measured)
    assert step is not None
    return step


def of_two_hosts(device: Device) -> RunPlan:
    plan = make_plan(
        "cluster=hosts", "cluster.rendezvous=localhost:1", "cluster.nodes=2", "cluster.workers_per_node=1",
        "batch.micro_size=1", "batch.accumulation=1", "strategy=ddp",
    )  # fmt: skip
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device))


@pytest.mark.parametrize(("device", "step_s", "exposed_s"), [(Device.cuda, 4.25, 0.5), (Device.cpu, 5.25, 1.5)])
def test_on_cpus_collectives_hide_nothing(device: Device, step_s: float, exposed_s: float) -> None:
    """The bucket takes 1.5 s, and is sent one second before the backward pass ends."""
    step = predicted(of_two_hosts(device))
    assert (step.step_s, step.high_s) == pytest.approx((step_s, step_s))  # nothing has an error
    assert step.exposed_s == pytest.approx(exposed_s)
    assert step.low_s == pytest.approx(4.25)


def test_one_rank_exposes_no_communication() -> None:
    plan = make_plan("cluster.workers_per_node=1", "batch.micro_size=1", "batch.accumulation=1", "strategy=ddp")
    step = predicted(plan)
    assert (step.communication_s, step.exposed_s) == (0.0, 0.0)
    assert step.step_s == pytest.approx(3.75)


@pytest.mark.parametrize("accumulation", [1, 2, 4, 16])
@pytest.mark.parametrize("stalled_s", [0.0, 1.5])
def test_what_each_micro_batch_needs_besides_its_passes_is_not_communication(
    accumulation: int, stalled_s: float
) -> None:
    """On one host: 0.1 s for a window, 0.2 s for each micro-batch, passes of 3 s, collectives of 0.4 s. On a busy
    machine each micro-batch also waits for a core."""
    exactly, each_s = partial(Seconds, error=0.0), 3.2 + stalled_s
    measured = Work(
        forward=exactly(value=1.0), backward=exactly(value=2.0), optimizer=exactly(value=0.5),
        window=exactly(value=0.1 + 6 * 0.2), collectives=True,
        windows={
            Sync.boundary: {size: exactly(value=0.6 + each_s * size + 0.4) for size in (1, 2, 6)},
            Sync.every: {size: exactly(value=0.6 + each_s * size + 0.4 * size) for size in (1, 2, 6)},
        },
    )  # fmt: skip
    plan = make_plan(
        "cluster.workers_per_node=2", "batch.micro_size=1", f"batch.accumulation={accumulation}", "strategy=ddp"
    )
    for sync, exposed_s in ((Sync.boundary, 0.4), (Sync.every, 0.4 * accumulation)):
        step = step_time(plan, sync, None, None, measured)
        assert step is not None
        assert step.exposed_s == pytest.approx(exposed_s, abs=0.11)
        assert step.data_s == pytest.approx(0.1 + 0.2 * accumulation, abs=0.2)
        assert step.step_s == pytest.approx(step.compute_s + step.optimizer_s + step.data_s + step.exposed_s)


def test_no_step_takes_no_time() -> None:
    whole = Seconds(value=1.0, error=1.5)
    part = Seconds(value=0.1, error=0.1)
    measured = Work(
        forward=part, backward=part, optimizer=part, window=part, windows={Sync.boundary: {1: whole, 2: whole}},
        collectives=True,
    )  # fmt: skip
    plan = make_plan("cluster.workers_per_node=1", "batch.micro_size=1", "batch.accumulation=1", "strategy=ddp")
    step = step_time(plan, Sync.boundary, None, None, measured)
    assert step is not None
    assert (step.low_s, step.high_s) == (pytest.approx(1 / 2.5), pytest.approx(2.5))


def test_what_a_busy_machine_took_is_marked() -> None:
    plan = of_two_hosts(Device.cpu)
    assert predicted(plan, busy=True).busy
    assert not predicted(plan).busy


@pytest.mark.parametrize(("device", "virtual", "error"), [
    (Device.cpu, True, 0.1), (Device.cpu, False, 0.02), (Device.cuda, True, 0.02),
])  # fmt: skip
def test_the_cores_of_a_virtual_machine_change_their_speed(
    device: Device, virtual: bool, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "is_virtual", lambda: virtual)
    timings = {name: [1.0] * 9 for name in ("forward", "backward", "optimizer", "window")}
    answers = [{"timings": {**timings, "windows": {"boundary": {"1": [4.0] * 9}}}}]
    found = work._work(of_two_hosts(device), answers, [])
    assert found.forward.error == found.windows[Sync.boundary][1].error == error


def test_the_kernel_names_the_flag_of_virtual_machines(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2 hypervisor\n")
    assert is_virtual(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2\n")
    assert not is_virtual(tmp_path / "cpuinfo")
    assert not is_virtual(tmp_path / "nothing")
