"""A run opened outside of its job: task, model and data as in training, in this process, on one device.

Whatever the task builds is built under the run's seed and in the run's order, so that a random split is the same split.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.config.hydra import recompose
from launcher.config.schema import (
    Compress,
    Config,
    Device,
    Norm,
    OnOom,
    PrecisionKind,
    Recompute,
    ScheduleKind,
    StrategyKind,
    Sync,
    check_values,
)
from launcher.errors import ConfigError, SiteError, UserError
from launcher.plan.callback_plan import AROUND_EVALUATION, TARGET
from launcher.plan.float_format import float_format
from launcher.plan.resumable import as_typed, changes
from launcher.plan.run_plan import RunPlan, SchedulePlan
from launcher.rundir.checkpoints import choose_checkpoint
from launcher.rundir.files import read_config
from launcher.rundir.paths import RunPaths, is_run
from launcher.targets import find_target
from launcher.task import Task, eval_set_text, eval_sets, load_task, seed_everything, train_data
from launcher.train.callback_set import callbacks_of
from launcher.train.checkpoint.file_format import require_intact
from launcher.train.checkpoint.load import load_for_evaluation
from launcher.train.data.fingerprint import other_data, require_same_data
from launcher.train.data.randomness import kept_random_state
from launcher.train.engine import oom
from launcher.train.engine.engine import Engine
from launcher.train.evaluation import Evaluation
from launcher.train.metrics import Metrics
from launcher.train.precision import kept_tf32, set_tf32
from launcher.train.world import ALONE, World, device_of, join

# keys besides the task's arguments that decide on what is evaluated, and where
_KEYS = ("train.eval_samples", "train.eval_micro_size", "train.loader_workers", "cluster.device")
_ALLOWED = f"Give arguments of the task (task.NAME=VALUE), {', '.join(_KEYS[:-1])} or {_KEYS[-1]}."

# without it cuBLAS is not deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class OpenedRun:
    """A run's task, model and data, with the weights of one of its checkpoints.

    Attributes:
        directory: directory of the run.
        checkpoint, step: directory of the checkpoint, and its optimizer step.
        plan: plan of the run, for this one process.
        task: task of the run, with its state in the checkpoint.
        model: the task's own model on this process's device, in eval mode. With an optimizer or a callback that has
            other parameters for evaluations: those of the checkpoint's model, as `launch export` writes them.
        train_data: the training data, as the task returns it.
    """

    def __init__(self, config: Config | None, checkpoint: Path, step: int, engine: Engine, task: Task) -> None:
        self.plan, self.task, self.model = engine.plan, task, engine.model
        self.directory, self.checkpoint, self.step = engine.plan.paths.root, checkpoint, step
        self._config, self._engine = config, engine
        self.train_data: Any = None
        self._sets: dict[str, Any] = {}

    @cached_property
    def config(self) -> Config:
        """The run's config, with the overrides that were given."""
        return self._config or recompose(read_config(self.plan.paths.config), ())[0]

    @property
    def eval_data(self) -> Any:
        """The held-out data set; a dict of several by name; None if the task has none."""
        return self._sets.get("", self._sets or None)

    def evaluate(self) -> Metrics:
        """Return the metrics of the held-out data by their names in the run's record, computed as in training.

        Random numbers that the loss draws are those of rank 0.

        Raises:
            UserError: the task has no held-out data.
        """
        if not self._sets:
            raise UserError(f"{self.directory.name}: its task has no held-out data.\n  Let eval_data() return some.")
        engine = self._engine
        with _as_in_the_run(self.plan, engine.device), engine.callbacks.around_evaluation(engine):
            return Evaluation(engine, self.task, self._sets).run() | engine.context.take_scalars()


