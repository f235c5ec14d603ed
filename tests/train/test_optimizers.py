"""Optimizers by their path: groups, several at once, mistakes, and equality with what is written by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from launcher.config.hydra import compose
from launcher.config.schema import Device
from launcher.errors import EngineMisuse, UserError
from launcher.plan.optimizer_plan import solve_optimizer
from launcher.train.optimizers import CombinedOptimizer, as_one, build_optimizer
from tests.helpers import torchrun


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def built(*overrides: str) -> torch.optim.Optimizer:
    return build_optimizer(model(), solve_optimizer(compose(overrides).optimizer, 64), Device.cpu)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategies"), [(2, ["ddp", "fsdp"]), (4, ["hsdp/strategy.shard_size=2"])])
def test_groups_and_several_optimizers_are_those_written_by_hand(
    world: int, strategies: list[str], tmp_path: Path
) -> None:
    cases = [f"strategy={strategy}" for strategy in strategies]
    out = torchrun(Path(__file__).parent / "optimizers_worker.py", cases, world, tmp_path).splitlines()
    seen = [json.loads(line) for line in out if line.startswith("{")]
    assert [each["case"] for each in seen] == cases
    for each in seen:
        assert each["worst"] < 1e-5, each
        assert each["groups"] == 4, "the group of no parameter but those of others is left out"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_gpu_steps_with_one_kernel_unless_torch_has_none(kind: str) -> None:
    plan = solve_optimizer(compose([f"optimizer={kind}", "optimizer.lr=0.1"]).optimizer, 64)
    torch.manual_seed(0)
    networks = [model(), model()]
    networks[1].load_state_dict(networks[0].state_dict())
    optimizers = [build_optimizer(networks[0], plan, Device.cpu), build_optimizer(networks[1], plan, Device.cuda)]
    assert optimizers[1].defaults["fused"] is True
    for network, optimizer in zip(networks, optimizers, strict=True):
        network(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    for one, other in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(one, other)
    complex_values = nn.Module()
    complex_values.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    if kind == "sgd":
        assert build_optimizer(complex_values, plan, Device.cuda).defaults["fused"] is None


def test_a_class_gets_its_arguments() -> None:
    made = built("optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1", "optimizer.alpha=0.5")
    assert type(made) is torch.optim.RMSprop
    assert (made.param_groups[0]["lr"], made.param_groups[0]["alpha"]) == (0.1, 0.5)
    made = built("optimizer._target_=torch.optim.Adam", "optimizer.lr=0.1", "optimizer.betas=[0.5,0.6]")
    assert made.param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["torch.optim.RMSprop", "optimizer.alfa=1"], "optimizer.alfa=1: torch.optim.RMSprop has no such argument"),
        (["torch.optim.RMSprop", "optimizer.alfa=1"], "did you mean 'optimizer.alpha'"),
        (["torch.optim.RMSprop", "optimizer.alpha=x"], "optimizer.alpha=x: torch.optim.RMSprop takes float here"),
        (["torch.optim.RMSprop", "optimizer.centered=1"], "optimizer.centered=1: torch.optim.RMSprop takes bool here"),
        (["torch.optim.Adam", "optimizer.betas=[0.5]"], "optimizer.betas=[0.5]: torch.optim.Adam takes"),
        (["torch.optim.Adam", "optimizer.eps=-1"], "optimizer._target_=torch.optim.Adam: ValueError: Invalid epsilon"),
        (["torch.optim.LBFGS"], "needs a closure"),
        (["torch.optim.LBFGS", "optimizer.groups=[{match: bias, weight_decay: 0}]"], "LBFGS: needs a closure"),
        (["torch.optim.SparseAdam"], "optimizer._target_=torch.optim.SparseAdam: takes sparse gradients only"),
        (["torch.optim.Muon"], "updates matrices only, and these parameters of the group are none: 0.bias, 1.weight, "),
        (["torch.optim.SGD", "optimizer.groups=[{match: '^[12]', _target_: torch.optim.Muon, lr: 0.1}]"],
         'optimizer.groups[0]._target_=torch.optim.Muon: updates matrices only, and these parameters of the group are '
         'none: 1.weight, 1.bias, 2.bias.\n  Put a group that takes them before it in optimizer.groups, such as '
         '{match: "ndim<2"}.'),
        (["torch.nn.Linear", "optimizer.out_features=3"], "optimizer"),
        (["torch.optim.RMSprop", "optimizer.groups=[{match: bias, alhpa: 0.1}]"], "optimizer.groups[0].alhpa=0.1: "),
        (["torch.optim.RMSprop", "optimizer.groups=[{match: bias, alpha: x}]"], "optimizer.groups[0].alpha=x: "),
        (["torch.optim.Nothing"], "has no 'Nothing'"),
        (["nowhere.Nothing"], "optimizer._target_=nowhere.Nothing: no module 'nowhere'"),
    ],
)  # fmt: skip
def test_a_mistake_names_key_and_value(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        built(f"optimizer._target_={overrides[0]}", "optimizer.lr=0.1", *overrides[1:])
    assert words in str(raised.value)


def test_several_optimizers_are_saved_and_restored_as_one() -> None:
    def pair(seed: int) -> tuple[nn.Module, CombinedOptimizer]:
        torch.manual_seed(seed)
        network = model()
        first, second = list(network[0].parameters()), [*network[1].parameters(), *network[2].parameters()]
        return network, CombinedOptimizer([AdamW(first, 0.1), SGD(second, 0.2, momentum=0.9)])

    def steps(network: nn.Module, optimizer: CombinedOptimizer, count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            network(torch.full((2, 3), 1.0 + number)).square().sum().backward()
            optimizer.step()

    one, combined = pair(0)
    steps(one, combined, 3)
    other, restored = pair(1)
    other.load_state_dict(one.state_dict())
    restored.load_state_dict(copy.deepcopy(combined.state_dict()))
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.2]
    restored.param_groups[1]["lr"] = combined.param_groups[1]["lr"] = 0.01
    assert restored.optimizers[1].param_groups[0]["lr"] == 0.01, "groups are shared"
    for network, optimizer in ((one, combined), (other, restored)):
        steps(network, optimizer, 2)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "a NoneType, not a torch optimizer"),
        ([], "is empty"),
        ([torch.optim.LBFGS([torch.zeros(1)])], "needs a closure"),
    ],
)
def test_what_is_no_optimizer(wrong: Any, words: str) -> None:
    with pytest.raises(EngineMisuse, match=words):
        as_one(wrong)
