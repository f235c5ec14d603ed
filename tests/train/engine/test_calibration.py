"""The calibration phase: training is the same bits with it and without, and what is made of its times."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import OutOfMemory
from launcher.quantities import Interval, interval
from launcher.train.data.loader import MicroBatch
from launcher.train.engine import calibration
from launcher.train.engine.calibration import Calibrated, Calibration, WindowSync, hardware_of
from launcher.train.engine.preserved_state import SavedState
from launcher.train.world import World
from tests.helpers import make_plan, torchrun

WORKER = Path(__file__).parent / "calibration_worker.py"
DDP = "strategy=ddp strategy.bucket_mb=0.001"
GATHERED = "strategy=fsdp strategy.sync=gather_once batch.micro_size=4"
PAIRS: dict[int, dict[str, str]] = {
    2: {
        "ddp": f"{DDP} precision=fp32 batch.micro_size=4",
        "ddp bf16": f"{DDP} precision=bf16 batch.micro_size=2",
        "ddp fp16": f"{DDP} precision=fp16 precision.growth_interval=2 batch.micro_size=4",
        "every": f"{DDP} precision=fp32 batch.micro_size=4 strategy.sync=every",
        "powersgd": f"{DDP} precision=fp32 batch.micro_size=4 strategy.compress=powersgd powersgd.start=3",
        "norm sync": f"{DDP} precision=fp32 batch.micro_size=4 batch.norm=sync",
        "norm window": f"{DDP} precision=fp32 batch.micro_size=8 batch.norm=window",
        "ramp": f"{DDP} precision=fp32 batch.micro_size=4 batch.ramp=[[2,8],[1,16]]",
        "fsdp": "strategy=fsdp precision=fp32 batch.micro_size=4 strategy.sync=boundary",
        "fsdp bf16": "strategy=fsdp precision=bf16 batch.micro_size=4 strategy.sync=gather_once",
        "fsdp bf16, widened": "strategy=fsdp precision=bf16 batch.micro_size=4 strategy.sync=gather_once reads=1",
        "own loop": f"{DDP} precision=fp32 batch.micro_size=4 own=0",
        "own loop, later": f"{DDP} precision=fp32 batch.micro_size=4 own=3",
        "out of memory": f"{DDP} precision=fp32 batch.micro_size=4 oom=1",
        "out of memory, when timed": f"{DDP} precision=fp32 batch.micro_size=4 oom=2",
        "out of memory, later": f"{DDP} precision=fp32 batch.micro_size=4 oom=5",
        "fsdp out of memory": "strategy=fsdp precision=fp32 batch.micro_size=4 strategy.sync=gather_once oom=1",
        "fsdp out of memory before the gathers": f"{GATHERED} precision=fp32 too_large=1",
        "fsdp out of memory in backward": f"{GATHERED} precision=fp32 oom_backward=1",
        "fsdp out of memory in backward, later": f"{GATHERED} precision=bf16 oom_backward=5",
        "unused parameters": f"{DDP} precision=fp32 batch.micro_size=4 strategy.sync=every "
        "strategy.find_unused_parameters=true resume=1",
        "static graph": f"{DDP} precision=fp32 batch.micro_size=4 strategy.static_graph=true",
    },
    4: {
        "ddp": f"{DDP} precision=fp32 batch.micro_size=2",
        "ddp later": f"{DDP} precision=fp32 batch.micro_size=4 own=2",
        "hsdp": "strategy=hsdp strategy.shard_size=2 strategy.sync=replicas_at_boundary precision=fp32 "
        "batch.micro_size=2",
    },
}


FEW = (
    "ddp", "ddp fp16", "powersgd", "norm window", "ramp", "fsdp bf16, widened", "own loop, later",
    "out of memory, later", "fsdp out of memory before the gathers", "fsdp out of memory in backward",
    "unused parameters", "static graph",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, FEW),
        (4, ["hsdp"]),
        *(pytest.param(ranks, [*PAIRS[ranks]], marks=pytest.mark.nightly) for ranks in (2, 4)),
    ],
)
def test_training_is_the_same_bits_with_and_without_it(ranks: int, names: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "pairs").write_text("\n".join(PAIRS[ranks][name] for name in names))
    lines = torchrun(WORKER, [str(tmp_path / "pairs")], ranks, tmp_path).splitlines()
    found = dict(zip(names, [json.loads(line) for line in lines if line.startswith("{")], strict=True))
    # without a calibration, the first window gathers the weight a second time
    unlike = {name: [".sent"] if name.endswith("widened") else [] for name in names}
    assert {name: result["unlike"] for name, result in found.items()} == unlike
    for name, result in found.items():
        given_up = name.startswith("out of memory") or name == "fsdp out of memory in backward, later"
        measures = not given_up and name != "static graph"
        assert bool(result["not_measured"]) == (given_up or name == "static graph"), name
        assert (result["rounds"] > 0) == measures, name
        assert (result["gain"] is not None) == (measures and name not in ("every", "unused parameters")), name
        # the whole model is gathered only where its memory is known to suffice
        silent = measures and name not in ("fsdp", "hsdp") and not name.startswith("fsdp out of memory")
        assert (result["exposed"] is not None) == silent, name
        for times in (result["gain"], result["exposed"]):
            assert times is None or times["low"] <= times["value"] <= times["high"]
        # a window is read whole only where its micro-batches are needed before
        if name not in ("norm window", "ramp"):
            assert set(result["plain_order"].split("r")) == {"", "F"}, name
            first, *later = result["order"].removeprefix("r").split("r")
            assert (len(first) == 1) == ("own=" in PAIRS[ranks][name]), name
            assert set(later) == {"F"}, name
    if ranks == 2:
        assert "static graph" in found["static graph"]["not_measured"]
        assert found["ddp"]["order"].count("F") == 4 + 4 + 2 + 4 + 4, "each batch is handed out once"


@pytest.mark.parametrize(
    ("gain_s", "step_s", "data_s", "ahead", "every_s"),
    [
        (4.0, 1.5, 0.5, False, 5.5),
        (4.0, 1.2, 0.2, True, 5.0),  # what is read ahead hides the wait for data: 1 s of computing, 4 s more
        (4.0, 20.0, 19.0, True, 20.0),  # a job that waits for its data gains nothing
        (-0.2, 1.0, 0.0, True, 0.8),  # a policy that is slower
        (-4.0, 1.0, 0.0, False, 0.0),
    ],
)
def test_the_speedup_of_a_whole_step_has_its_data_in_it(
    gain_s: float, step_s: float, data_s: float, ahead: bool, every_s: float
) -> None:
    gain = Interval(gain_s, gain_s - 0.1, gain_s + 0.1)
    found = Calibrated(rounds=6, gain=gain).step_s_every(step_s, data_s, reads_ahead=ahead)
    assert found is not None
    assert found.value == pytest.approx(every_s)
    assert found.low <= found.value <= found.high
    assert found.high - found.low <= 0.2 + 1e-9
    assert Calibrated().step_s_every(step_s, data_s, reads_ahead=ahead) is None


def parts_of(rank: int = 0, size: int = 2, **more: Any) -> Any:
    """Return the parts of an engine on one of ``size`` ranks."""
    world, parallel = World(rank, size, rank, size), SimpleNamespace(without_effects=nullcontext, **more)
    return SimpleNamespace(
        world=world, device=torch.device("cpu"), preserve=object, parallel=parallel, precision=None, norms=None
    )


def test_one_rank_has_nothing_to_measure() -> None:
    assert not Calibration(parts_of(size=1)).wanted(make_plan())
    assert not Calibration(parts_of()).wanted(make_plan("run.calibrate_s=0"))


@pytest.mark.parametrize(
    ("steps", "window_s", "overrides", "rounds", "exposed"),
    [
        (300, 0.01, (), 8, True),
        (30, 0.4, (), 3, True),
        (10, 0.4, (), 3, False),  # the rounds without collectives are left out
        (3, 0.4, (), 0, False),
        (300, 60.0, (), 3, True),
        (20, 60.0, (), 0, False),
        (300, 0.4, ("run.calibrate_s=1",), 0, False),
    ],
)  # fmt: skip
def test_three_rounds_may_take_a_share_of_the_run(
    steps: int, window_s: float, overrides: tuple[str, ...], rounds: int, exposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class Simulated(Calibration):
        def _time(self, kind: WindowSync, count: int) -> float:
            took_s = window_s * count / self._count * (1.1 if kind is WindowSync.every else 1.0)
            clock[0] += took_s
            self._comm_s.append(0.1)
            return took_s

        def _agree(self, *values: float) -> list[float]:
            return [*values]

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    plan = make_plan(
        f"train.steps={steps}", "strategy=ddp", "batch.accumulation=4", "cluster.workers_per_node=2",
        "cluster.device=cpu", *overrides
    )  # fmt: skip
    phase = Simulated(parts_of())
    phase.measure(plan, lambda *_: [], [MicroBatch(None, 1)], 0)
    assert phase.result is not None
    assert (phase.result.rounds, phase.result.gain is not None) == (rounds, rounds > 0)
    assert (phase.result.exposed is not None) == exposed
    assert ("run.calibrate_s=" in phase.result.not_measured) == (not rounds)


def test_a_window_bounded_in_tokens_is_measured_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has one micro-batch, with which all policies send the same."""
    monkeypatch.setattr(Calibration, "_agree", lambda _, *values: [float(value) for value in values])
    monkeypatch.setattr(
        Calibration,
        "_measure",
        lambda self, kinds: Calibrated(rounds=self._count, comm_s=kinds.count(WindowSync.every)),
    )
    plan = make_plan(
        "strategy=ddp", "cluster.workers_per_node=2", "cluster.device=cpu", "batch.global_size=128",
        "batch.micro_size=64", "batch.balance=length", "batch.micro_tokens=1K",
    )  # fmt: skip
    phase = Calibration(parts_of())
    phase.measure(plan, lambda *_: [], [MicroBatch(None, 1)] * 7, 0)
    assert phase.result == Calibrated(rounds=7, comm_s=1)