def open_run(
    run: str | os.PathLike[str], overrides: Sequence[str] = (), *, step: int | None = None, best: bool = False
) -> OpenedRun:
    """Build the task, model and data of a run as in training, in this process alone, and load a checkpoint's weights.

    The random state of the process does not change. A warning says if held-out samples are not those of the training.

    Args:
        run: directory of the run, or its name in ``runs``.
        overrides: other data to evaluate on, such as ``["task.held_out=other.txt"]``; ``cluster.device=cpu``.
        step: optimizer step of the checkpoint; None: the newest.
        best: the checkpoint of the best evaluation (checkpoint.best).

    Raises:
        UserError: there is no such run or checkpoint, the launcher cannot build its task, or a key may not change.
        WrongCheckpoint: the task makes another model than the run had.
    """
    paths = _find(Path(run))
    plan = RunPlan.of_record(paths)
    if plan is None or not plan.task.target:
        raise UserError(
            f"{paths.root.name}: is a script of `launch run`, whose model and data only the script can build.\n"
            f"  `launch export {paths.root.name} --to DIR` writes the weights of its checkpoints."
        )
    if (ranks := World.here().size) > 1:
        raise SiteError(
            f"A run is opened in a process alone, and torchrun has started {ranks}.\n  Start one: python SCRIPT."
        )
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, dir=str(paths.root)))  # it may have been moved
    checkpoint = choose_checkpoint(paths, step=step, best=best)
    require_intact(checkpoint)
    (plan, config), trained = _changed(plan, overrides), plan.task.params
    plan, device = _for_one_process(oom.apply_stored_micro_size(plan, ALONE))
    with _as_in_the_run(plan, device):
        opened, state = _build(plan, config, checkpoint)
        if plan.task.params == trained:
            _warn_of_other_data(opened, state["run"]["account"]["data"])
    return opened


def _find(place: Path) -> RunPaths:
    for directory in (place, Path("runs") / place):
        if is_run(directory):
            return RunPaths(directory.resolve())
    raise UserError(f"{place}: is not the directory of a run.\n  Name it by its directory, such as runs/NAME.")


def _changed(plan: RunPlan, overrides: Sequence[str]) -> tuple[RunPlan, Config | None]:
    """Return the plan and the config with other data; None: the config is that of the run.

    Raises:
        UserError: an override is of a key that is not for an evaluation, or its value is not possible.
    """
    if not overrides:
        return plan, None
    kept = read_config(plan.paths.config)
    config = recompose(kept, overrides)[0]
    changed = changes(as_typed(recompose(kept, ())[0]), as_typed(config))
    if any(change.key == "task._target_" for change in changed):
        raise UserError(
            f"task._target_: an evaluation has the task that was trained, {plan.task.target}.\n  For another one with "
            f"these weights: launch train checkpoint.init_from={plan.run.name}."
        )
    if wrong := [c.key for c in changed if not c.key.startswith("task.") and c.key not in _KEYS]:
        raise UserError(f"{', '.join(wrong)}: cannot change in an evaluation of what was trained.\n  {_ALLOWED}")
    check_values(config, "train")
    params = {name: value for name, value in plan.task.params.items() if f"task.{name}" not in {c.key for c in changed}}
    params |= {c.key.removeprefix("task."): c.after for c in changed if c.key.removeprefix("task.") in config.task}
    values = {name: getattr(config.train, name) for name in ("eval_samples", "eval_micro_size", "loader_workers")}
    device = config.cluster.device if any(c.key == "cluster.device" for c in changed) else plan.cluster.device
    # a machine without a GPU uses its CPU, unless the user asks for a GPU
    if device is Device.cuda and plan.cluster.device is not Device.cuda:
        device_of(ALONE, device)
    plan = dataclasses.replace(
        plan,
        task=dataclasses.replace(plan.task, params=params),
        train=dataclasses.replace(plan.train, **values),
        cluster=dataclasses.replace(plan.cluster, device=device),
    )
    return plan, config


def _for_one_process(plan: RunPlan) -> tuple[RunPlan, torch.device]:
    """Return the plan of a process that evaluates alone, and its device: that of the run if this machine has it."""
    cpu = plan.cluster.device is Device.cpu or not torch.cuda.is_available()
    device = device_of(ALONE, Device.cpu if cpu else Device.cuda)
    batch = plan.batch if plan.sites is None else plan.batch.of_site(plan.sites.count)
    batch = dataclasses.replace(batch.on_one_rank(), norm=Norm.leave, on_oom=OnOom.stop)
    if (added := float_format(plan)) is not None and not added.computes(device):
        trained, reason = plan.precision.kind, f"the run's format is not that of this device ({device})"
        plan = plan.with_precision(PrecisionKind.bf16, reason)
        warnings.warn(
            f"precision={trained}: this device ({device}) cannot compute in it, and the evaluation is in bf16: its "
            "figures are not those of the run to rounding.", stacklevel=3,
        )  # fmt: skip
    alone = dataclasses.replace(
        plan,
        batch=batch,
        cluster=dataclasses.replace(plan.cluster, device=Device(device.type)),
        strategy=dataclasses.replace(
            plan.strategy, kind=StrategyKind.single, sync=Sync.boundary, compress=Compress.none, shard_size=1,
            recompute=Recompute.none, cpu_offload=False, forecasts=(),
        ),
        schedule=SchedulePlan(kind=ScheduleKind.constant),
        train=dataclasses.replace(plan.train, compile=False, hang_timeout=None),
        initial=None, sites=None,
    )  # fmt: skip
    return alone, device


