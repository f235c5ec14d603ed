"""A range of hosts: what it may say, and that nothing but the sharing out of a window depends on how many there are."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.hydra import compose, compose_with_yaml, recompose
from launcher.config.schema import BatchConfig, OnOom
from launcher.errors import ConfigError, SiteError, UserError
from launcher.plan.host import Site
from launcher.plan.launch_plan import LaunchPlan, node_range
from launcher.plan.placement import solve_script
from launcher.plan.run_plan import RunPlan
from launcher.plan.solve import solve
from launcher.plan.windows import share_of_window
from launcher.report import tables
from tests.helpers import make_plan

BASE = make_plan()
SCALED = compose(["cluster=slurm", "optimizer.lr_scaling=sqrt", "optimizer.reference_batch=64"])
ELASTIC = ("cluster=slurm", "cluster.nodes=2:4", "cluster.workers_per_node=1")


@pytest.mark.parametrize("typed", ["2:4", "'2:4'", '"2:4"'])
def test_a_range_is_typed_as_it_is_read(typed: str) -> None:
    config, yaml = compose_with_yaml(["cluster=slurm", f"cluster.nodes={typed}"])
    assert node_range(config.cluster.nodes) == (2, 4)
    assert "nodes: '2:4'" in yaml, "without quotes YAML reads it as 2 * 60 + 4"
    assert compose(["cluster=slurm", "cluster.nodes=3"]).cluster.nodes == 3
    assert node_range("3") == node_range("3:3") == (3, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.nodes=4:2"], "the minimum 4 is above the maximum 2.\n  Write cluster.nodes=2:4."),
        (["cluster.nodes=0:2"], "cluster.nodes=0:2: must be at least 1"),
        (["cluster.nodes=0"], "cluster.nodes=0: must be at least 1"),
        (["cluster.nodes=2-4"], "cluster.nodes=2-4: is not a number of hosts.\n  Write a number, or MIN:MAX such as"),
        (["cluster.nodes=2.5"], "cluster.nodes: must be a whole number, not '2.5'"),
        (["cluster=local", "cluster.nodes=1:2"], "cluster.nodes=1:2: cluster=local is one machine"),
        (["cluster.nodes=1:3", "strategy=hsdp"], "cluster.nodes=1:3: not possible on 1 host: strategy=hsdp: 2 ranks"),
        (["cluster.nodes=1:2", "strategy=single"], "trains on one rank"),
        (["cluster=hosts", "cluster.nodes=1:1"], "cluster.nodes=1:1: cluster=hosts is a job over several machines"),
        (
            ["cluster.nodes=2:4", "batch.micro_size=4", "batch.accumulation=3", "batch.global_size=7"],
            "is 96, and must be 7",
        ),
    ],
)
def test_what_no_range_can_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan("cluster=slurm", *overrides)
    assert message in str(caught.value)


@settings(max_examples=50)
@given(
    total=st.integers(1, 300), micro=st.none() | st.integers(1, 8), workers=st.integers(1, 4), least=st.integers(1, 3),
    more=st.integers(1, 3),
)  # fmt: skip
def test_only_the_sharing_out_differs(total: int, micro: int | None, workers: int, least: int, more: int) -> None:
    """In every world a window's samples are each some rank's, in micro-batches that are no larger than in the others;
    all else is the same, the learning rate, the schedule and the run among it."""
    cluster = dataclasses.replace(SCALED.cluster, nodes=f"{least}:{least + more}", workers_per_node=workers)
    config = dataclasses.replace(SCALED, batch=BatchConfig(global_size=total, micro_size=micro), cluster=cluster)
    plan = solve(config, Site(gpus=0, cores=2, cwd="/"), BASE.task, BASE.run)
    worlds = plan.worlds()
    assert [world.cluster.nodes for world in worlds] == list(range(least + more, least - 1, -1))
    for world in worlds:
        batch = world.batch
        assert (batch.global_size, batch.micro_size) == (total, plan.batch.micro_size)
        assert batch.world_size == world.cluster.nodes * workers
        shares = [share for rank in range(batch.world_size) for share in share_of_window(total, batch, rank)]
        assert sorted(sample for share in shares for sample in share) == list(range(total))
        assert max(map(len, shares)) <= batch.micro_size
        assert len(shares) == batch.accumulation * batch.world_size
        same = dataclasses.replace(
            world, cluster=plan.cluster, batch=plan.batch, strategy=plan.strategy, notes=plan.notes, fewer=plan.fewer
        )
        assert same == plan


def test_a_world_of_the_range_is_the_job_that_has_just_so_many_hosts() -> None:
    """A smaller world is possible if it needs no unequal shares and derives the same micro-batch."""
    job = ("cluster=slurm", "cluster.workers_per_node=2", "batch.micro_size=2", "batch.global_size=48", "strategy=fsdp")
    elastic = make_plan(*job, "cluster.nodes=1:4")
    for nodes in (1, 2, 3, 4):
        alone = make_plan(*job, f"cluster.nodes={nodes}")
        assert (elastic.on(nodes).batch, elastic.on(nodes).strategy) == (alone.batch, alone.strategy)
        assert (elastic.on(nodes).optimizer, elastic.on(nodes).epoch) == (alone.optimizer, alone.epoch)
    assert elastic.notes == make_plan(*job, "cluster.nodes=4").notes


def test_the_file_holds_the_plans_of_all_worlds() -> None:
    plan = make_plan(*ELASTIC)
    assert RunPlan.from_json(plan.to_json()) == plan
    assert [world.cluster.nodes for world in plan.worlds()] == [4, 3, 2]
    assert plan.on(3).on(2) == plan.on(2)
    assert RunPlan.from_json(plan.on(3).to_json()) == plan.on(3)
    fixed = make_plan("cluster=slurm", "cluster.nodes=2")
    assert (fixed.worlds(), fixed.fewer) == ([fixed], ())
    for nodes in (1, 5):
        with pytest.raises(UserError, match=f"The job has {nodes} hosts, but was planned for 2 to 4"):
            plan.on(nodes)


def test_what_the_user_is_told() -> None:
    plan = make_plan(*ELASTIC, "batch.accumulation=4", "batch.norm=sync", batch_norms=2)
    assert [world.batch.accumulation for world in plan.worlds()] == [4, 6, 8]
    told = " ".join(plan.notes)
    assert "On 3 hosts the ranks take unequal shares of a window, with the same gradient" in told
    assert "batch.accumulation=4 applies to 4 hosts; on fewer it is higher." in told
    assert "What a BatchNorm normalises by depends on the number of hosts" in told
    assert all(set(plan.notes[-3:]) <= set(world.notes) for world in plan.worlds())
    rows = [[str(cell) for cell in column.cells] for column in tables.plan_table(plan).columns]
    assert "2 to 4 hosts × 1 worker, cpu" in rows[1]
    for words in ("on 4 hosts: 64 samples = 4 ", "on 3 hosts: 64 samples, shared by 4 ", "on 2 hosts: 64 samples = "):
        assert any(str(cell).startswith(words) for cell in rows[1])
    assert not any("unequal" in note for note in make_plan(*ELASTIC, "batch.uneven=true").notes), "as was asked"


def test_a_ramp_and_the_micro_batch_that_memory_has_room_for_in_each_world() -> None:
    ramp = make_plan(*ELASTIC, "batch.ramp=[[10,16]]", "batch.global_size=48", "batch.micro_size=4")
    assert [world.batch.even for world in ramp.worlds()] == [True, False, True]
    worlds = make_plan(*ELASTIC, "batch.micro_size=auto").worlds()
    assert [(world.batch.micro_size, world.batch.on_oom) for world in worlds] == [(16, OnOom.shrink)] * 3


def test_a_script_may_have_a_range_too() -> None:
    config = compose(["cluster=slurm", "cluster.nodes=1:3", "cluster.workers_per_node=2"])
    plan = solve_script(config, Site(gpus=0, cores=2, cwd="/"), make_plan().run, ["train.py"])
    assert [world.cluster.world_size for world in plan.worlds()] == [6, 4, 2]
    assert LaunchPlan.from_json(plan.on(2).to_json()) == plan.on(2)


@dataclasses.dataclass(frozen=True)
class Gone:
    """Config group of a package that is not installed here."""

    every: int = 50


def test_a_group_that_is_not_installed_here_has_no_silent_defaults() -> None:
    plan = make_plan()
    assert plan.extension(Gone).every == 50, "planned without it"
    plan = dataclasses.replace(plan, added={**plan.added, "gone": {"every": 20}})
    with pytest.raises(SiteError, match=r"the plan has gone\.\n +Install its package on every node"):
        plan.extension(Gone)


@pytest.mark.parametrize(("group", "key"), [("precision", "kind"), ("strategy", "compress"), ("batch", "norm")])
def test_a_value_that_is_not_installed_here_is_named(group: str, key: str) -> None:
    fields = json.loads(make_plan().to_json())
    fields[group][key] = "gone"
    with pytest.raises(SiteError, match=r"'gone' is not a valid .*\n +Install the package"):
        RunPlan.from_json(json.dumps(fields))


def test_a_run_resumes_without_a_group_that_it_does_not_use() -> None:
    config, yaml = compose_with_yaml()
    unused = "gone:\n  kind: none\n  every: 50\nempty:\n  place: null\n"
    assert recompose(unused + yaml, []) == (config, yaml)
    for used in ("gone:\n  kind: some\n", "gone:\n  every: 50\n"):
        with pytest.raises(SiteError, match=r"gone: the run's config has .*\n +Install the package"):
            recompose(used + yaml, [])
