"""Running out of memory: what counts as it, and that nothing of the abandoned window stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine
from launcher.errors import ConfigError
from launcher.loss import Loss
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan
from launcher.train.engine import oom
from launcher.train.world import World
from tests.helpers import make_plan
from tests.infra.workers import run_shrinking


def plan_of(*overrides: str) -> RunPlan:
    return make_plan(
        "cluster.workers_per_node=1", "batch.global_size=16", "train.loader_workers=0", *overrides, samples=96
    )


def trained(
    model: Callable[[], nn.Module],
    loss: Callable[[Any, Tensor], Any],
    steps: int,
    counted_by: dict[str, Any],
    **fails: Any,
) -> tuple[list[Tensor], list[int]]:
    """Return parameters and buffers after some windows of two micro-batches, and the number of micro-batches of each
    window. ``fails``: see ``run_shrinking``."""
    torch.manual_seed(0)
    plan = plan_of("batch.micro_size=8", "batch.on_oom=shrink", f"train.steps={steps}", "precision=fp32")
    engine = Engine(made := model(), torch.optim.SGD(made.parameters(), 0.1), plan)
    data = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    windows = engine.windows(list(data), **counted_by)
    micro_batches = run_shrinking(engine, windows, lambda batch: loss(engine.model, batch), **fails)
    assert (engine.steps, engine.samples) == (steps, 16 * steps)
    return [value.clone() for value in made.state_dict().values()], micro_batches


def noisy() -> nn.Module:
    """Return a model that draws and that keeps statistics."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def squares(model: Any, batch: Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


@pytest.mark.usefixtures("alone")
def test_it_does_not_matter_where_in_a_window_memory_ran_out() -> None:
    first, micro_batches = trained(noisy, squares, 4, {}, fails_at=4)
    last, again = trained(noisy, squares, 4, {}, fails_at=5)
    assert micro_batches == again == [2, 2, 4, 4]
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    never, _ = trained(noisy, squares, 4, {})
    assert not all(torch.equal(one, other) for one, other in zip(first, never, strict=True)), "dropout draws otherwise"


def two_terms(model: Any, batch: Tensor) -> list[Loss]:
    out = model(batch)
    return [Loss(out.square().sum(), len(batch), name="one"), Loss(out.abs().sum(), 2 * len(batch), name="two")]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("counted_by", [{"forward": two_terms}, {"items": lambda batch: [len(batch), 2 * len(batch)]}])
def test_memory_that_runs_out_with_several_terms(fails_at: int, counted_by: dict[str, Any]) -> None:
    """The first pass has found several terms that must be counted first."""

    def left(**fails: Any) -> list[Tensor]:
        return trained(lambda: nn.Linear(5, 1), two_terms, 2, counted_by, **fails)[0]

    torch.testing.assert_close(left(fails_at=fails_at, after_backward=True), left())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overrides", [["batch.micro_size=8"], ["batch.micro_size=1", "batch.on_oom=shrink"]])
def test_nothing_smaller_or_not_asked_for(overrides: list[str]) -> None:
    model = nn.Linear(5, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan_of(*overrides, "train.steps=2"))
    for _ in engine.windows([torch.randn(5) for _ in range(96)]):
        assert engine.shrinks(torch.OutOfMemoryError("injected")) is (overrides == [])
        assert not engine.shrinks(ValueError("something else"))
        break


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_what_counts_as_running_out_of_memory(error: Exception, is_one: bool) -> None:
    assert oom.is_out_of_memory(error) is is_one


@pytest.mark.parametrize(("free", "is_one"), [(1, True), (70, False), (None, False)])
@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_words_with_other_causes_count_only_on_a_full_gpu(
    monkeypatch: pytest.MonkeyPatch, text: str, free: int | None, is_one: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80))
    assert oom.is_out_of_memory(RuntimeError(text)) is is_one


@pytest.mark.parametrize(
    ("nbytes", "fraction", "fits"),
    [(0, 1.0, True), (90, 1.0, True), (100, 1.0, False), (30, 0.31, True), (31, 0.31, False)],
)
def test_memory_of_a_gpu_includes_what_the_allocator_keeps_within_its_limit(
    nbytes: int, fraction: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_device = {"mem_get_info": (60, 200), "memory_reserved": 70, "memory_allocated": 30}
    for name, value in {**of_device, "get_per_process_memory_fraction": fraction}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert oom.fits_in_memory(nbytes, torch.device("cuda", 0)) is fits
    assert oom.fits_in_memory(10**15, torch.device("cpu"))


def test_a_failed_assertion_on_the_gpu_is_reported_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert not oom.is_out_of_memory(error)


def test_the_allocators_own_words_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert oom.is_out_of_memory(caught.value)


def test_what_was_found_is_for_this_job_only(tmp_path: Path) -> None:
    def of_run(*overrides: str) -> RunPlan:
        plan = plan_of("batch.micro_size=8", *overrides)
        return dataclasses.replace(plan, run=dataclasses.replace(plan.run, dir=str(tmp_path)))

    plan = of_run()
    alone = World(0, 1, 0)
    assert oom.apply_stored_micro_size(plan, alone) == plan
    oom.store_micro_size(plan, plan.batch.in_micro_batches_of(2))
    assert oom.apply_stored_micro_size(plan, alone).batch == Batch(
        global_size=16, micro_size=2, accumulation=8, world_size=1
    )
    for other in ("batch.micro_size=4", "precision=fp32", "strategy.recompute=blocks"):
        resumed = of_run(other)
        assert oom.apply_stored_micro_size(resumed, alone) == resumed
    assert json.loads(plan.paths.fitted.read_text())["micro_size"] == 2


def solved(*overrides: str, ranks: int = 2) -> Any:
    return make_plan(f"cluster.workers_per_node={ranks}", *overrides, samples=960).batch


def test_auto_begins_with_a_ranks_whole_share() -> None:
    assert solved("batch.global_size=24", "batch.micro_size=auto").micro_size == 12
    assert solved("batch.global_size=24", "batch.micro_size=auto", "batch.ramp=[[5,16]]").micro_size == 4
    assert solved("batch.global_size=25", "batch.micro_size=auto", "batch.uneven=true").micro_size == 13
    with pytest.raises(ConfigError, match=r"batch\.accumulation=3: has no effect with batch.micro_size=auto"):
        solved("batch.global_size=24", "batch.micro_size=auto", "batch.accumulation=3")
    with pytest.raises(ConfigError, match=r"batch\.micro_size=two: must be a whole number, or auto"):
        solved("batch.micro_size=two")


def test_halving_keeps_the_window() -> None:
    batch = solved("batch.global_size=24", "batch.micro_size=12")
    sizes: list[tuple[int, int]] = []
    while batch is not None:
        sizes.append((batch.micro_size, batch.accumulation))
        assert batch.global_size == 24
        batch = batch.shrunk()
    assert sizes == [(12, 1), (6, 2), (3, 4), (2, 6), (1, 12)]
