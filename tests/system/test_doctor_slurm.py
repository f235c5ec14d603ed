"""`launch doctor cluster=slurm` on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch_command
from tests.infra.slurm import Cluster, cluster, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_slurm]


def doctor(there: Cluster, place: Path, *arguments: str, status: int) -> tuple[list[dict[str, Any]], str]:
    """Return the checks and the progress messages. Neither job nor directory may be left behind."""
    command = launch_command("doctor", "--json", "cluster=slurm", *arguments)
    done = there.login(*command, cwd=place, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert list(place.iterdir()) == []
    assert there.login("squeue", "--noheader", cwd=place, check=True).stdout == ""
    return json.loads(done.stdout), done.stderr


def test_the_nodes_are_checked(tmp_path: Path) -> None:
    with cluster(nodes=2) as there:
        found, progress = doctor(there, tmp_path, "cluster.nodes=2", "cluster.time=01:00:00", status=0)
        assert "is running on node" in progress
        checks = {check["name"]: check["found"] for check in found}
        assert "read here, and the other way round" in checks["run directory"]
        assert "the same everywhere" in checks["working directory"]
        assert "all 2 ways" in checks["connections"]
        assert checks["interface"].count("eth0") == 2
        assert "Gbit/s of a host's link" in checks["between hosts"]
        assert {"partition", "preemption", "time limit", "clocks"} <= checks.keys()

        found, _ = doctor(there, tmp_path, "cluster.nodes=2", "cluster.interface=eth9", status=1)
        assert any("cluster.interface=eth9: is not an interface" in check["found"] for check in found)

        command = launch_command("doctor", "cluster=slurm", "cluster.constraint=nosuch")
        refused = there.login(*command, cwd=tmp_path, check=False)
        assert refused.returncode == 2
        assert "cluster.constraint=nosuch: Slurm refuses it" in refused.stderr
        assert list(tmp_path.iterdir()) == []
