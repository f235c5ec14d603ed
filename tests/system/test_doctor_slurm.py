"""`launch doctor cluster=slurm` on a real cluster: what the nodes say of themselves and of each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch_command

slurm = pytest.importorskip("tests.system.slurm", reason="the cluster's fixture")
pytestmark = [pytest.mark.slow, slurm.needs_slurm] if hasattr(slurm, "needs_slurm") else [pytest.mark.slow]


def doctor(login: Any, place: Path, *arguments: str, status: int) -> tuple[dict[str, dict[str, Any]], str]:
    """The checks by name, and what it said meanwhile; neither job nor directory is left."""
    command = launch_command("doctor", "--json", "cluster=slurm", *arguments)
    done = login.login(*command, cwd=place, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert list(place.iterdir()) == []
    assert login.login("squeue", "--noheader", cwd=place).stdout == ""
    return {check["name"]: check for check in json.loads(done.stdout)}, done.stderr


def test_the_nodes_are_looked_at(tmp_path: Path) -> None:
    place = tmp_path / "user"
    place.mkdir()
    with slurm.cluster(nodes=2) as there:
        checks, said = doctor(there, place, "cluster.nodes=2", "cluster.time=01:00:00", status=0)
        assert "is running on node" in said
        assert "failure" not in {check["state"] for check in checks.values()}
        assert "read here, and the other way round" in checks["run directory"]["found"]
        assert "the same everywhere" in checks["working directory"]["found"]
        assert "all 2 ways" in checks["connections"]["found"]
        assert checks["interface"]["found"].count("eth0") == 2
        assert "Gbit/s of 2 nodes (gloo" in checks["all-reduce"]["found"]
        assert {"partition", "preemption", "time limit", "requeue", "accounting", "clocks"} <= checks.keys()

        wrong, _ = doctor(there, place, "cluster.nodes=2", "cluster.interface=eth9", status=1)
        assert "eth9: is no interface of this host" in wrong["probe"]["found"] + str(wrong)

        refused = there.login(
            *launch_command("doctor", "cluster=slurm", "cluster.partition=nosuch"), cwd=place, check=False
        )
        assert refused.returncode == 2
        assert "Slurm has no such partition" in refused.stderr
    shutil.rmtree(place)
