"""Every rank trains one model: the same beginning, buffers and trained parameters, with evaluations or without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config.schema import StrategyKind
from launcher.plan.sync_policy import Layout
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import build_parallel
from launcher.train.engine.modes import start_training
from launcher.train.evaluation import _in_step
from launcher.train.inspection.task_probe import in_eval_mode
from launcher.train.measure.comm_meter import Meter
from launcher.train.parallel import replicas
from launcher.train.parallel.fsdp import Fsdp
from launcher.train.parallel.replicas import Buffers, _form, checksum
from launcher.train.world import World
from tests.helpers import make_plan, torchrun

# pyright: ignore[reportPrivateUsage]

WORKER = Path(__file__).parent / "replicas_worker.py"


def run(ranks: int, place: Path) -> dict[str, Any]:
    lines = torchrun(WORKER, [], ranks, place).splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(2, tmp_path_factory.mktemp("replicas"))


def assert_one_model(starts: dict[str, Any]) -> None:
    """Rank 0's values on every rank, as DDP has them: the first loss and the parameters after some steps agree."""
    assert all(found["alike"] for found in starts.values()), "buffers included"
    for case, found in starts.items():
        if case == "other code":  # rank 0's doubled head
            continue
        precision = case.split()[0]
        wanted = starts[f"{precision} ddp"]
        close = {"rel": 1e-5, "abs": 1e-6} if precision == "fp32" else {"rel": 2e-2, "abs": 1e-2}
        assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=close["rel"]), case
        assert found["values"] == pytest.approx(wanted["values"], **close), case
    assert starts["other code"]["losses"][0] != pytest.approx(starts["fp32 ddp"]["losses"][0], rel=1e-3)


@pytest.mark.slow
def test_ranks_begin_with_rank_0s_model(seen: dict[str, Any]) -> None:
    assert_one_model(seen["starts"])


@pytest.mark.slow
def test_so_do_replicas_of_shard_groups(tmp_path: Path) -> None:
    assert_one_model(run(4, tmp_path)["starts"])


@pytest.mark.slow
def test_another_shape_on_another_rank_is_one_message(seen: dict[str, Any]) -> None:
    message = "TaskError: The model differs between ranks: layer.weight is a trained parameter of shape (1, 6) in "
    assert seen["other shape"].startswith(message)
    assert "on rank 0 and a trained parameter of shape (2, 6)" in seen["other shape"]


@pytest.mark.slow
def test_parameters_that_change_sides_end_the_job(seen: dict[str, Any]) -> None:
    for case, said in seen["thaws"].items():
        how = "unfrozen" if case.split()[1] == "1" else "frozen"
        assert f"the engine was made ({how}: 0.bias)" in said, (case, said)
    assert seen["toggles"] == ""
    assert "registered after the engine was made: body.scale.\n" in seen["late"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluations_do_not_change_training(seen: dict[str, Any], strategy: str) -> None:
    """Buffers that begin to change late, random numbers and modes are those of a run without evaluations."""
    without, often = (seen["evaluations"][f"{strategy} {every}"] for every in (0, 1))
    assert without["error"] == often["error"] == ""
    assert sum("eval/loss" in record for record in often["record"]) == 6
    assert without["values"] == often["values"]


@pytest.mark.slow
def test_a_failing_evaluation_costs_no_step(seen: dict[str, Any]) -> None:
    found = seen["evaluations"]["fails"]
    assert found["error"] == "ArithmeticError: the metric"
    assert found["saved"] == ["step_000006"]
    assert [record["step"] for record in found["first"]][-1] == 6
    assert "eval/loss" not in found["first"][-1]
    assert found["again"] == ""
    assert found["record"][-1]["step"] == 6
    assert found["record"][-1]["eval/loss"] > 0, "the evaluation is made up for"
    assert "train" not in found["log"], "and nothing else"


@pytest.mark.slow
def test_a_broken_evaluation_shows_before_the_first_step(seen: dict[str, Any]) -> None:
    found = seen["evaluations"]["broken"]
    assert found["error"] == "ArithmeticError: the metric"
    assert found["log"] == ["eval"]


@pytest.mark.parametrize(("backends", "sent_from"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_a_script_may_have_started_nccl_alone(monkeypatch: pytest.MonkeyPatch, backends: str, sent_from: str) -> None:
    """Only differing values are sent, from a device that the process group has a backend for."""
    sent: list[tuple[str, int]] = []

    def gather(everyone: list[Any], value: Any, group: Any) -> None:  # noqa: ARG001
        everyone[:] = [value, [value[0], value[1] + 1]]

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("No backend type associated with device type cpu")

    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "all_reduce", refuse)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, _: sent.append((tensor.device.type, tensor.numel())))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(replicas, "checksum", Tensor.numel)  # fake tensors have no values
    with FakeTensorMode():
        replicas.share_values([torch.ones(3), torch.ones(5)], World(1, 2, 0))
    assert sent == [(sent_from, 5 * 4)]


@pytest.fixture
def group_without_cpu() -> Iterator[None]:
    """A process group that refuses tensors of the CPU, as that of a script that has initialised NCCL only."""
    dist.init_process_group("meta:fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_without_cpu")
def test_nothing_is_sent_from_the_cpu_without_a_backend_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, meta = World(0, 2, 0), torch.device("meta")
    monkeypatch.setattr("launcher.train.evaluation.sending_device", lambda: meta)
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="meta tensors"):  # the host reads the result of the all-reduce
        next(_in_step(iter([MicroBatch([1], 1)]), world, 1))

    meter, buffers = Meter(StrategyKind.fsdp, Layout.replicated(8, 2), meta), Buffers(nn.BatchNorm1d(2), world, meta)
    offloaded = object.__new__(Fsdp)
    vars(offloaded).update(_shard_size=2, _device=meta, _shard_group=dist.group.WORLD, meter=meter)
    assert offloaded.total_norm([torch.ones(3)]).device == meta
    buffers._changing = {"running_mean": _form(torch.zeros(2))}
    sent: list[torch.device] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, _: sent.append(tensor.device))
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):  # the values are copied back
        buffers.share(meter)
    assert sent == [meta]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_of_parameters_that_become_fp32(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.train.engine.build.require_same_structure", lambda *_: None)
    plan = make_plan("strategy=single", "precision=fp32")
    plan = dataclasses.replace(plan, task=dataclasses.replace(plan.task, target=""))
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    build_parallel(model, lambda p: torch.optim.SGD(p, 0.1), plan, torch.device("cpu"), None, World(rank, 2, rank))
    assert model.weight.dtype is torch.float32
    assert ("9 trained parameters are converted to fp32" in capsys.readouterr().out) is (rank == 0)


def test_the_plan_names_what_is_kept_in_eval_mode() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.ModuleDict({"a": nn.Tanh()})
    )
    assert in_eval_mode(model) == []
    model[1].eval()
    model[2]["a"].eval()
    task = make_plan().task
    names = tuple(in_eval_mode(model))
    assert names == ("1", "2.a")
    (note,) = [each for each in make_plan(task=dataclasses.replace(task, in_eval_mode=names)).notes if "eval" in each]
    assert "1, 2.a" in note
    assert not [each for each in make_plan(task=task).notes if "eval mode" in each]
    start_training(model)
    assert (*in_eval_mode(model),) == names
    assert in_eval_mode(model.eval()) == [""]
    (note,) = [each for each in make_plan(task=dataclasses.replace(task, in_eval_mode=("",))).notes if "eval" in each]
    assert "it is put into training mode" in note
    start_training(model)
    assert in_eval_mode(model) == []


