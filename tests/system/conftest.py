"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.hosts import pair, two_hosts  # noqa: F401
from tests.infra.jobs_on_slurm import train_undisturbed
from tests.infra.slurm import Cluster, cluster


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
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))