def test_memory_that_runs_out_while_others_gather_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that continued would wait for the others, which wait for it in all-gathers, until train.hang_timeout."""

    def out_of_memory() -> Any:
        raise torch.OutOfMemoryError("as from the allocator")

    monkeypatch.setattr(Calibration, "_agree", lambda _, *values: [*values])
    parts = parts_of(1, without_collectives=out_of_memory, bytes_to_gather=int, meter=None)
    plan = make_plan("strategy=fsdp", "strategy.sync=gather_once", "cluster.workers_per_node=2", "cluster.device=cpu")
    with pytest.raises(OutOfMemory, match=r"Rank 1 ran out.*the allocator\n  Do not calibrate: run.calibrate_s=0\."):
        Calibration(parts).measure(plan, lambda *_: [], [MicroBatch(None, 1)], 0)


def test_a_checkpoints_result_is_taken_over_unless_there_is_more_time_now() -> None:
    measured = Calibrated(asked_s=None, rounds=7, gain=Interval(0.1, 0.0, 0.2), comm_s=0.3)
    state: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(measured)))
    assert Calibrated.restored(state, make_plan()) == measured
    assert Calibrated.restored(state, make_plan("run.calibrate_s=60")) == measured
    given_up = dataclasses.asdict(Calibrated(asked_s=None, not_measured="it takes longer"))
    assert Calibrated.restored(given_up, make_plan()) is not None
    assert Calibrated.restored(given_up, make_plan("run.calibrate_s=60")) is None
    assert Calibrated.restored(None, make_plan()) is None


def test_the_hardware_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(World):
        def of_all(self, value: Any, _group: Any = None) -> list[Any]:
            return [value, value.replace("fast", "slow"), value]

    monkeypatch.setattr(calibration, "device_model", lambda _: "fast, 2 cores")
    found = hardware_of(Mixed(rank=0, size=3, local_rank=0, local_size=3), torch.device("cpu"))
    assert [(name.split(", ")[0], ranks) for name, ranks in found.items()] == [("fast", 2), ("slow", 1)]


class Grows(nn.Module):
    """Replaces one buffer, fills one that was None, and registers another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.zeros(len(x))
        self.cache = torch.zeros(3)
        self.register_buffer("more", torch.zeros(1))
        return x


def test_random_state_and_buffers_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), Grows())
    kept = SavedState(model, torch.device("cpu"))
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    number = torch.rand(1)
    kept.restore()
    for _ in range(2):
        model(torch.randn(8, 3))
        kept.restore()
        assert torch.equal(torch.rand(1), number)
        found = dict(model.named_buffers())
        assert [*found] == [*wanted]
        assert all(map(torch.equal, found.values(), wanted.values()))
        kept.restore()


def test_the_median_is_that_of_the_paired_differences() -> None:
    own = [1.0, 1.5, 1.1, 3.0, 1.2, 1.0]
    every = [2.0, 2.6, 2.0, 4.1, 2.2, 1.9]
    differences = [a - b for a, b in zip(every, own, strict=True)]
    assert interval(differences).value == statistics.median(differences) == pytest.approx(1.0)
