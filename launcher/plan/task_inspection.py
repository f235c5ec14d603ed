"""Task inspection: properties of model and data that the plan needs, and each sync policy's memory. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol, Self, cast

from launcher.config.schema import (
    Balance,
    ClusterKind,
    Config,
    Device,
    OptimizerConfig,
    OptimizerKind,
    PrecisionKind,
    ScheduleConfig,
    ScheduleKind,
)
from launcher.errors import ConfigError, TaskError, UserError
from launcher.plan.forecast_cache import ContentCache
from launcher.plan.gpus import OVERHEAD_BYTES, find_gpu
from launcher.plan.host import free_host_bytes, visible_gpus
from launcher.plan.initial_weights import InitialWeights
from launcher.plan.optimizer_plan import TARGET, parameter_groups
from launcher.plan.run_plan import Forecast, PrecisionPlan, RunPlan, TaskPlan, extended, part
from launcher.plan.strategy import excess_notes, least_note, with_memory
from launcher.plan.sync_policy import SHARDED
from launcher.rundir.files import value_from_json
from launcher.task import load_task

# tasks whose description is arithmetic
_WITH_FACTS = ("launcher.tasks.bytes_gpt.", "launcher.tasks.digits.")
# note of a plan with train.compile
COMPILED_NOTE = "The predicted memory is that of the model without train.compile; compiled code usually needs less."


_PROBE, _FORECAST = "launcher.train.inspection.task_probe", "launcher.train.inspection.memory_forecast"


class HasFacts(Protocol):
    def facts(self) -> dict[str, int]: ...


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
        float8_exclude: linear layers that stay in bf16; None without precision=float8.
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
    float8_exclude: list[str] | None = None

    @classmethod
    def of(cls, config: Config, import_from: str, initial: InitialWeights | None = None) -> Self:
        precision, optimizer, schedule = extended(PrecisionPlan, config.precision), config.optimizer, config.schedule
        groups = optimizer.groups
        # the jobs of a sweep over learning rates share an inspection, unless a class of the user's gets the rate
        if optimizer.kind is not OptimizerKind.custom and not any(TARGET in group for group in groups or ()):
            optimizer = OptimizerConfig(kind=optimizer.kind, groups=groups)
        if schedule.kind is not ScheduleKind.custom:
            schedule = ScheduleConfig()
        return cls(
            task=config.task, import_from=import_from, shards=config.strategy.kind in SHARDED, seed=config.train.seed,
            optimizer=optimizer, schedule=schedule, balance=config.batch.balance,
            callbacks=config.callbacks, initial=initial,
            float8_exclude=precision.float8_exclude if precision.kind is PrecisionKind.float8 else None,
        )  # fmt: skip

    @property
    def target(self) -> Any:
        """Path of the task's class."""
        return self.task.get("_target_")

    @property
    def params(self) -> dict[str, Any]:
        """Arguments of the task's class."""
        return {name: value for name, value in self.task.items() if name != "_target_"}


def describe_task(request: InspectionRequest, *, starts: bool = True, limit_s: float | None = None) -> TaskPlan:
    """Return a description of the task that a config names, after a check that its optimizer can be built and its
    callbacks exist.

    The bundled tasks compute their description by arithmetic where they can. Any other class is imported in a separate
    process, and so are these if classes, parameter groups or callbacks of the config must be checked.

    Args:
        starts: the job is about to start, so nothing is taken from the cache.
        limit_s: seconds that the inspection may take: train.hang_timeout.

    Raises:
        ConfigError: no task is named.
        TaskError: it cannot be imported, constructed or used; the message says why.
    """
    if (described := _by_arithmetic(request)) is not None:
        return described
    fields = dataclasses.asdict(request)
    question = json.dumps(fields)
    if starts:
        result = run_probe(_PROBE, question, limit_s)
    else:
        result = remembered_probe(_PROBE, question, fields, limit_s=limit_s)
    return _described(request, result)


def describe_tasks(requests: Sequence[tuple[InspectionRequest, float | None]]) -> list[TaskPlan | UserError | None]:
    """Return what ``describe_task`` returns or raises for each request; None if that takes no process, or if it is the
    only one that does. One process imports torch, and inspects each task in a copy of itself.

    Args:
        requests: each with its ``limit_s``.
    """
    described: list[TaskPlan | UserError | None] = [None] * len(requests)
    probed: list[int] = []
    for number, (request, _) in enumerate(requests):
        with suppress(UserError):
            if _by_arithmetic(request) is None:
                probed.append(number)
    if len(probed) < 2:
        return described
    answers = _run_probes(_PROBE, [(dataclasses.asdict(requests[number][0]), requests[number][1]) for number in probed])
    for number, answer in zip_longest(probed, answers):
        try:
            described[number] = _described(requests[number][0], answer)
        except UserError as error:
            described[number] = error
    return described


