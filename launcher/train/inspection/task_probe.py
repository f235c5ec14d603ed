"""Inspection of a task before anything starts: checks that it can be imported and constructed and has data, and
measures its model.

``launcher.plan.task_inspection`` runs it as a separate process, because the command line must not import torch or user
code. For each connection that this process receives, it forks one that builds a task and answers questions about it, a
line of JSON each.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.config.schema import Balance, Device, LrScaling, OptimizerConfig, ScheduleConfig
from launcher.errors import DataError, LauncherError, TaskError, UserError
from launcher.loss import loss_form
from launcher.plan.batch import require_tokens
from launcher.plan.callback_plan import require_callbacks
from launcher.plan.data_shards import stream_info
from launcher.plan.float_format import float_format
from launcher.plan.optimizer_plan import assign, require_members, solve_optimizer
from launcher.plan.run_plan import NoForecast, OptimizerPlan, RunPlan, SchedulePlan, solved_part
from launcher.plan.task_inspection import FORECASTS, InspectionRequest
from launcher.process import die_with_parent, exit_at_once
from launcher.rundir.files import value_from_json
from launcher.task import (
    OPTIONAL_METHODS,
    Task,
    as_ready,
    column_of_lengths,
    eval_metrics,
    is_mapped,
    is_ready,
)
from launcher.tracebacks import users_frames
from launcher.train.inspection.built_task import BuiltTask, attributes_restored

if TYPE_CHECKING:
    from torch import nn

# modules that the inspections of several tasks need, and which take long to import
_IMPORTED = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.utils.data", "launcher.train.eval_metrics",
    "launcher.train.data.length_balance", "launcher.train.data.sample_order",
    "launcher.train.engine.modes", "launcher.train.measure.flops", "launcher.train.optimizers",
    "launcher.train.parallel.batchnorm", "launcher.train.parallel.mixed_precision",
    "launcher.train.parallel.shard_units", "launcher.train.precision",
)  # fmt: skip


def probe(request: InspectionRequest, built: BuiltTask | None = None) -> dict[str, Any]:
    """Return the fields of a TaskPlan.

    Args:
        built: the task, if it has been built; its parts serve several requests.
    """
    from launcher.train.engine.modes import start_training
    from launcher.train.eval_metrics import metrics_by_name
    from launcher.train.parallel.model_check import require_trainable

    built = built or BuiltTask(*request.build)
    task, data, held_out = built.task, built.data, built.held_out
    require_callbacks(request.callbacks, [request.import_from], task)
    notes = [*near_misses(task), *built.notes]
    metrics_by_name(eval_metrics(task, request.seed))
    arrangement = _check_arrangement(task, data, request, notes)
    built.seeded |= bool(arrangement.get("own_order"))
    model = built.model
    require_trainable(model, sharded=request.shards, deferred=True)
    start_training(model)  # which may freeze parameters, and keep layers in eval mode
    if request.initial is not None:
        from launcher.train.checkpoint.initial import require_fit

        require_fit(model, request.initial)
    tokens_per_sample: Callable[[], Any] | None = getattr(task, "tokens_per_sample", None)
    return {
        "target": request.target,
        "params": request.params | (fixed() if (fixed := getattr(task, "fixed_arguments", None)) is not None else {}),
        **_sizes(model, task, shards=request.shards),
        "format_layers": _format_layers(model, request),
        "in_eval_mode": [""] if built.in_eval_mode else in_eval_mode(model),
        "eval_sets": tuple(held_out),
        "window_loss": loss_form(task) is not None,
        **_check_update_rule(task, model, request.optimizer, request.schedule, notes),
        **arrangement,
        "data_notes": tuple(notes),  # of all the checks above
        "compiles": _compiled_part(model),
        "flops_per_sample": built.flops_per_sample,
        "tokens_per_sample": None if tokens_per_sample is None else require_tokens(tokens_per_sample()),
        "one_value_norm": _one_value_norm(task, model, data),
    }


def _compiled_part(model: nn.Module) -> str:
    """Return the first part of ``model`` that is compiled anyway: by the task, or as flex attention of transformers."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            return f"{type(module).__name__}.compile() of the task{f' ({name})' if name else ''}"
        if getattr(getattr(module, "config", None), "_attn_implementation", "") == "flex_attention":
            return f"flex attention ({type(module).__name__})"
    return ""


