"""The cache that other tests compose their configs from gives the configs and errors that Hydra gives."""

from __future__ import annotations

import hydra
import pytest

from launcher.config.hydra import compose_with_yaml
from launcher.errors import ConfigError
from tests.infra import composition

CASES = (
    (),
    ("strategy=fsdp", "precision=fp32", "batch.global_size=48", "train.steps=null", "run.calibrate_s=0.5"),
    ("precision=fp32", "train.steps=3", "strategy=fsdp", "train.steps=4"),
    ("strategy=hsdp", "strategy.shard_size=2", "batch.ramp=[[2,8],[1,16]]", "task.new=3", "task.width=64"),
    ("strategy=fsdp", "strategy=ddp"),
    ("cluster=slurm", "cluster.sbatch.comment='a, b'", "run.name=some name", "+task.more={a: 1}"),
)
REFUSED = tuple(
    (word,)
    for word in ("train.stepz=3", "train.steps=x", "strategy=none", "train.steps=1,2", "train.steps=[", "strategy.x=1")
)


def outcome(*overrides: str) -> object:
    try:
        return compose_with_yaml(overrides)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("overrides", [*CASES, *REFUSED], ids=" ".join)
def test_the_same_config_or_error(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = outcome(*overrides)
    assert isinstance(wanted, str) == (overrides in REFUSED)
    monkeypatch.setattr(hydra, "compose", composition.compose)
    assert outcome(*overrides) == outcome(*overrides) == wanted