def _by_arithmetic(request: InspectionRequest) -> TaskPlan | None:
    """Return the description of a bundled task; None if a process has to inspect the task.

    Raises:
        ConfigError: no task is named.
        TaskError: a parameter has the wrong type.
    """
    target, params, optimizer = request.target, request.params, request.optimizer
    if not isinstance(target, str):
        raise ConfigError(
            "task._target_", target, "is not set.", "Name the task's class: task._target_=my_tasks.MyTask."
        )
    checks = any((optimizer.target, request.schedule.target, optimizer.groups, request.callbacks, request.initial))
    checks = checks or request.float8_exclude is not None
    if target.startswith(_WITH_FACTS) and not checks:
        try:
            task = load_task(target, params, [])
            facts = cast("HasFacts", task).facts()
        except (TypeError, ValueError) as error:  # a parameter of the wrong type
            raise TaskError(f"task: {target} with {params}: {error}.") from None
        fields: dict[str, Any] = {name: value for name, value in facts.items() if name != "vector_parameters"}
        return TaskPlan(
            target=target, params=params, **fields, gradient_bytes=4 * facts["parameters"], one_value_norm="",
            group_parameters=_default_groups(optimizer, facts), eval_sets=("",), lengths=False,
        )  # fmt: skip
    return None


def _described(request: InspectionRequest, result: dict[str, Any] | None) -> TaskPlan:
    if result is None:
        raise TaskError(
            f"task._target_={request.target}: the process that inspected it ended early; its output is above."
        )
    if "error" in result:
        raise TaskError(result["error"])
    return value_from_json(TaskPlan, result["task"])


def _default_groups(optimizer: OptimizerConfig, facts: dict[str, int]) -> tuple[int, ...]:
    """Return the parameters in no group, and in each group of the default."""
    if not parameter_groups(optimizer):
        return (facts["parameters"],)
    return facts["parameters"] - facts["vector_parameters"], facts["vector_parameters"]