def _sizes(model: nn.Module, task: Task, *, shards: bool) -> dict[str, int]:
    """Return the counts of a TaskPlan. ``shards``: the task's own shard units are used and checked."""
    from launcher.train.parallel.batchnorm import batch_norms
    from launcher.train.parallel.mixed_precision import matmul_parameters
    from launcher.train.parallel.shard_units import find_units
    from launcher.train.precision import NARROW_DTYPES

    shard_units = getattr(task, "shard_units", None) if shards else None
    units = find_units(model, None if shard_units is None else shard_units(model))
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    multiplied = list(matmul_parameters(model))
    return {
        "parameters": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
        "unit_parameters": sum(p.numel() for p in trained if p in in_units),
        "frozen_parameters": sum(p.numel() for p in frozen),
        "frozen_unit_parameters": sum(p.numel() for p in frozen if p in in_units),
        "batch_norms": len(batch_norms(model)),
        "narrow_parameters": sum(p.numel() for p in trained if p.dtype in NARROW_DTYPES),
        "matmul_parameters": sum(p.numel() for p in multiplied),
        "unit_matmul_parameters": sum(p.numel() for p in multiplied if p in in_units),
    }


def _format_layers(model: nn.Module, request: InspectionRequest) -> tuple[int, int] | None:
    """Return the numbers of linear layers in the format of an installed package and of all; None without one."""
    if (added := float_format(request)) is None:
        return None
    from torch.nn import Linear

    return len(added.layers(model)), sum(isinstance(module, Linear) for module in model.modules())


def near_misses(task: Task) -> list[str]:
    """Return a note for each method of the task that nothing calls, and whose name is close to that of an optional
    method that its class does not have. A name must be closer if the task inherits that method."""
    home = type(task).__module__.partition(".")[0]
    notes: list[str] = []
    for cls in type(task).__mro__:
        own = vars(cls) if cls.__module__.partition(".")[0] == home else {}
        for name in own:
            if name.startswith("_") or name in OPTIONAL_METHODS or not inspect.isroutine(own[name]):
                continue
            wanted: dict[float, list[str]] = {0.85: [], 0.9: []}
            for each in OPTIONAL_METHODS:
                if each not in own:
                    wanted[0.9 if callable(getattr(task, each, None)) else 0.85].append(each)
            near = [found for cutoff, names in wanted.items() for found in get_close_matches(name, names, 1, cutoff)]
            if near:
                notes.append(
                    f"{cls.__qualname__} has a method {name}, which the launcher does not call; did you mean {near[0]}?"
                )
    return notes


def _check_arrangement(task: Task, data: Any, request: InspectionRequest, notes: list[str]) -> dict[str, Any]:
    """Check the training data, the task's own order, and its lengths if they are needed, and return their fields of a
    TaskPlan.

    Raises:
        TaskError: they cannot be used, or do not belong together.
    """
    if not is_mapped(data) and not is_ready(data) and not hasattr(data, "__iter__"):
        raise TaskError(
            f"task._target_={request.target}: train_data() returned a {type(data).__name__} that has no length and "
            "cannot be iterated.\n  Give a map-style dataset (__len__ and __getitem__) or an IterableDataset."
        )
    from launcher.train.data.ready_batches import require_usable

    try:
        if is_ready(data):
            require_usable(as_ready(data))
        return _arrangement(task, data, request.seed, request.balance, notes)
    except DataError as error:  # in training it is the job's
        raise TaskError(f"task._target_={request.target}: {error}") from None


