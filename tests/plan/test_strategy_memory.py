"""Lower bound of a rank's memory: for tasks that cannot be traced."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.plan.strategy import least_note
from tests.helpers import make_plan


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["strategy=ddp"], "16.00 kB for parameters, gradients and the state of AdamW"),
        (["strategy=fsdp"], "8.00 kB"),  # over two ranks
        (["strategy=ddp", "optimizer=sgd"], "8.00 kB for parameters and gradients"),
        (["strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2"], "8.00 kB"),
        (["optimizer.groups=[{match: w, _target_: torch.optim.SGD, lr: 0.1}]"], "8.00 kB for parameters and gradients"),
        (["strategy=ddp", "precision.parameters=keep"], "12.80 kB"),  # 400 of the 1,000 in bf16
    ],
)
def test_the_share_of_a_rank(overrides: list[str], needed: str) -> None:
    plan = make_plan(*overrides)
    task = dataclasses.replace(plan.task, gradient_bytes=3200, narrow_parameters=400)
    plan = dataclasses.replace(plan, task=task)
    assert f"A rank needs at least {needed}" in least_note(plan, None)


def test_what_a_rank_has_is_named_if_it_is_less() -> None:
    plan = make_plan("strategy=ddp")
    assert least_note(plan, 10_000).endswith("; it has 10.00 kB.")
    assert "it has" not in least_note(plan, 16_000)


def test_without_parameters_nothing_is_said() -> None:
    plan = make_plan("strategy=ddp")
    unknown = dataclasses.replace(plan, task=dataclasses.replace(plan.task, parameters=None, gradient_bytes=None))
    assert not least_note(unknown, 1)