def run_probe(module: str, question: str, limit_s: float | None = None) -> dict[str, Any] | None:
    """Run ``python -m module FILE PARENT_PID`` and return the JSON object that it writes to FILE; None if it is empty.
    After ``limit_s`` seconds it is killed, and the object has that as its error.

    The process reads ``question`` from standard input. It is separate because torch and the user's code must not be
    imported here. It ends when this process ends, however that happens, and the file has no name that could be left
    behind.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        try:
            subprocess.run(
                [sys.executable, "-P", "-m", module, f"/dev/fd/{answer.fileno()}", str(os.getpid())],
                input=question,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only this process, which kills the other without a traceback
                stdout=sys.stderr,  # what the user's code prints must not end up in `launch plan --json`
                pass_fds=(answer.fileno(),),
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return too_long(limit_s)
        text = answer.read()
    return json.loads(text) if text else None


def too_long(limit_s: float | None) -> dict[str, Any]:
    """Return the answer of an inspection that was ended after ``limit_s``."""
    error = f"the inspection of the task took more than {limit_s:g} s (train.hang_timeout): a method does not end"
    return {"error": f"{error}, or needs a higher limit."}


def remembered_probe(
    module: str,
    question: str,
    key: Mapping[str, Any],
    *,
    recall: bool = False,
    limit_s: float | None = None,
) -> dict[str, Any] | None:
    """Return the answer of an earlier ``run_probe`` with an equal ``key`` if nothing that it depends on has changed;
    otherwise that of a new one. An answer with an error or a problem is not kept.

    Args:
        key: the parts of ``question`` that the answer depends on.
        recall: return None instead of that of a new one.
        limit_s: see ``run_probe``.
    """
    cache, key = ContentCache(), {"module": module, **key}
    known = cache.get(key)
    if recall or known is not None:
        return known
    since = time.time()
    answer = run_probe(module, question, limit_s)
    if answer is not None:
        _remember(cache, key, answer, since)
    return answer


def _remember(cache: ContentCache, key: Mapping[str, Any], answer: dict[str, Any], since: float) -> None:
    """Store an answer, unless it has an error or a problem, and remove from it what it depends on."""
    depends_on = answer.pop("depends_on", None)
    if depends_on is not None and not (answer.get("error") or answer.get("problem")):
        cache.put(key, answer, map(Path, depends_on["paths"]), variables=depends_on["variables"], since=since)


def trace_plans(plans: Iterable[RunPlan], traced: Callable[[int, int], object] | None = None) -> None:
    """Trace the tasks of several plans in one process, which is faster than one for each, and store the traces.
    ``weigh_memory`` finds them there; plans with equal traces share one.

    Args:
        traced: called after each trace with the number of traces so far, and of all.
    """
    cache, keys = ContentCache(), dict[str, tuple[dict[str, Any], RunPlan]]()
    for plan in plans:
        key = {"module": _FORECAST, **_traced_parts(plan)}
        keys.setdefault(json.dumps(key, sort_keys=True), (key, plan))
    unknown = [(key, plan) for key, plan in keys.values() if cache.get(key) is None]
    if len(unknown) < 2:
        return
    since = time.time()
    answers = _run_probes(_FORECAST, [dataclasses.asdict(plan) for _, plan in unknown])
    for number, ((key, _), answer) in enumerate(zip(unknown, answers, strict=False), 1):
        _remember(cache, key, answer, since)
        if traced is not None:
            traced(number, len(unknown))


def _run_probes(module: str, questions: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Run a probe that takes a list of questions; yield each answer once it is known. There may be fewer answers than
    questions: the process may end early."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as question, os.fdopen(reading, encoding="utf-8") as answers:
        json.dump(questions, question)
        question.seek(0)
        command = [sys.executable, "-P", "-m", module, f"/dev/fd/{writing}", str(os.getpid())]
        process = subprocess.Popen(
            command, stdin=question, stdout=sys.stderr, start_new_session=True, pass_fds=(writing,)
        )
        os.close(writing)
        try:
            for line in islice(answers, len(questions)):  # a process that a task has left may keep the pipe open
                if line.endswith("\n"):
                    yield json.loads(line)
        finally:
            process.kill()
            process.wait()


def weigh_memory(plan: RunPlan, *, choose: bool, recall: bool = False) -> RunPlan:
    """Return ``plan`` with each policy's traffic and memory, measured on windows of the real task.

    A separate process runs them on tensors without memory, which takes some seconds. If it fails, the plan keeps the
    figures computed from the number of parameters, or lacks only the memory, and a note says why.

    Args:
        choose: whether to switch to the policy that sends the fewest bytes among those that fit.
        recall: whether only an earlier trace is used; without one, the plan is returned as it is.

    Raises:
        TaskError: the job would fail at its first step.
    """
    answer = remembered_probe(
        _FORECAST,
        plan.to_json(),
        _traced_parts(plan),
        recall=recall,
        limit_s=plan.train.hang_timeout,
    )
    if answer is None and recall:
        return plan
    answer = answer or {"problem": "the process that measured it ended early"}
    if "error" in answer:
        raise TaskError(f"task._target_={plan.task.target}: {answer['error']}")
    found = [value_from_json(Forecast, fields) for fields in answer.get("forecasts", ())]
    forecasts = found or list(plan.strategy.forecasts)
    problem, memory = answer.get("problem"), _rank_memory(plan, answer.get("device_bytes"))
    note = ""
    if problem:
        note = f"The memory of each sync policy is unknown and was not considered: {str(problem).rstrip('.')}."
        note = f"{note} {least_note(plan, memory)}".rstrip()
    elif choose and memory is None and plan.cluster.kind is ClusterKind.elsewhere:
        note = "It is unknown which policies fit into the memory of the hosts: name their GPU (cluster.gpu=h100)."
    elif choose and memory is None:
        note = "No GPU is visible here, so it is unknown which policies fit into its memory."
    if note:
        plan = plan.with_notes([note])
    if plan.train.compile and any(forecast.peak_bytes is not None for forecast in forecasts):
        plan = plan.with_notes([COMPILED_NOTE])
    if not forecasts:
        return plan
    if choose and not problem and memory is not None:
        plan = dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, memory))
    else:
        strategy = dataclasses.replace(plan.strategy, memory_bytes=memory, forecasts=tuple(forecasts))
        plan = dataclasses.replace(plan, strategy=strategy)
    return plan.with_notes(excess_notes(plan))


def _traced_parts(plan: RunPlan) -> dict[str, Any]:
    """Return the parts of ``plan`` that its traces depend on."""
    kept = part(plan, "memory")
    del kept["strategy.sync"]  # each policy is traced
    kept |= {"task": dataclasses.asdict(plan.task), "seed": plan.train.seed, "from": plan.cluster.import_from}
    if plan.cluster.device is Device.cuda:  # a trace on a GPU differs from one without
        kept["host"] = os.uname().nodename, visible_gpus(os.environ), os.environ.get("CUDA_VISIBLE_DEVICES")
    return kept


def _rank_memory(plan: RunPlan, device_bytes: int | None) -> int | None:
    """Return the bytes of memory of one rank's device; None if it is not known.

    Args:
        device_bytes: memory of this machine's GPU; None without one.
    """
    if plan.cluster.gpu is not None:
        return find_gpu(plan.cluster.gpu).usable_bytes
    if plan.cluster.device is Device.cuda:
        if device_bytes is None or plan.cluster.kind is ClusterKind.elsewhere:
            return None
        return device_bytes - OVERHEAD_BYTES
    if plan.cluster.kind is ClusterKind.elsewhere:
        return None
    return free_host_bytes() // plan.cluster.workers_per_node