def _arrangement(task: Task, data: Any, seed: int, balance: Balance, notes: list[str]) -> dict[str, Any]:
    from launcher.train.data.length_balance import require_length_of_first
    from launcher.train.data.sample_order import ArrangedData, checked_lengths, samples_per_epoch

    own_order, lengths = callable(getattr(task, "order", None)), callable(getattr(task, "lengths", None))
    if own_order:
        _require_parameters_of(getattr(task, "order"), "order(epoch, seed)", 2)  # noqa: B009
    if not is_mapped(data):
        if own_order:
            raise TaskError(
                "The task has a method order(epoch, seed), and its training data is a stream, which has no indices.\n"
                "  Remove the method, and let the stream yield its samples in that order."
            )
        samples = as_ready(data).samples if is_ready(data) else None
        return {"samples": samples, "lengths": False, "stream": dataclasses.asdict(stream_info(data))}
    if lengths:
        _require_parameters_of(getattr(task, "lengths"), "lengths(data)", 1)  # noqa: B009
    column = column_of_lengths(data)
    if balance is Balance.length and (lengths or column is not None):
        checked_lengths(getattr(task, "lengths")(data) if lengths else column, len(data))  # noqa: B009
    elif balance is Balance.length and callable(getattr(task, "length", None)) and len(data):
        require_length_of_first(data, task, seed)
    samples = samples_per_epoch(ArrangedData(data, getattr(task, "order")), seed) if own_order else len(data)  # noqa: B009
    if own_order:
        notes.append(f"The task's own order(epoch, seed) is used: {samples} samples an epoch, of {len(data)}.")
    known = lengths or column is not None or callable(getattr(task, "length", None))
    return {"samples": samples, "own_order": own_order, "lengths": known}


def _check_update_rule(
    task: Task, model: nn.Module, optimizer: OptimizerConfig, schedule: ScheduleConfig, notes: list[str]
) -> dict[str, Any]:
    """Check that optimizer and schedule can be built, and return their fields of a TaskPlan.

    Raises:
        ConfigError, TaskError: one of them cannot be built.
    """
    from launcher.train.optimizers import trained_parameters

    own = {name: inspect.isroutine(getattr(task, name, None)) for name in ("optimizer", "schedule")}
    for name, parameters in (("optimizer", ["model"]), ("schedule", ["optimizer", "steps"])):
        if own[name]:
            _require_parameters_of(getattr(task, name), f"{name}({', '.join(parameters)})", len(parameters))
            notes.append(
                f"The task's own {name}({', '.join(parameters)}) is used; {name}.* of the configuration is not."
            )
    fields: dict[str, Any] = {"own_optimizer": own["optimizer"], "own_schedule": own["schedule"]}
    plan: OptimizerPlan | None = None
    if not own["optimizer"]:
        unscaled = dataclasses.replace(optimizer, lr_scaling=LrScaling.none, reference_batch=None)
        plan = solve_optimizer(unscaled, 1)
        named = trained_parameters(model)
        dimensions = [(names, parameter.ndim) for names, parameter in named]
        require_members(dimensions, plan.groups)
        counts = [0] * (1 + len(plan.groups))
        for (_, parameter), group in zip(named, assign(dimensions, plan.groups), strict=True):
            counts[0 if group is None else 1 + group] += parameter.numel()
        fields["group_parameters"] = counts
    own_schedule_class = schedule.target is not None and not own["schedule"]
    if own_schedule_class or (plan is not None and plan.names_classes):
        _build_classes(model, plan, solved_part(SchedulePlan, schedule) if own_schedule_class else None)
    return fields


def _build_classes(model: nn.Module, optimizer: OptimizerPlan | None, schedule: SchedulePlan | None) -> None:
    """Build optimizer and schedule classes to report mistakes early. Not called for the built-in ones, because torch
    imports its compiler for this, which takes a second."""
    import torch

    from launcher.train.optimizers import build_optimizer
    from launcher.train.schedules import build_schedule

    alone = torch.optim.SGD([torch.zeros(1)], 1.0)
    made = alone if optimizer is None else build_optimizer(model, optimizer, Device.cpu)
    if schedule is not None:
        build_schedule(made, schedule, None)


