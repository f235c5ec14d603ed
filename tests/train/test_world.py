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


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_of_several_processes_does_not_train_alone(name: str) -> None:
    with pytest.raises(SiteError, match=rf"{name}=2: this process is one of several"):
        World.from_env({name: "2"})
    assert World.from_env({**TORCHRUN, name: "2"}).size == 4
