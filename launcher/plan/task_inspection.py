"""Task inspection: properties of model and data that the plan needs, and each sync policy's memory. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from launcher.config.schema import Balance, Config, OptimizerConfig, ScheduleConfig
from launcher.errors import ConfigError, TaskError
from launcher.plan.gpus import CONTEXT_BYTES, FULL_SHARE, NCCL_BYTES, find_gpu
from launcher.plan.initial_weights import InitialWeights
from launcher.plan.optimizer_plan import parameter_groups
from launcher.plan.run_plan import Forecast, RunPlan, TaskPlan
from launcher.plan.strategy import with_forecasts, with_memory
from launcher.plan.sync_policy import SHARDED
from launcher.rundir.files import value_from_json
from launcher.task import load_task

# tasks whose description is arithmetic, except where facts() returns None
_WITH_FACTS = ("launcher.tasks.bytes_gpt.", "launcher.tasks.digits.", "launcher.tasks.llama.")


class HasFacts(Protocol):
    def facts(self) -> dict[str, int] | None: ...


@dataclass(frozen=True, kw_only=True)
class InspectionRequest:
    """Parts of a job's config on which the inspection of its task depends.

    Attributes:
        task: the config's task, with ``_target_``.
        import_from: directory that user code is imported from.
        shards: whether the task's shard units matter and must be valid.
        seed: the job's seed, under which the task is constructed as in training.
        balance: may need the lengths of the samples.
        callbacks: as configured; they are checked and not constructed.
        initial: weights that must fit the model.
    """

    task: dict[str, Any]
    import_from: str
    shards: bool
    seed: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    balance: Balance
    callbacks: list[dict[str, Any]]
    initial: InitialWeights | None = None

    @classmethod
    def of(cls, config: Config, import_from: str, initial: InitialWeights | None = None) -> Self:
        return cls(
            task=config.task, import_from=import_from, shards=config.strategy.kind in SHARDED, seed=config.train.seed,
            optimizer=config.optimizer, schedule=config.schedule, balance=config.batch.balance,
            callbacks=config.callbacks, initial=initial,
        )  # fmt: skip

    @property
    def target(self) -> Any:
        """Path of the task's class."""
        return self.task.get("_target_")

    @property
    def params(self) -> dict[str, Any]:
        """Arguments of the task's class."""
        return {name: value for name, value in self.task.items() if name != "_target_"}


def describe_task(request: InspectionRequest) -> TaskPlan:
    """Return a description of the task that a config names, after a check that its optimizer can be built and its
    callbacks exist.

    The bundled tasks compute their description by arithmetic where they can. Any other class is imported in a separate
    process, and so are these if classes, parameter groups or callbacks of the config must be checked.

    Raises:
        ConfigError: no task is named.
        TaskError: it cannot be imported, constructed or used; the message says why.
    """
    target, params, optimizer = request.target, request.params, request.optimizer
    if not isinstance(target, str):
        raise ConfigError(
            "task._target_", target, "is not set.", "Name the task's class: task._target_=my_tasks.MyTask."
        )
    checks = any((optimizer.target, request.schedule.target, optimizer.groups, request.callbacks, request.initial))
    if target.startswith(_WITH_FACTS) and not checks:
        try:
            task = load_task(target, params, [])
            facts = cast("HasFacts", task).facts()
        except (TypeError, ValueError) as error:  # a parameter of the wrong type
            raise TaskError(f"task: {target} with {params}: {error}.") from None
        if facts is not None:
            return TaskPlan(
                target=target,
                params=params,
                samples=facts["samples"],
                parameters=facts["parameters"],
                gradient_bytes=4 * facts["parameters"],
                unit_parameters=facts["unit_parameters"],
                batch_norms=facts["batch_norms"],
                matmul_parameters=facts["matmul_parameters"],
                unit_matmul_parameters=facts["unit_matmul_parameters"],
                group_parameters=_default_groups(optimizer, facts),
                eval_sets=("",),
                lengths=False,
                data_notes=tuple(getattr(task, "notes", ())),
            )
    question = json.dumps(dataclasses.asdict(request))
    result = run_probe("launcher.train.inspection.task_probe", question)
    if result is None:
        raise TaskError(f"task._target_={target}: the process that inspected it ended early; its output is above.")
    if "error" in result:
        raise TaskError(result["error"])
    return value_from_json(TaskPlan, result["task"])


