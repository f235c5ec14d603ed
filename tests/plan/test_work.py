"""Work of a planned job: what is read from measured durations, and processes that measure a real task."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.schema import Device, Sync
from launcher.plan import measuring_processes, work
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.sync_policy import POLICIES
from launcher.plan.work import LONG, SHORT, Seconds, Work, measure_work, seconds_of
from tests.helpers import ROOT, make_plan, patience
from tests.infra import warm

TASK = "tests.train.inspection.measured_tasks"


def test_the_interval_covers_the_true_median_and_no_narrower_one_does() -> None:
    for n in range(5, 60):
        seconds = seconds_of(float(number) for number in range(1, n + 1))
        assert seconds.value == (n + 1) / 2
        below = n / 2 + 0.5 - seconds.error * seconds.value  # its lower end is one of the durations
        place = round(below)
        assert below == pytest.approx(place)

        def covered(place: int, n: int = n) -> float:
            """Probability that the median is between the numbers at ``place`` from below and from above."""
            return sum(math.comb(n, k) for k in range(place, n - place + 1)) / 2**n

        assert covered(place) >= 0.9
        assert covered(place + 1) < 0.9


def test_few_durations_have_a_wide_interval() -> None:
    assert seconds_of([2.0]) == Seconds(value=2.0, error=1.0)
    assert seconds_of([1.0, 2.0, 3.0]) == Seconds(value=2.0, error=1.0)


@given(
    st.floats(0, 10), st.floats(0.01, 10), st.integers(1, 64),
    st.sampled_from([(1, SHORT), (1, LONG), (1, SHORT, LONG)]),
)  # fmt: skip
def test_a_window_of_any_size_follows_from_those_that_were_measured(
    first: float, each: float, accumulation: int, sizes: tuple[int, ...]
) -> None:
    windows = {size: Seconds(value=first + each * size, error=0.02) for size in sizes}
    found = worked(windows).of_window(Sync.every, accumulation)
    assert found is not None
    assert found.value == pytest.approx(first + each * accumulation)
    assert found.error >= 0.01
    assert worked(windows).of_window(Sync.boundary, accumulation) is None


def worked(windows: dict[int, Seconds]) -> Work:
    part = Seconds(value=1.0, error=0.1)
    return Work(
        forward=part, backward=part, optimizer=part, window=part, windows={Sync.every: windows},
        collectives=True, notes=("a note",),
    )  # fmt: skip


def test_a_larger_window_does_not_take_less_time() -> None:
    noisy = worked({1: Seconds(value=0.5, error=0.1), SHORT: Seconds(value=0.45, error=0.1)})
    found = noisy.of_window(Sync.every, 16)
    assert found is not None
    assert found.value == 0.45


def test_a_larger_window_takes_no_longer_for_each_micro_batch() -> None:
    """The line through noisy short windows gave 2.8 s."""
    noisy = worked({1: Seconds(value=0.1, error=0.1), SHORT: Seconds(value=0.28, error=0.1)})
    found = noisy.of_window(Sync.every, 16)
    assert found is not None
    assert found.value == pytest.approx(16 / SHORT * 0.28)


def test_work_as_json() -> None:
    found = worked({1: Seconds(value=0.5, error=0.1), SHORT: Seconds(value=0.75, error=0.1)})
    assert Work.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def with_cluster(plan: RunPlan, **values: Any) -> RunPlan:
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, **values))


def test_machines_that_are_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(plan: RunPlan) -> str:
        found, why = measure_work(plan, [Sync.every])
        assert found is None
        return why

    plan = make_plan("cluster.workers_per_node=2")
    assert "cluster.gpu=h100" in reason(with_cluster(plan, gpu="h100"))
    assert "not measured on this machine yet" in measure_work(plan, [Sync.every], only_known=True)[1]
    huge = Forecast(sync=Sync.every, payload_bytes=0, wire_bytes=0, wire_s=None, peak_bytes=10**15)
    strategy = dataclasses.replace(plan.strategy, forecasts=(huge,))
    assert "need 2,000,001.0 GB" in reason(dataclasses.replace(plan, strategy=strategy))
    assert "loop of its own" in reason(dataclasses.replace(plan, task=dataclasses.replace(plan.task, target="")))
    on_gpus = with_cluster(plan, device=Device.cuda)
    monkeypatch.setattr(work, "visible_gpus", lambda _: 0)
    assert "no GPU" in reason(on_gpus)
    monkeypatch.setattr(work, "visible_gpus", lambda _: 1)
    assert "this machine has 1" in reason(on_gpus)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("2, 9000, 72000, 0", "GPU 2 of this machine is in use"),
        ("2, 4, 81000, 0\n3, 4, 81000, 80", "GPU 3 of this machine is in use"),
        ("2, 4, 100, 0", "GPU 2 has 0.1 GB"),
        ("2, [N/A], [N/A], [N/A]", "does not tell"),
    ],
)
def test_gpus_that_others_use_are_left_alone(
    rows: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ \"$3 $4\" = '-i 2,3' ] && cat <<END\n{rows}\nEND\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # another GPU may be in use by other people
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(work, "visible_gpus", lambda _: 2)
    found, why = measure_work(with_cluster(make_plan("cluster.workers_per_node=2"), device=Device.cuda), [Sync.every])
    assert found is None
    assert reason in why


HOSTS = ("cluster=hosts", "cluster.rendezvous=localhost:1", "cluster.workers_per_node=2", "batch.micro_size=2")


def test_what_a_measurement_depends_on() -> None:
    def key(*overrides: str) -> dict[str, Any]:
        plan = make_plan(*overrides)
        return work._key(plan, [Sync.every], plan.cluster.workers_per_node)

    one = ("cluster.workers_per_node=2", "batch.micro_size=2")
    same = [
        (
            one,
            (
                *one,
                "batch.accumulation=9",
                "train.steps=7",
                "run.name=other",
                "strategy.sync=every",
                "checkpoint.every=3",
            ),
        ),
        ((*HOSTS, "cluster.nodes=2"), (*HOSTS, "cluster.nodes=8", "cluster.link_gbit=10")),
    ]
    for first, second in same:
        assert key(*first) == key(*second)
    different = [
        (one, "batch.micro_size=4"), (one, "optimizer=sgd"), (one, "train.loader_workers=2"), (one, "precision=bf16"),
        (one, "train.clip_norm=2"), (one, "strategy=fsdp"), (one, "cluster.workers_per_node=1"),
        ((*HOSTS, "cluster.nodes=2", "strategy=fsdp"), "cluster.nodes=4"),
    ]  # fmt: skip
    for overrides, other in different:
        assert key(*overrides) != key(*overrides, other), other
    assert key(*one) != key(*HOSTS, "cluster.nodes=2")


@pytest.fixture
def warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_processes.subprocess, "Popen", warm.Popen)


def real_plan(task: str, samples: int, *overrides: str, **params: Any) -> RunPlan:
    plan = make_plan("batch.micro_size=2", "train.loader_workers=0", "precision=fp32", *overrides, samples=samples)
    described = dataclasses.replace(plan.task, target=f"{TASK}.{task}", params=params, parameters=97)
    return dataclasses.replace(with_cluster(plan, import_from=(str(ROOT),), cwd=str(ROOT)), task=described)


def test_a_process_that_ends_before_it_has_read_a_long_plan_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_processes, "MODULE", "launcher.no_such_module")
    plan = make_plan().with_notes(["a long note " * 10**5])
    answers = measuring_processes.run_ranks(plan, [Sync.every], 1, 1.0)
    assert answers == [{"problem": "a process that measured it ended with status 1"}]


def test_a_variable_that_changes_how_torch_computes_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("cluster.workers_per_node=2")
    before = work._key(plan, [Sync.every], 2)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert work._key(plan, [Sync.every], 2) != before


def test_what_a_busy_machine_took_is_kept_until_it_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start after `launch plan` had no time on such a machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = worked({1: Seconds(value=0.5, error=0.1), SHORT: Seconds(value=0.75, error=0.1)})
    answers = iter([(True, "it was busy"), (False, "")])

    def run(*_: Any) -> dict[str, Any]:
        busy, note = next(answers)
        found = dataclasses.asdict(dataclasses.replace(measured, notes=(note,)))
        return {"work": found, "busy": busy, "depends_on": {"paths": [], "variables": []}}

    monkeypatch.setattr(work, "_run", run)
    plan, policies = make_plan("cluster.workers_per_node=2"), list(measured.windows)

    def note(*, only_known: bool) -> str:
        found, _ = measure_work(plan, policies, only_known=only_known)
        assert found is not None
        return found.notes[0]

    assert note(only_known=False) == note(only_known=True) == "it was busy"
    assert note(only_known=False) == note(only_known=False) == note(only_known=True) == ""


def test_that_a_busy_machine_is_too_slow_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores = len(os.sched_getaffinity(0))
    slow = {
        "too_slow": "a micro-batch takes 9 s",
        "own_s": 1.0,
        "took_s": 10.0,
        "depends_on": {"paths": [], "variables": []},
    }
    answers = [[slow | {"busy_s": 1.0 + 5.0 * cores}], [slow | {"busy_s": 1.0}]]
    monkeypatch.setattr(work, "run_ranks", lambda *_: answers.pop(0))
    for _ in range(3):  # the third time, the answer of the idle machine counts
        assert measure_work(make_plan(), [Sync.every]) == (None, "a micro-batch takes 9 s")
    assert not answers


@pytest.mark.slow
@pytest.mark.usefixtures("warm_starts")
def test_ranks_measure_each_policy_and_the_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "BUSY_SHARE", 100.0)  # other tests run at the same time
    (tmp_path / "rows").write_text("30")
    plan = real_plan("Plain", 25, "cluster.workers_per_node=2", "batch.accumulation=3", rows=str(tmp_path / "rows"))
    policies = POLICIES[plan.strategy.kind]
    found, why = measure_work(plan, policies, budget_s=0.1)
    assert found is not None, why
    assert found.collectives
    assert found.windows.keys() == set(policies)
    assert all(seconds.value > 0 for sizes in found.windows.values() for seconds in sizes.values())
    assert min(found.forward.value, found.backward.value, found.optimizer.value) > 0
    assert found.notes == ()

    def refuse(*_: Any) -> Any:
        raise AssertionError("it is measured again")

    monkeypatch.setattr(work, "run_ranks", refuse)
    longer = dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, accumulation=6, global_size=24))
    assert measure_work(longer, policies, only_known=True)[0] == found
    (tmp_path / "rows").write_text("31")  # what the task reads
    assert measure_work(longer, policies, only_known=True)[0] is None


@pytest.mark.slow
@pytest.mark.usefixtures("warm_starts")
def test_a_task_that_fails_and_hosts_that_are_elsewhere() -> None:
    plan = real_plan("FailsAtSecond", 25, "cluster.workers_per_node=2", "batch.accumulation=3")
    found, why = measure_work(plan, [Sync.boundary], budget_s=0.1)
    assert found is None
    assert "the second call fails" in why
    plan = real_plan("Plain", 25, *HOSTS, "cluster.nodes=3", "strategy=fsdp", "batch.accumulation=1")
    found, why = measure_work(plan, [Sync.boundary], budget_s=0.1)
    assert found is not None, why
    assert not found.collectives
    assert found.windows.keys() == {Sync.boundary}


MEASURE = """
import sys
from launcher.config.schema import Sync
from launcher.plan.run_plan import RunPlan
from launcher.plan.work import measure_work
measure_work(RunPlan.from_json(sys.stdin.read()), [Sync.every])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_command_ends_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    plan = real_plan("Slow", 25, "cluster.workers_per_node=2", "batch.accumulation=3", mark=str(tmp_path / "in"))
    program = [sys.executable, "-c", MEASURE]
    command = subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    with command:
        assert command.stdin is not None
        command.stdin.write(plan.to_json())
        command.stdin.close()
        end = time.monotonic() + patience(60)
        while len(marks := [*tmp_path.glob("in.*")]) < 2:
            assert time.monotonic() < end
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(number)
        command.wait(patience(30))
    pids = [int(mark.suffix[1:]) for mark in marks]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not [*tmp_path.glob("in.*.*")]


@pytest.mark.parametrize("n", [199, 201, 1023, 1024, 5000])
def test_the_interval_of_many_windows_narrows(n: int) -> None:
    """A short window is measured thousands of times."""
    assert 0 < seconds_of(range(1, n + 1)).error < 1.7 / n**0.5
