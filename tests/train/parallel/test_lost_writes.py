"""Parameters that are written outside of the optimizer step: the write survives, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.parallel.lost_writes import LostWrites
from tests.helpers import torchrun
from tests.train.parallel.lost_writes_models import follow, normalise, plain, replace, train, writing

FSDP = "strategy=fsdp"


def clamp(limit: float, *, first: int = 0, through_data: bool = False) -> Callable[[Any, int], None]:
    """Return a function that clamps a weight from its call ``first`` on."""

    def write(model: Any, call: int) -> None:
        weight = model.out.weight.data if through_data else model.out.weight
        if call >= first:
            weight.clamp_(-limit, limit)

    return write


LOST: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "normalised": (normalise, "out.weight"),
    "clamped": (clamp(0.01), "out.weight"),
    "through data": (clamp(0.01, through_data=True), "out.weight"),
    "replaced without an effect": (replace, "out.weight"),
    "late": (clamp(0.01, first=21), "out.weight"),  # in a window whose values are not compared
    "in the last window": (clamp(0.01, first=39, through_data=True), "out.weight"),
    "frozen": (lambda model, _: model.frozen.mul_(0.9), "frozen"),
}


def test_the_host_waits_once_for_all_parameters_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    writes, waits = LostWrites([], torch.nn.Linear(1, 1), StrategyKind.fsdp), list[int]()
    differs = torch.Tensor.__bool__
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda flag: waits.append(1) or differs(flag))
    writes._found = [(str(number), torch.tensor(False)) for number in range(20)]
    assert writes.contribution() == [0.0]
    del waits[:]
    writes._found += [("after", torch.tensor(False))] * 20
    writes.receive([0.0])
    assert len(waits) == 1
    writes._found = [("written", torch.tensor(True))]
    with pytest.raises(TaskError, match="written"):
        writes.receive([float(sum(writes.contribution()))])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", LOST)
def test_a_write_that_is_lost_is_refused(case: str) -> None:
    write, name = LOST[case]
    with pytest.raises(TaskError, match=rf"^{name}: written by the forward pass, .* strategy=fsdp would lose") as error:
        train(writing(write), 10, FSDP)
    assert "on_step" in str(error.value)
    assert "strategy=ddp" in str(error.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [(), ("strategy.sync=gather_once",), ("precision=bf16",)])
def test_the_embedding_that_scales_its_rows_is_named(options: tuple[str, ...]) -> None:
    with pytest.raises(TaskError, match=r"^emb\.weight: written by .* \(emb\.weight: max_norm=1\), which"):
        train(plain, 2, FSDP, *options, max_norm=1.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("write", [follow, clamp(100.0), clamp(100.0, first=17), clamp(100.0, through_data=True)])
@pytest.mark.parametrize("options", [(), ("precision=bf16",), ("strategy.recompute=blocks",)])
def test_a_write_that_survives_or_changes_nothing_is_right(
    write: Callable[[Any, int], Any], options: tuple[str, ...]
) -> None:
    precision = [option for option in options if "precision" in option]
    sharded, whole = (train(writing(write), 10, *more) for more in ((FSDP, *options), ("strategy=single", *precision)))
    for found, wanted in zip(sharded.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(found.full_tensor(), wanted, atol=1e-6 if not precision else 1e-2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("first", [0, 2])
def test_the_data_of_a_shard_cannot_be_replaced(first: int) -> None:
    calls = iter(range(100))

    def on_step(model: Any) -> None:
        if next(calls) >= first:
            replace(model, 0)

    with pytest.raises(TaskError, match=r"^out\.weight: its data was replaced .*\n  Write it in place"):
        train(plain, 3, FSDP, on_step=on_step)


ON_SHARDS = {
    "row": "A part of blocks.0.0.weight was written in place",
    "gradient": "A part of the gradient of emb.weight was written in place",
    "number": "A number of a sharded tensor was read",
}


@pytest.mark.slow
def test_ranks_agree_on_what_they_refuse(tmp_path: Path) -> None:
    """Only ranks that hold samples of a row scale it, and only one rank has its shard."""
    lines = torchrun(Path(__file__).parent / "lost_writes_worker.py", ["4"], 4, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    for name, (told, size) in seen.items():
        case, _, strategy = name.partition(" ")
        if case in ON_SHARDS and strategy != "strategy=ddp":
            assert all(f": {ON_SHARDS[case]}" in each for each in told), (name, told)
            assert all("full_tensor()" in each for each in told), told
        elif case != "samples":
            assert told == [""] * 4, name
            assert size == pytest.approx(seen[f"{case} strategy=ddp"][1], rel=1e-6), name
        elif strategy == "strategy=ddp":
            assert all("ReplicasDiffer" in each and "emb.weight: max_norm=1)" in each for each in told), told
            assert all("on_step" in each for each in told), told
        else:
            assert all(each.startswith("TaskError: emb.weight: written by") for each in told), (name, told)
