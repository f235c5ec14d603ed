"""Forecasts against what then ran: bytes, memory and time of a step, of some sixty jobs.

    make bench-forecast                                  # on this machine, and on shaped hosts on it (needs root)
    python jobs/bench_forecast.py measure --out results.jsonl --settings "2 ranks"       # some of the settings
    python jobs/bench_forecast.py report --results results.jsonl --to docs/explanations

For each setting (ranks of one machine, or hosts with links of a rate), `launch doctor` measures the links of the hosts,
then all cells are predicted as `launch plan` does, and then they run: real windows of the real engine, all cells of a
setting in one process group. Every other cell is held out: the runs of the others, and only these, correct its
prediction. Nothing of this is kept by the launcher.

The hosts share the cores of this machine, so that the work of a step is measured while the ranks of all hosts compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from launcher.plan.forecast import Forecast
    from launcher.plan.run_plan import RunPlan

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "bench-forecast"
# the address of the first host of tests/infra/hosts.py
RENDEZVOUS = "10.213.7.11:29400"
SECONDS, LEAST_WINDOWS, MOST_WINDOWS = 3.0, 6, 40  # of a cell's measured windows
MEMORY_WINDOWS, MEMORY_MICRO_BATCHES = 2, 3  # the optimizer's state exists from the second window on
TASKS = {
    "mlp": ("task._target_=jobs.forecast_tasks.Mlp", "batch.micro_size=64"),
    "gpt": (
        "task=bytes_gpt", "task.width=96", "task.depth=4", "task.heads=4", "task.seq_len=64", "batch.micro_size=4",
        f"task.corpus={sysconfig.get_path('stdlib')}/asyncio",
    ),
    "conv": ("task._target_=jobs.forecast_tasks.Conv", "batch.micro_size=8"),
}  # fmt: skip
DDP = [("ddp", "every"), ("ddp", "boundary")]
FSDP = [("fsdp", "every"), ("fsdp", "boundary"), ("fsdp", "gather_once")]
HSDP = [("hsdp", sync) for sync in ("every", "boundary", "replicas_at_boundary", "gather_once")]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hosts on which cells run. ``rate``: of their links; empty: this machine. ``cells``: number of them."""

    hosts: int
    workers: int
    rate: str
    policies: list[tuple[str, str]]
    accumulations: tuple[int, ...]
    cells: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.workers

    @property
    def name(self) -> str:
        if self.hosts == 1:
            return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.hosts} x {self.workers} at {self.rate}"

    @property
    def gbit(self) -> float:
        return float(self.rate.removesuffix("mbit")) / 1e3 if "mbit" in self.rate else float(self.rate[: -len("gbit")])


