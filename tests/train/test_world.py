"""World of a rank: torchrun's, or that of a process alone."""

from __future__ import annotations

import pytest

from launcher.errors import SiteError
from launcher.train.world import World

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_process_without_torchrun_is_alone() -> None:
    assert World.from_env(TORCHRUN) == World(rank=1, size=4, local_rank=1, local_size=2)
    assert World.from_env({"SLURM_STEP_NUM_TASKS": "1"}) == World(rank=0, size=1, local_rank=0)
    with pytest.raises(SiteError, match="WORLD_SIZE is not set"):
        World.from_env({"RANK": "0"})


@pytest.mark.parametrize("name", ["SLURM_PROCID SLURM_STEP_NUM_TASKS", "PMI_RANK PMI_SIZE"])
def test_one_of_several_processes_does_not_train_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = dict(zip(name.split(), ("1", "2"), strict=True))
    monkeypatch.setattr("os.isatty", lambda _: False)
    with pytest.raises(SiteError, match=r"has started 2 copies of this process, and each would train alone"):
        World.from_env(others)
    assert World.from_env({**TORCHRUN, **others}).size == 4


def test_the_shell_of_a_step_runs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert World.from_env({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}).size == 1