def _require_parameters_of(method: Any, signature: str, count: int) -> None:
    """Raise TaskError unless ``method`` can be called with ``count`` arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError as error:
        raise TaskError(f"The task's method must be {signature}: {error}.") from None


def _one_value_norm(task: Task, model: nn.Module, data: Any) -> str | None:
    """Return the TaskPlan's ``one_value_norm``, by a forward pass of one sample on tensors without memory."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from launcher.train.measure.flops import run_without_memory
    from launcher.train.parallel.batchnorm import batch_norms

    found: list[str] = []

    def watch(twin: nn.Module) -> None:
        for name, layer in batch_norms(twin).items():
            if type(layer).forward is _BatchNorm.forward:
                layer.register_forward_pre_hook(partial(look, name))

    def look(name: str, layer: _BatchNorm, inputs: tuple[Any, ...]) -> None:
        if (layer.training or layer.running_mean is None) and inputs[0].numel() == inputs[0].shape[1]:
            found.append(name)

    if not batch_norms(model):
        return ""
    with attributes_restored(task):
        ran = run_without_memory(task, model, data, watch)
    return found[0] if found else "" if ran else None


def in_eval_mode(module: nn.Module, name: str = "") -> list[str]:
    """Return the names of the outermost modules in eval mode; an empty name is ``module`` itself."""
    if not module.training:
        return [name]
    prefix = f"{name}." if name else ""
    return [inner for child, part in module.named_children() for inner in in_eval_mode(part, f"{prefix}{child}")]


def _described(fields: Any, built: BuiltTask) -> dict[str, Any]:
    """Return the answer on an ``InspectionRequest``."""
    request = value_from_json(InspectionRequest, fields)
    try:
        return {"task": probe(request, built)}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # user code may raise anything
        from launcher.train.parallel.model_check import UNDIVIDED

        text = f"task._target_={request.target}: {type(error).__name__}: {error}\n{users_frames(error)}"
        if re.search(r"process group|torch\.distributed", str(error)):
            text += f"\n  A task is also built where there is no process group. {UNDIVIDED}."
        return {"error": text}


def _forecast(fields: Any, target: str | None, built: BuiltTask) -> dict[str, Any]:
    """Return the memory of this machine's GPU, and the answer of an installed forecast on a plan.

    Args:
        target: "package.module:function"; None: no forecast is installed.
    """
    import torch

    plan = RunPlan.from_json(json.dumps(fields))
    on_gpu = plan.cluster.device is Device.cuda and torch.cuda.is_available()
    answer: dict[str, Any] = {"device_bytes": torch.cuda.mem_get_info()[1] if on_gpu else None}
    if target is None:
        return answer | {"problem": f"no forecast of activations is installed (entry point {FORECASTS})"}
    module, _, function = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)(plan, built)
    except LauncherError as error:  # the same error would occur in the job
        return answer | {"error": str(error)}
    except Exception as error:  # any code of another package is possible
        found = NoForecast(f"{target}: {type(error).__name__}: {error}")
    if isinstance(found, NoForecast):
        answer["problem"], found = found.reason, found.traffic
    return answer | {"forecasts": [dataclasses.asdict(each) for each in found]}


def _serve(connection: socket.socket) -> None:
    """Answer questions about one task, which is built once."""
    built = None
    with connection.makefile("rw", encoding="utf-8") as lines:
        print(os.getpid(), file=lines, flush=True)
        for line in lines:
            question = json.loads(line)
            built = built or BuiltTask(*question["build"])
            if question["kind"] == "describe":
                answer = _described(question["about"], built)
            else:
                answer = _forecast(question["about"]["plan"], question["about"]["target"], built)
            answer |= {"seeded": built.seeded, "seconds": built.seconds}
            print(json.dumps(answer), file=lines, flush=True)


def main() -> None:
    """Fork a process for each connection that is received: one for each task."""
    die_with_parent(int(sys.argv[2]))
    control, parent = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    for module in _IMPORTED if sys.argv[3:] else ():
        importlib.import_module(module)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            die_with_parent(parent)
            control.close()
            _serve(socket.socket(fileno=descriptors[0]))
            exit_at_once()  # threads that the task has started may never end
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
    exit_at_once()
