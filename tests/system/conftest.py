"""Fixtures of the system tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.system.hosts import Hosts, hosts
from tests.system.jobs_on_slurm import JOB
from tests.system.slurm import Cluster, cluster

PROJECT = Path(__file__).parent.parent / "user_project"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    return tmp_path


@pytest.fixture(scope="module")
def by_cgroup() -> Iterator[Cluster]:
    with cluster(3, proctrack="cgroup", accounting="shim") as there:
        yield there


@pytest.fixture(scope="module")
def by_process_tree() -> Iterator[Cluster]:
    with cluster(3, proctrack="linuxproc") as there:
        yield there


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on this machine, with nothing in its way."""
    place = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(PROJECT / "speech", place / "speech")
    done = launch("train", *JOB, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "runs" / "own"


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as two:
        yield two


@pytest.fixture
def pair(two_hosts: Hosts) -> Iterator[Hosts]:
    """No process of one test meets the next one."""
    yield two_hosts
    two_hosts.end()