def _build(plan: RunPlan, config: Config | None, checkpoint: Path) -> tuple[OpenedRun, dict[str, Any]]:
    """Build task, model and data in the order of the trainer, because a task may keep in one what another one uses.
    Return the run, and the checkpoint's values that are not tensors."""
    seed = plan.train.seed
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, seed)
    seed_everything(seed)
    # checkpoints have the parameters that the optimizer has for evaluations, so that it is not needed
    engine = Engine(
        task.model, lambda parameters: torch.optim.SGD(parameters, lr=0.0), plan, owner=task,
        callbacks=_callbacks_around_evaluation(plan),
    )  # fmt: skip
    opened = OpenedRun(config, checkpoint, int(checkpoint.name.removeprefix("step_")), engine, task)
    opened.train_data, opened._sets = train_data(task, seed), eval_sets(task, seed)
    state = load_for_evaluation(engine, checkpoint)
    engine.callbacks.start(engine)
    engine.parallel.set_mode(engine.model, False)
    return opened, state


def _callbacks_around_evaluation(plan: RunPlan) -> list[Any]:
    """Construct the callbacks that an evaluation calls. Others have no effect on it, and a constructor may write files.
    A warning names a class that is not there."""
    entries: list[dict[str, Any]] = []
    for number, entry in enumerate(plan.callbacks):
        try:
            found = find_target(f"callbacks[{number}].{TARGET}", entry[TARGET], plan.cluster.import_from)
        except (ConfigError, ImportError) as error:
            warnings.warn(f"The evaluation leaves a callback of the run out: {error}", stacklevel=4)
            continue
        if not isinstance(found, type) or hasattr(found, AROUND_EVALUATION):
            entries.append(entry)
    made = callbacks_of(dataclasses.replace(plan, callbacks=tuple(entries)))
    return [each for each in made if callable(getattr(each, AROUND_EVALUATION, None))]


def _warn_of_other_data(opened: OpenedRun, before: dict[str, Any]) -> None:
    """Warn if held-out samples are not those of the checkpoint: files, code or packages have changed since."""
    plan, device = opened.plan, opened._engine.device
    if not opened._sets:
        return
    # the first one is that of the training, with which held-out samples are compared
    datasets = {"train_data()": None} | {eval_set_text(name): data for name, data in opened._sets.items()}
    plan = dataclasses.replace(plan, train=dataclasses.replace(plan.train, loader_workers=0, data_shards=1))
    now = require_same_data(datasets, plan, opened._engine.sites.whole_job(), device, stored=True)
    for name, difference in other_data(before, now, datasets, plan, device):
        warnings.warn(
            f"{name} is not that of the run: {difference}. Restore the data and the code that the run had.",
            stacklevel=3,
        )  # fmt: skip


@contextmanager
def _as_in_the_run(plan: RunPlan, device: torch.device) -> Iterator[None]:
    """Context for code of the task: a process group of one rank, in the run's working directory, with the run's
    arithmetic. Random state and settings of the process are restored at the end."""
    deterministic, alone = torch.are_deterministic_algorithms_enabled(), not dist.is_initialized()
    workspace = os.environ.get(_WORKSPACE)
    with (
        _kept_random_state(),
        kept_tf32(),
        chdir(plan.cluster.cwd) if Path(plan.cluster.cwd).is_dir() else nullcontext(),
    ):
        set_tf32(plan.precision.tf32)
        if plan.train.deterministic:
            os.environ.setdefault(_WORKSPACE, ":4096:8")
        if alone:
            join(ALONE, device, None)
        if changes_mode := deterministic != plan.train.deterministic:  # torch imports its compiler for it
            torch.use_deterministic_algorithms(plan.train.deterministic)
        try:
            yield
        finally:
            if workspace is None:
                os.environ.pop(_WORKSPACE, None)
            if changes_mode:
                torch.use_deterministic_algorithms(deterministic)
            if alone:
                dist.destroy_process_group()


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Context that restores the generators' state, on all GPUs, and the seed that waits for a GPU's first use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    waiting = vars(torch.cuda._lazy_seed_tracker)
    before = dict(waiting)
    with kept_random_state(torch.device("cpu")):
        try:
            yield
        finally:
            waiting |= before
            torch.cuda.set_rng_state_all(gpus)
