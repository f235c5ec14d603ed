"""The doctor's checks of a job in Slurm: the nodes that it asks for, and those of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import ClusterConfig, Config
from launcher.extensions.doctor import slurm_checks
from launcher.extensions.doctor.check import CheckState, exit_status
from launcher.extensions.doctor.examination import judge_hosts
from launcher.extensions.doctor.slurm_checks import probe_options
from launcher.launch.slurm import client, submit
from tests.extensions.doctor.test_host_checks import facts, two
from tests.helpers import make_plan
from tests.plan.test_container import planned


def test_the_doctor_looks_at_as_many_nodes_as_the_job_needs_to_begin() -> None:
    assert probe_options(compose(["cluster=slurm", "cluster.nodes=2:4"]).cluster, None).nodes == 2


def test_the_doctor_warns_if_this_host_has_no_pyxis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "settings", lambda: {"ProctrackType": "proctrack/cgroup"})
    for options, state in (
        ("  --comment=name   arbitrary comment", CheckState.warning),
        ("  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH", CheckState.ok),
    ):
        monkeypatch.setattr(client, "ask", lambda *_, text=options: text)
        submit.require_container(planned())  # the nodes may have it
        assert [check.state for check in slurm_checks.container(planned())] == [state]


def test_signals_to_all_processes_would_end_the_mount_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.sif").touch()
    plan = make_plan("cluster=slurm", f"cluster.container={tmp_path}/own.sif")
    for tracking, state in (("proctrack/cgroup", CheckState.ok), ("proctrack/linuxproc", CheckState.warning)):
        monkeypatch.setattr(client, "settings", lambda kind=tracking: {"ProctrackType": kind})
        assert [check.state for check in slurm_checks.container(plan)] == [state]
    assert slurm_checks.container(make_plan("cluster=slurm")) == []


def test_the_doctor_compares_images_with_each_other_only() -> None:
    inside = {"of": {"python": "3.12.3", "package_dir": "/opt/launcher"}}
    config = Config(cluster=ClusterConfig(container="launcher:1"))
    assert exit_status(judge_hosts(config, make_plan(), facts(), two(inside, inside), "")) == 0
    assert exit_status(judge_hosts(config, make_plan(), facts(), two(inside, {}), "")) == 1
    assert exit_status(judge_hosts(Config(), make_plan(), facts(), two(inside, inside), "")) == 1