def test_a_buffer_of_each_kind_is_seen_to_change() -> None:
    def change(buffer: torch.Tensor) -> torch.Tensor:
        buffer.data.view(torch.uint8)[-1] += 1  # the least that can change
        return buffer

    for value in (torch.tensor([torch.nan]), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool)):
        module = nn.Module()
        module.register_buffer("kept", value)
        buffers = Buffers(module, World(0, 1, 0), torch.device("cpu"))
        assert not buffers.changed(), "nan stays what it is"
        module.kept = change(value.clone())
        assert buffers.changed()
        buffers.watch()
        assert buffers.changing == ["kept"]
        assert not buffers.changed(), "it is known now"
        module.kept = torch.zeros(7)
        assert buffers.changed(), "another shape"
        module.register_buffer("new", torch.zeros(1))
        buffers.watch()
        assert buffers.changing == ["kept", "new"]


def test_a_checksum_depends_on_each_bit_and_its_position() -> None:
    torch.manual_seed(0)
    for dtype, size in ((torch.float32, 5000), (torch.bfloat16, 4099), (torch.float64, 1), (torch.uint8, 7)):
        tensor = (torch.randn(size) * 50).to(dtype)
        changed = [tensor.clone() for _ in range(4)]
        bits = [each.view(torch.uint8) for each in changed]
        bits[1][-1] ^= 1
        bits[2][0] ^= 128
        changed[3] = tensor.flip(0) if size > 1 else tensor + 1
        sums = [_sum(each) for each in changed]
        assert sums[0] == _sum(tensor)
        assert len({*sums}) == 4, dtype
    table = torch.arange(4096.0).reshape(4, 1024)
    exchanged = [table[[1, 0, 2, 3]], table.roll(1, 1), table.roll(1, 0), table.flip(0, 1)]
    assert len({_sum(table), *map(_sum, exchanged)}) == 5
    unit = torch.eye(1024, dtype=torch.float64)  # sums of rows and columns are those of any permutation
    negated = [unit * (1 - 2 * (torch.arange(1024) // size % 2)) for size in (1, 2, 512)]
    assert len({_sum(each) for each in (unit, unit.roll(1, 0), unit.flip(0), *negated)}) == 6
    whole = torch.randn(101)
    assert _sum(whole[1:]) == _sum(whole[1:].clone()), "wherever the tensor begins in memory"
    assert _sum(torch.zeros(3, 0)) == 0


def _sum(tensor: Tensor) -> int:
    return int(checksum(tensor).item())
