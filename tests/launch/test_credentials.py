"""Credentials: whether the job will have them is known at submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.hydra import compose
from launcher.errors import SiteError
from launcher.launch.credentials import job_environment, require_credentials

NONE = "cluster.sbatch.export=NONE"


def export(value: str) -> str:
    return f"cluster.sbatch.export='{value}'"


def setup(*lines: str) -> str:
    return f"cluster.setup=[{','.join(repr(line) for line in lines)}]"


@pytest.mark.parametrize(
    ("key", "overrides", "allowed"),
    [
        (False, [], False),
        (True, [], True),
        (True, [NONE], False),
        (True, [export("A,B")], False),
        (True, [export("A,WANDB_API_KEY")], True),
        (True, [export("ALL,A=1")], True),
        (True, [export("all,A=1")], True),
        (False, [export("ALL,A=1")], False),
        (False, [export("WANDB_API_KEY=0123")], True),
        (False, [setup("module load x && export A=1 WANDB_API_KEY=$(cat ~/.key)")], True),
        (True, [NONE, setup("export WANDB_API_KEY")], True),
        (True, [NONE, setup("export WANDB_API_KEY='0123'")], True),
        (True, [NONE, setup("echo WANDB_API_KEY", "export MY_WANDB_API_KEY=1")], False),
        (False, [setup("# export WANDB_API_KEY=0123", "x=1 # export WANDB_API_KEY")], False),
        (False, [setup("echo 'a # b'; export WANDB_API_KEY=0123  # mine")], True),
        (True, [setup("unset A WANDB_API_KEY")], False),
        (True, [setup("export -n WANDB_API_KEY")], False),
        (False, [setup("cd /x; source keys.sh")], True),
        (False, [setup(". ./keys.sh")], True),
        (False, [setup("./keys.sh")], False),
    ],
)
def test_the_key_of_wandb_is_looked_for_in_the_jobs_environment(
    key: bool, overrides: list[str], allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = compose(["cluster=slurm", "wandb.mode=online", *overrides])
    if allowed:
        require_credentials(config)
        return
    with pytest.raises(SiteError, match="neither in WANDB_API_KEY") as caught:
        require_credentials(config)
    assert ("cluster.sbatch.export restricts" in str(caught.value)) == (
        "export" in config.cluster.sbatch and "ALL" not in config.cluster.sbatch["export"]
    )
    # the file in the home directory is there in the job, too
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123\n")
    require_credentials(config)


def test_other_jobs_have_the_environment_of_the_shell() -> None:
    assert job_environment(compose([]).cluster, {"A": "1"}) == {"A": "1"}
    assert job_environment(compose(["cluster=slurm", NONE]).cluster, {"A": "1", "HOME": "/me"}) == {"HOME": "/me"}
