"""Replay of windows: schedules computed by hand, and bounds that hold for any timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.schema import Sync
from launcher.plan.replay import Mark, Span, Timeline, replay
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from tests.helpers import make_plan

GATHER, REDUCE, SCATTER = Collective.all_gather.value, Collective.all_reduce.value, Collective.reduce_scatter.value
WAIT, BACKWARD, END = Mark.wait.value, Mark.backward.value, Mark.end.value
MIB = 2**20


def plan_of(strategy: str, accumulation: int = 1, *, gpu: bool = True) -> RunPlan:
    machine = ["cluster.gpu=h100", "cluster.workers_per_node=4"] if gpu else ["cluster.workers_per_node=4"]
    if strategy == "hsdp":
        machine.append("strategy.shard_size=2")
    words = ["batch.micro_size=1", f"batch.accumulation={accumulation}", "precision=fp32"]
    return make_plan(f"strategy={strategy}", *machine, *words)


def seconds(kind: Collective, payload: int) -> float:  # noqa: ARG001
    return payload / MIB


def micro_batch(*spans: Span) -> list[Span]:
    return [*spans, (0.0, END, 0)]


def step_s(plan: RunPlan, sync: Sync, first: Sequence[Span], last: Sequence[Span], optimizer_s: float = 0.0) -> float:
    return replay(plan, sync, Timeline(first, last, optimizer_s), seconds).step_s


def test_ddp_sends_buckets_during_the_backward_pass_and_waits_at_its_end() -> None:
    """Buckets: one parameter of 1 MiB, which fills the first one; two of 20 MiB; the rest. Each MiB takes a second."""
    plan = plan_of("ddp")
    last = micro_batch((3.0, BACKWARD, 0), (2.0, REDUCE, MIB), (4.0, REDUCE, 20 * MIB), (4.0, REDUCE, 20 * MIB),
                       (1.0, REDUCE, 5 * MIB))  # fmt: skip
    # ready at 5, 13 and 14; sent from 5 to 6, 13 to 53, 53 to 58
    assert step_s(plan, Sync.boundary, [], last, 2.0) == pytest.approx(60)
    alone = [(spent, BACKWARD if event == BACKWARD else END, 0) for spent, event, _ in last]
    assert step_s(plan, Sync.boundary, [], alone, 2.0) == pytest.approx(16)


def test_a_micro_batch_without_synchronisation_costs_its_computation() -> None:
    plan = plan_of("ddp", accumulation=5)
    first = micro_batch((1.0, BACKWARD, 0), (2.0, Mark.wait.value, 0))
    last = micro_batch((1.0, BACKWARD, 0), (2.0, REDUCE, 2 * MIB))
    assert step_s(plan, Sync.boundary, first, last) == pytest.approx(5 * 3 + 2)


SHARDED = [
    (0.0, GATHER, MIB), (0.0, WAIT, 0),  # the first unit: nothing hides it
    (0.0, GATHER, MIB), (4.0, WAIT, 0),  # gathered while the first computes
    (4.0, BACKWARD, 0),
    (8.0, SCATTER, 2 * MIB),
    (8.0, SCATTER, 2 * MIB),
]  # fmt: skip


def test_fsdp_gathers_a_unit_while_the_one_before_it_computes() -> None:
    plan = plan_of("fsdp")
    assert step_s(plan, Sync.every, [], micro_batch(*SHARDED)) == pytest.approx(1 + 4 + 4 + 8 + 8 + 2)
    slow = [(spent, event, 10 * payload if event == GATHER else payload) for spent, event, payload in SHARDED]
    assert step_s(plan, Sync.every, [], micro_batch(*slow)) == pytest.approx(10 + 10 + 4 + 8 + 8 + 2)


def test_a_reduction_waits_for_the_one_before_it() -> None:
    slow = [(spent, event, 10 * payload if event == SCATTER else payload) for spent, event, payload in SHARDED]
    # gradients at 17; reduced until 37, though the next ones are there at 25; these until 57
    assert step_s(plan_of("fsdp"), Sync.every, [], micro_batch(*slow)) == pytest.approx(57)


def test_on_cpus_a_reduction_is_waited_for_at_once_unless_the_sum_may_wait() -> None:
    plan = plan_of("fsdp", gpu=False)
    assert step_s(plan, Sync.every, [], micro_batch(*SHARDED)) == pytest.approx(1 + 1 + 4 + 4 + 8 + 2 + 8 + 2 - 1)
    assert step_s(plan, Sync.boundary, [], micro_batch(*SHARDED)) == pytest.approx(1 + 4 + 4 + 8 + 8 + 2)


def test_hsdp_sends_to_the_replicas_beside_the_next_reduction() -> None:
    plan = plan_of("hsdp")
    spans = micro_batch((1.0, BACKWARD, 0), (1.0, SCATTER, MIB), (0.0, REDUCE, 3 * MIB), (1.0, SCATTER, MIB),
                        (0.0, REDUCE, 3 * MIB))  # fmt: skip
    # scattered until 3 and 4; sent to the replicas from 3 to 6 and from 6 to 9
    assert step_s(plan, Sync.every, [], spans) == pytest.approx(9)


def test_what_stays_gathered_is_not_gathered_again() -> None:
    timeline = Timeline(micro_batch(*SHARDED[:4], (1.0, BACKWARD, 0)), micro_batch((2.0, BACKWARD, 0)), 0.0)
    between = timeline.between(Sync.gather_once)
    assert [event for _, event, _ in between] == [BACKWARD, END]
    assert sum(spent for spent, _, _ in between) == 5
    assert timeline.between(Sync.boundary) is timeline.first


def test_timeline_of_a_recorded_window() -> None:
    one = [(1.0, BACKWARD, 0), (2.0, END, 0), (3.0, Mark.optimizer.value, 0)]
    assert Timeline.of(one) == Timeline((), one[:2], 3.0)
    two = Timeline.of([*one[:2], *one])
    assert (two.first, two.last, two.passes_s()) == (one[:2], one[:2], (1.0, 2.0))
    assert two.scaled(10, 100, 7).last == [(10.0, BACKWARD, 0), (200.0, END, 0)]
    assert two.scaled(10, 100, 7).optimizer_s == 21


EVENTS = {"ddp": (REDUCE,), "fsdp": (GATHER, WAIT, SCATTER), "hsdp": (GATHER, WAIT, SCATTER, REDUCE)}
DURATIONS = st.floats(0, 5)


@st.composite
def timelines(draw: st.DrawFn, events: Sequence[str]) -> Timeline:
    def part() -> list[Span]:
        span = st.tuples(DURATIONS, st.sampled_from(events), st.integers(0, 40 * MIB))
        forward, backward = (draw(st.lists(span, max_size=6)) for _ in range(2))
        return micro_batch(*forward, (draw(DURATIONS), BACKWARD, 0), *backward)

    return Timeline(part(), part(), draw(DURATIONS))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(EVENTS)), st.booleans(), st.integers(1, 8), st.data())
def test_a_window_takes_no_less_than_its_parts_and_no_more_than_their_sum(
    strategy: str, gpu: bool, accumulation: int, data: st.DataObject
) -> None:
    plan, timeline = plan_of(strategy, accumulation, gpu=gpu), data.draw(timelines(EVENTS[strategy]))
    window = replay(plan, Sync.every, timeline, seconds)
    passes = (
        [timeline.first, *[timeline.first] * (accumulation - 2), timeline.last] if accumulation > 1 else [timeline.last]
    )
    assert window.compute_s == pytest.approx(sum(spent for spans in passes for spent, _, _ in spans))
    sent = sum(payload for spans in passes for _, event, payload in spans if event != WAIT) / MIB
    assert window.communication_s == pytest.approx(sent)
    least, most = window.compute_s + window.optimizer_s, window.compute_s + window.optimizer_s + sent
    assert least - 1e-9 <= window.step_s <= most + 1e-9
    if strategy == "ddp":  # one stream, and everything is waited for
        assert window.step_s >= window.optimizer_s + sent - 1e-9
    free = replay(plan, Sync.every, timeline, lambda *_: 0.0)
    assert free.step_s == pytest.approx(least)
    slower = replay(plan, Sync.every, timeline, lambda kind, payload: 2 * seconds(kind, payload))
    assert slower.step_s >= window.step_s - 1e-9


def test_many_equal_micro_batches_take_as_long_as_if_each_were_replayed() -> None:
    plan, spans = plan_of("fsdp", accumulation=40), micro_batch(*SHARDED)

    def of(accumulation: int) -> float:
        batch = dataclasses.replace(plan.batch, accumulation=accumulation)
        return step_s(dataclasses.replace(plan, batch=batch), Sync.every, spans, spans)

    assert of(40) == pytest.approx(of(6) + 34 * (of(6) - of(5)))
