"""Strategy solver: the policy that is chosen, and the bytes that are predicted for it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.hydra import compose
from launcher.config.schema import Device, StrategyKind, Sync
from launcher.errors import ConfigError
from launcher.plan import strategy
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import TaskPlan
from launcher.plan.solve import solve
from launcher.plan.sync_policy import POLICIES, Collective, Layout
from tests.helpers import make_plan

CLUSTER = make_plan().cluster


def test_auto_takes_the_fewest_bytes_that_the_strategy_has() -> None:
    assert make_plan("strategy=fsdp").strategy.sync is Sync.gather_once
    hsdp = make_plan("strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2").strategy
    assert hsdp.sync is Sync.gather_once
    assert [forecast.sync for forecast in hsdp.forecasts] == list(POLICIES[StrategyKind.hsdp])


def test_predicted_bytes_of_each_policy() -> None:
    """1000 parameters, 800 in units, gathered as bf16, summed as fp32; 2 shards x 2 replicas, 4 micro-batches."""
    solved = make_plan(
        "strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2", "batch.micro_size=4",
        "batch.accumulation=4", "precision=bf16",
    ).strategy  # fmt: skip
    gather, scatter, reduce = 2 * 800 * 2 + 2 * 200, 4000, 2000
    expected = {
        Sync.every: 4 * (gather + scatter + reduce),
        Sync.boundary: 4 * gather + scatter + reduce,
        Sync.gather_once: 2000 + scatter + reduce,
        Sync.replicas_at_boundary: 4 * (gather + scatter) + reduce,
    }
    assert {forecast.sync: forecast.payload_bytes for forecast in solved.forecasts} == expected
    # half of what is gathered and scattered by two, and all of what two reduce
    assert solved.wire_bytes == (2000 + scatter) // 2 + reduce


def test_only_matrix_products_are_predicted_to_be_gathered_narrow() -> None:
    task = TaskPlan(
        target="some.Task", params={}, samples=1000, parameters=1000, gradient_bytes=4000, unit_parameters=800,
        matmul_parameters=750, unit_matmul_parameters=700,
    )  # fmt: skip
    run = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")
    overrides = ["strategy=fsdp", "strategy.sync=gather_once", "precision=bf16"]
    plan = solve(compose(overrides), Site(gpus=0, cores=2, cwd="/nowhere"), task, run)
    assert plan.strategy.payload_bytes == 2 * 750 + 4 * 250 + 4000


@pytest.mark.parametrize(
    ("width", "narrow", "formats", "gathered"),
    [
        (2, 1000, "keep", 2 * 1000),
        (2, 1000, "fp32", 2 * 750 + 4 * 250),
        (8, 0, "keep", 8 * 1000),
        (8, 0, "fp32", 8 * 1000),  # fp64 is never converted
    ],
)
def test_parameters_are_predicted_to_be_gathered_in_their_own_format(
    width: int, narrow: int, formats: str, gathered: int
) -> None:
    """Gradients are summed in fp32 in any case."""
    task = TaskPlan(
        target="some.Task", params={}, samples=1000, parameters=1000, gradient_bytes=width * 1000, unit_parameters=800,
        matmul_parameters=750, unit_matmul_parameters=700, narrow_parameters=narrow,
    )  # fmt: skip
    run = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")
    overrides = ["strategy=fsdp", "strategy.sync=gather_once", "precision=bf16", f"precision.parameters={formats}"]
    plan = solve(compose(overrides), Site(gpus=0, cores=2, cwd="/nowhere"), task, run)
    assert plan.strategy.payload_bytes == gathered + 4000


def test_time_on_the_link_is_predicted_where_its_rate_is_said() -> None:
    hosts = ["cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=a:1", "cluster.link_gbit=0.008", "precision=fp32"]
    ddp = make_plan(*hosts, "cluster.workers_per_node=1", "batch.accumulation=4").strategy
    assert [forecast.wire_s for forecast in ddp.forecasts] == [4 * 4000 / 1e6, 4000 / 1e6]
    # two rings of two replicas each, with half of the gradients
    hsdp = make_plan(*hosts, "strategy=hsdp", "cluster.workers_per_node=2", "batch.accumulation=4").strategy
    by_policy = {forecast.sync: forecast.wire_s for forecast in hsdp.forecasts}
    assert by_policy[Sync.every] == 4 * 2 * 2000 / 1e6
    assert by_policy[Sync.replicas_at_boundary] == by_policy[Sync.gather_once] == 2 * 2000 / 1e6


def test_a_link_is_between_hosts() -> None:
    forecasts = make_plan("cluster=elsewhere", "cluster.link_gbit=100").strategy.forecasts
    assert [forecast.wire_s for forecast in forecasts] == [None] * 2
    with pytest.raises(ConfigError) as caught:
        make_plan("cluster.link_gbit=100")
    assert str(caught.value) == (
        "cluster.link_gbit=100.0: has no effect with cluster=local, which is one host: nothing is sent on a link.\n"
        "  It belongs to cluster=hosts or cluster=slurm or cluster=elsewhere."
    )


@pytest.mark.parametrize(
    ("shape", "payload_of_link"),
    [
        # 2 hosts x 4 workers in groups of 2: a ring between the 4 replicas for each half of the gradients
        ("strategy=hsdp cluster.nodes=2 cluster.workers_per_node=4 strategy.shard_size=2", 2 * 1.5 * 2000),
        # 4 hosts x 1 worker in groups of 2: one ring of 2 replicas a host, and half of what the group gathers and sums
        ("strategy=hsdp cluster.nodes=4 cluster.workers_per_node=1 strategy.shard_size=2", 2000 + (4000 + 4000) / 2),
        # 2 hosts x 2 workers: each of the two sends its quarter to the two ranks of the other host
        ("strategy=fsdp cluster.nodes=2 cluster.workers_per_node=2", 2 * 2 / 4 * (4000 + 4000)),
    ],
)
def test_bytes_on_a_hosts_link(shape: str, payload_of_link: float) -> None:
    options = ["cluster=hosts", "cluster.rendezvous=a:1", "cluster.link_gbit=0.008", "precision=fp32"]
    forecasts = make_plan(*options, *shape.split()).strategy.forecasts
    once = next(forecast for forecast in forecasts if forecast.sync is Sync.gather_once)
    assert once.wire_s == pytest.approx(payload_of_link / 1e6)


def test_auto_sync_keeps_away_from_what_is_not_safe() -> None:
    solved = make_plan("strategy.find_unused_parameters=true").strategy
    assert solved.sync is Sync.every
    assert "find_unused_parameters" in solved.sync_reason


@given(data=st.data(), nodes=st.integers(1, 5), workers=st.integers(1, 8), device=st.sampled_from(Device))
def test_bytes_on_the_busiest_link_are_those_of_all_messages(
    data: st.DataObject, nodes: int, workers: int, device: Device
) -> None:
    world = nodes * workers
    size = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    replicas, ranks = world // size, range(world)
    payload = {Collective.all_reduce: 840 * replicas, Collective.all_gather: 840 * size, Collective.reduce_scatter: 0}
    sent = dict.fromkeys(range(nodes), 0.0)

    def send(rank: int, peer: int, count: float) -> None:
        if rank // workers != peer // workers:
            sent[rank // workers] += count

    for rank in ranks:
        send(rank, (rank + size) % world, 2 * (replicas - 1) * 840)
        group = [peer for peer in ranks if peer // size == rank // size]
        if device is Device.cpu:
            for peer in group:
                send(rank, peer, 840)
        else:
            send(rank, group[(rank + 1) % size], (size - 1) * 840)
    layout = Layout(shard_size=size, replicas=replicas, unit_bytes=0, root_bytes=0, gradient_bytes=0)
    cluster = dataclasses.replace(CLUSTER, nodes=nodes, workers_per_node=workers, device=device)
    assert strategy._link_bytes(payload, layout, cluster) == max(sent.values())
