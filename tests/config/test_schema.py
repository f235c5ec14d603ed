"""Facts beside each key: complete, and about keys that exist."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from launcher.config.hydra import compose
from launcher.config.key_facts import AFFECTED, PATH, key
from launcher.config.schema import check_values, facts_by_key, known_keys
from launcher.errors import ConfigError
from launcher.plan.run_plan import PLACES, part
from tests.helpers import make_plan


def test_a_key_says_what_it_affects_and_whether_a_resume_may_change_it() -> None:
    known = known_keys()
    assert {name for name in facts_by_key() if not name.endswith(".*")} <= {*known}
    for name, facts in facts_by_key().items():
        assert facts.affects <= {*AFFECTED}
        assert all(condition.partition("=")[0] in known for condition in facts.only.split()), name
    with pytest.raises(TypeError, match="'affects'"):
        key(None)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AssertionError, match="must be said"):
        key(None, affects="learning")


@pytest.mark.parametrize("address", ["s3://bucket/runs", "file:///data/runs", "simplecache::gs://bucket"])
def test_a_path_is_no_address(address: str) -> None:
    paths = [name for name, facts in facts_by_key().items() if facts.bound is PATH]
    assert {"run.dir", "checkpoint.init_from"} < {*paths}
    assert {name for name in facts_by_key() if name.endswith("dir")} < {*paths}
    for name in paths:
        with pytest.raises(ConfigError, match=f"{re.escape(name)}={re.escape(address)}: is an address"):
            check_values(
                compose([f"cluster={'slurm' if name.startswith('cluster') else 'local'}", f"{name}={address}"])
            )


def test_the_plan_has_a_value_for_each_key_that_affects_it() -> None:
    """A key that only determines the values of others, such as batch.uneven, affects nothing itself."""
    scaled = ("optimizer.lr_scaling=linear", "optimizer.reference_batch=32")
    plan = make_plan("outer=diloco", "outer.group=1", "batch.short_window=drop", *scaled)
    for name, facts in facts_by_key().items():
        group = name.partition(".")[0]
        value: object = (
            SimpleNamespace(**{group: SimpleNamespace(**plan.added[group])}) if group in plan.added else plan
        )
        for field in PLACES.get(name, name).split(".") if facts.affects else ():
            value = getattr(value, {"_target_": "target", "*": "arguments"}.get(field, field))
    assert part(plan, "learning")["optimizer.lr"] == 3e-3 != plan.optimizer.lr
    assert part(plan, "time").keys() & {"cluster.nodes", "optimizer.lr", "batch.micro_size"} == {
        "cluster.nodes",
        "batch.micro_size",
    }