WIDE, NARROW = (1, 4, 16, 2, 8), (1, 4, 2)
SETTINGS = (
    Setting(1, 1, "", [("single", "boundary")], (1, 4, 16), 6),
    Setting(1, 2, "", DDP + FSDP, WIDE, 14),
    Setting(1, 4, "", DDP + FSDP + HSDP, WIDE, 12),
    Setting(2, 1, "1gbit", DDP + FSDP, WIDE, 8),
    Setting(2, 1, "100mbit", DDP + FSDP, NARROW, 8),
    Setting(2, 2, "1gbit", HSDP, WIDE, 4),
    Setting(2, 2, "100mbit", HSDP, NARROW, 4),
    Setting(4, 1, "1gbit", DDP + FSDP, WIDE, 6),
    Setting(4, 1, "100mbit", DDP + FSDP, NARROW, 6),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One job of a setting. ``held_out``: its run corrects no other prediction."""

    setting: Setting
    number: int
    task: str
    strategy: str
    sync: str
    accumulation: int
    held_out: bool

    @property
    def overrides(self) -> list[str]:
        setting = self.setting
        words = [
            *TASKS[self.task], f"strategy={self.strategy}", f"strategy.sync={self.sync}",
            f"batch.accumulation={self.accumulation}", f"cluster.workers_per_node={setting.workers}",
            "cluster.device=cpu", "precision=fp32", "run.calibrate_s=0", "train.steps=100000", "wandb.mode=disabled",
            "checkpoint.enabled=false", "train.loader_workers=0", f"run.dir={PLACE}",
        ]  # fmt: skip
        if self.strategy == "ddp":
            words.append("strategy.bucket_mb=0.5")  # the models have 1 to 2 MB: several buckets are needed for overlap
        if self.strategy == "hsdp":
            words.append("strategy.shard_size=2")
        if setting.hosts > 1:
            words += ["cluster=hosts", f"cluster.nodes={setting.hosts}", f"cluster.rendezvous={RENDEZVOUS}"]
        return words


def cells_of(setting: Setting) -> list[Cell]:
    """Return the cells: the policies in turn, each with tasks and accumulations drawn without repetition."""
    jobs: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for policy in setting.policies:
        jobs[policy] = list(itertools.product(TASKS, setting.accumulations))
        random.Random(f"{setting.name} {policy}").shuffle(jobs[policy])
    cells: list[Cell] = []
    for number in range(setting.cells):
        policy = setting.policies[number % len(setting.policies)]
        task, accumulation = jobs[policy].pop()
        cells.append(Cell(setting, number, task, *policy, accumulation, held_out=number % 2 == 1))
    return cells


def measure(out: Path, names: Sequence[str]) -> None:
    """Predict and then run the cells of each setting, and append a JSON line for each cell to ``out``."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(PLACE / "cache")  # nothing that an earlier run has found out
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    out.unlink(missing_ok=True)
    for setting in SETTINGS:
        if names and setting.name not in names:
            continue
        began, cells = time.monotonic(), cells_of(setting)
        if setting.ranks > 1:
            on_hosts(setting, "doctor", *(cluster_words(setting)))
        doctor_s = time.monotonic() - began
        plans = PLACE / f"{setting.name}.jsonl".replace(" ", "-")
        plans.write_text("".join(f"{json.dumps(each)}\n" for each in predictions(cells)))
        predicted_s = time.monotonic() - began - doctor_s
        script = ["--", str(ROOT / "jobs" / "bench_forecast.py"), "run", "--plans", str(plans), "--out", str(out)]
        on_hosts(setting, "run", *cluster_words(setting), f"run.dir={PLACE}", *script)
        ran_s = time.monotonic() - began - doctor_s - predicted_s
        print(f"{setting.name}: doctor {doctor_s:.0f} s, predicted {predicted_s:.0f} s, ran {ran_s:.0f} s", flush=True)


def cluster_words(setting: Setting) -> list[str]:
    words = [f"cluster.workers_per_node={setting.workers}", "cluster.device=cpu"]
    if setting.hosts > 1:
        words += ["cluster=hosts", f"cluster.nodes={setting.hosts}", f"cluster.rendezvous={RENDEZVOUS}"]
    return words


def on_hosts(setting: Setting, *arguments: str) -> None:
    """Run `launch` on each host of a setting."""
    command = [str(Path(sys.executable).with_name("launch")), *arguments]
    if setting.hosts > 1:
        shaped = [sys.executable, "-m", "tests.infra.hosts", "--hosts", str(setting.hosts), "--rate", setting.rate]
        command = [*shaped, "--", *command]
    subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def predictions(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield each cell with its plan, predicted without corrections."""
    from launcher.config.hydra import compose
    from launcher.launch.planner import Once, plan_job
    from launcher.plan import task_inspection
    from launcher.plan.work import measure_work

    once = Once()
    for cell in cells:
        everywhere = functools.partial(measure_work, ranks=cell.setting.ranks)
        with patch.object(task_inspection, "measure_work", everywhere):
            plan = plan_job(compose(cell.overrides), once, starts=False)
        for note in plan.notes:
            print(f"{cell.setting.name}, {cell.task} {cell.strategy} {cell.sync}: {note}", flush=True)
        yield {"cell": dataclasses.asdict(cell), "setting": cell.setting.name, "plan": json.loads(plan.to_json())}


def run(plans: Path, out: Path) -> None:
    """Run the cells of a setting on this rank; rank 0 appends the results."""
    import torch.distributed as dist

    from jobs.forecast_report import row
    from launcher.plan.run_plan import RunPlan

    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    for line in plans.read_text().splitlines():
        fields = json.loads(line)
        plan = RunPlan.from_json(json.dumps(fields.pop("plan")))
        result = fields | predicted_of(plan) | run_cell(plan)
        if int(os.environ["RANK"]) == 0:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(row(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def forecast_of(plan: RunPlan) -> Forecast:
    forecast = plan.strategy.forecast
    assert forecast is not None, "these tasks have a known number of parameters"
    return forecast


def predicted_of(plan: RunPlan) -> dict[str, Any]:
    """Return the prediction of the plan's policy, and what the job is compared with others by."""
    from launcher.plan.past_runs import job_of

    forecast = forecast_of(plan)
    step = forecast.step
    return {
        "predicted": None if step is None else dataclasses.asdict(step),
        "predicted_bytes": forecast.wire_bytes,
        "predicted_peak": forecast.peak_bytes,
        "job": None if step is None else job_of(plan, step.source),
    }


def run_cell(plan: RunPlan) -> dict[str, Any]:
    """Run windows of a plan; return the median step in seconds, a window's bytes, and the peak of tensors in memory."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from launcher.plan.windows import WARM_UP_WINDOWS
    from launcher.task import load_task, seed_everything, train_data
    from launcher.train.engine.engine import Engine
    from launcher.train.trainer import optimizer_of, schedule_of
    from launcher.train.training_loop import items_method_of, losses_of

    task = load_task(plan.task.target, plan.task.params, [str(ROOT)], plan.train.seed)
    seed_everything(plan.train.seed)

    def engine_of(plan: RunPlan) -> Engine:
        return Engine(
            task.model, optimizer_of(task, plan), plan, shard_units=getattr(task, "shard_units", None), owner=task,
            schedule=schedule_of(task, plan),
        )  # fmt: skip

    data = train_data(task, plan.train.seed)

    def windows(engine: Engine, before: Callable[[], None] = lambda: None) -> Iterator[Any]:
        def loss(model: Any, batch: Any) -> Any:
            return losses_of(task, engine, model, batch)

        for window in engine.windows(data, getattr(task, "collate", None), loss, items_method_of(task)):
            for batch in window:
                before()
                engine.backward(loss(engine.model, batch))
            yield engine.step()

    step = forecast_of(plan).step
    expected_s = SECONDS / LEAST_WINDOWS if step is None else step.step_s
    wanted = max(LEAST_WINDOWS, min(MOST_WINDOWS, round(SECONDS / expected_s)))
    times: list[float] = []
    sent = 0
    for number, result in enumerate(windows(engine_of(plan)), 1):
        if number > WARM_UP_WINDOWS and result.samples == plan.batch.global_size:
            times.append(result.step_s)
            sent = result.comm.wire_bytes
        if len(times) == wanted:
            break
    # a third micro-batch keeps nothing more, and the tracker makes each take several times as long
    batch = dataclasses.replace(plan.batch, accumulation=min(plan.batch.accumulation, MEMORY_MICRO_BATCHES))
    batch = dataclasses.replace(batch, global_size=batch.micro_size * batch.accumulation * batch.world_size)
    engine = engine_of(dataclasses.replace(plan, batch=batch))
    tracker = MemTracker()
    tracker.track_external(engine.parallel.module, engine.optimizer)
    with tracker:
        for number, _ in enumerate(windows(engine, tracker.reset_mod_stats), 1):
            if number == MEMORY_WINDOWS:
                break
    peaks = [sizes["Total"] for place, sizes in tracker.get_tracker_snapshot("peak").items() if place.type == "cpu"]
    ordered = sorted(times)
    quartiles = statistics.quantiles(ordered, n=4)
    return {
        "step_s": statistics.median(times), "quartiles": [quartiles[0], quartiles[2]], "windows": len(times),
        "wire_bytes": sent, "peak_bytes": max(peaks),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="predict and run the cells")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--settings", nargs="*", default=[], help="names of settings; default: all")
    running = verbs.add_parser("run", help="run by `launch run` on the hosts of a setting")
    running.add_argument("--plans", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    reporting = verbs.add_parser("report", help="write the table and the figure")
    reporting.add_argument("--results", type=Path, required=True)
    reporting.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments.out.absolute(), arguments.settings)
    elif arguments.verb == "run":
        run(arguments.plans, arguments.out)
    else:
        from jobs.forecast_report import report

        report(arguments.results, arguments.to)