def _default_groups(optimizer: OptimizerConfig, facts: dict[str, int]) -> tuple[int, ...]:
    """Return the parameters in no group, and in each group of the default."""
    if not parameter_groups(optimizer):
        return (facts["parameters"],)
    return facts["parameters"] - facts["vector_parameters"], facts["vector_parameters"]


def run_probe(module: str, question: str) -> dict[str, Any] | None:
    """Run ``python -m module FILE PARENT_PID`` and return the JSON object that it writes to FILE; None if it is empty.

    The process reads ``question`` from standard input. It is separate because torch and the user's code must not be
    imported here. It ends when this process ends, however that happens, and the file has no name that could be left
    behind.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        subprocess.run(
            [sys.executable, "-P", "-m", module, f"/dev/fd/{answer.fileno()}", str(os.getpid())],
            input=question,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which kills the other without a traceback
            stdout=sys.stderr,  # what the user's code prints must not end up in `launch plan --json`
            pass_fds=(answer.fileno(),),
            check=False,
        )
        text = answer.read()
    return json.loads(text) if text else None


def weigh_memory(plan: RunPlan, *, choose: bool) -> RunPlan:
    """Return ``plan`` with each policy's traffic and memory, measured on windows of the real task.

    A separate process runs them on tensors without memory, which takes some seconds. If it fails, the plan keeps the
    figures computed from the number of parameters, or lacks only the memory, and a note says why.

    Args:
        choose: whether to switch to the policy that sends the fewest bytes among those that fit.

    Raises:
        TaskError: the job would fail at its first step.
    """
    answer: dict[str, Any] = run_probe("launcher.train.inspection.memory_forecast", plan.to_json()) or {
        "problem": "the process that measured it ended early"
    }
    if "error" in answer:
        raise TaskError(f"task._target_={plan.task.target}: {answer['error']}")
    forecasts = [_with_time(value_from_json(Forecast, fields), plan) for fields in answer.get("forecasts", ())]
    problem, memory = answer.get("problem"), answer.get("memory_bytes")
    note = ""
    if problem:
        note = f"The memory of each sync policy is unknown and was not considered: {str(problem).rstrip('.')}."
    elif choose and memory is None:
        note = "No GPU is visible here, so it is unknown which policies fit into its memory."
    if note:
        plan = plan.with_notes([note])
    if not forecasts:
        return plan
    if choose and not problem and memory is not None:
        plan = dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, memory))
    else:
        plan = dataclasses.replace(plan, strategy=with_forecasts(plan.strategy, forecasts))
    return plan.with_notes(_full_notes(plan))


def _full_notes(plan: RunPlan) -> list[str]:
    """Return the warning that the predicted peak leaves too little of the memory of the GPU that the plan names."""
    if plan.cluster.gpu is None:
        return []
    gpu = find_gpu(plan.cluster.gpu)
    peak = next(forecast.peak_bytes for forecast in plan.strategy.forecasts if forecast.sync is plan.strategy.sync)
    share = 0.0 if peak is None else (peak + CONTEXT_BYTES + NCCL_BYTES) / (gpu.memory_gb * 10**9)
    if share <= FULL_SHARE:
        return []
    problem = "too much" if share > 1 else f"above {FULL_SHARE:.0%}, where fragmentation may end the run"
    return [
        f"A rank is predicted to need {share:.0%} of the {gpu.memory_gb} GB of a {plan.cluster.gpu}, {problem}: "
        "use a smaller batch.micro_size, strategy.recompute=blocks, or more shards (strategy=fsdp, more ranks)."
    ]


def _with_time(forecast: Forecast, plan: RunPlan) -> Forecast:
    """Add the link's seconds, scaled from the previous forecast by the wire bytes."""
    before = next((other for other in plan.strategy.forecasts if other.sync is forecast.sync), forecast)
    if before.wire_s is None or not before.wire_bytes:
        return forecast
    return dataclasses.replace(forecast, wire_s=before.wire_s * forecast.wire_bytes / before.wire_bytes)
