"""Task inspection: properties of model and data that the plan needs, and each sync policy's memory. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from launcher import DISTRIBUTION
from launcher.config.schema import (
    Balance,
    ClusterKind,
    Config,
    Device,
    OptimizerConfig,
    OptimizerKind,
    PrecisionConfig,
    ScheduleConfig,
    ScheduleKind,
)
from launcher.errors import ConfigError, TaskError
from launcher.plan.callback_plan import solve_callbacks
from launcher.plan.float_format import float_format
from launcher.plan.gpus import OVERHEAD_BYTES, find_gpu
from launcher.plan.host import free_host_bytes
from launcher.plan.initial_weights import InitialWeights
from launcher.plan.launch_plan import AddedKeys
from launcher.plan.optimizer_plan import TARGET, parameter_groups
from launcher.plan.run_plan import Forecast, RunPlan, TaskPlan, part
from launcher.plan.strategy import excess_notes, least_bytes, least_note, with_memory
from launcher.plan.sync_policy import SHARDED
from launcher.rundir.files import value_from_json
from launcher.targets import entry_points
from launcher.task import load_task

# tasks whose description is arithmetic
_WITH_FACTS = ("launcher.tasks.bytes_gpt.", "launcher.tasks.digits.")
# note of a plan with train.compile
COMPILED_NOTE = "The predicted memory is that of the model without train.compile; compiled code usually needs less."


# entry points of functions (RunPlan, BuiltTask) -> list[Forecast] | NoForecast, which run in the inspection's process
FORECASTS = "launcher.forecasts"
_PROBE = "launcher.train.inspection.task_probe"
SLOW_S = 5.0  # a task that takes longer to build is mentioned in the plan


@dataclass(frozen=True, kw_only=True)
class InspectionRequest(AddedKeys):
    """Parts of a job's config on which the inspection of its task depends.

    Attributes:
        task: the config's task, with ``_target_``.
        import_from: directory that user code is imported from.
        shards: whether the task's shard units matter and must be valid.
        seed: the job's seed, under which the task is constructed as in training.
        balance: may need the lengths of the samples.
        callbacks: as configured; they are checked and not constructed.
        initial: weights that must fit the model.
        precision, added: number format and added config groups, if a package adds the format: its layers are counted.
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
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    added: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @classmethod
    def of(cls, config: Config, import_from: str, initial: InitialWeights | None = None) -> Self:
        optimizer, schedule = config.optimizer, config.schedule
        groups = optimizer.groups
        # the jobs of a sweep over learning rates share an inspection, unless a class of the user's gets the rate
        if optimizer.kind is not OptimizerKind.custom and not any(TARGET in group for group in groups or ()):
            optimizer = OptimizerConfig(kind=optimizer.kind, groups=groups)
        if schedule.kind is not ScheduleKind.custom:
            schedule = ScheduleConfig()
        formats: dict[str, Any] = {}
        if float_format(config) is not None:
            precision = PrecisionConfig(kind=config.precision.kind)
            formats = {"precision": precision, "added": config.added_values()}
        return cls(
            task=config.task, import_from=import_from, shards=config.strategy.kind in SHARDED, seed=config.train.seed,
            optimizer=optimizer, schedule=schedule, balance=config.batch.balance,
            callbacks=[*solve_callbacks(config.callbacks)], initial=initial, **formats,
        )  # fmt: skip

    @property
    def build(self) -> tuple[Any, dict[str, Any], list[str], int]:
        """Arguments of ``BuiltTask``."""
        return self.target, self.params, [self.import_from], self.seed

    @property
    def target(self) -> Any:
        """Path of the task's class."""
        return self.task.get("_target_")

    @property
    def params(self) -> dict[str, Any]:
        """Arguments of the task's class."""
        return {name: value for name, value in self.task.items() if name != "_target_"}


class InspectionServer:
    """Process that imports torch once and then forks one process for each task; started when it is first needed.

    Args:
        several: several tasks are expected, so that it imports beforehand what each of them needs.
    """

    def __init__(self, *, several: bool = False) -> None:
        self._several, self._lock, self._closed = several, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all of its processes."""
        with self._lock:
            self._closed = True
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.kill()
                self._process.wait()

    def connect(self) -> socket.socket:
        """Return a connection to a new process, which answers questions about one task."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._closed:
                raise OSError("the inspection was stopped")
            if self._control is None:
                self._control, control = socket.socketpair()
                with control:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", _PROBE, str(control.fileno()), str(os.getpid())]
                        + ["several"] * self._several,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C reaches only this process, which ends the other ones
                        stdout=sys.stderr,  # what the user's code prints must not end up in `launch plan --json`
                        pass_fds=(control.fileno(),),
                    )
            with suppress(OSError):  # it has ended: there will be no answer
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours


class Inspection:
    """Process that builds one task and answers all questions about it; it starts with the first question.

    Under another seed of the job the task is built again only if building it uses the seed.

    Attributes:
        seconds: how long each part of the task took to be built.
    """

    def __init__(self, server: InspectionServer) -> None:
        self._server = server
        self._connection: socket.socket | None = None
        self._pid, self._seed, self._seeded = 0, 0, True
        self._answers: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        return "Inspection()"  # answers do not depend on which one is asked, see launcher.launch.planner.Once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            with suppress(OSError):  # a question that was not sent
                self._lines.close()
            self._connection.close()
            self._connection, self._seeded = None, True

    def ask(
        self, kind: str, about: Mapping[str, Any], build: Sequence[Any], key: Any, limit_s: float | None
    ) -> dict[str, Any] | None:
        """Return the answer to a question; None if the process ends without one.

        Args:
            kind: "describe" or "forecast".
            about: the request; or the plan, and the target of an installed forecast.
            build: arguments of ``BuiltTask``, of which the last one is the seed.
            key: what the answer depends on beside the seed, and ``kind``.
            limit_s: seconds after which the process is killed, and the answer has that as its error.
        """
        text = json.dumps([kind, key], sort_keys=True)
        if not self._seeded and text in self._answers:
            return self._answers[text]
        if self._seeded and build[-1] != self._seed:
            self.__exit__()
        try:
            if self._connection is None:
                self._seed, self._connection = build[-1], self._server.connect()
                self._lines = self._connection.makefile("rw", encoding="utf-8")
                self._pid = int(self._lines.readline())
            self._connection.settimeout(limit_s)
            print(json.dumps({"kind": kind, "about": about, "build": build}), file=self._lines, flush=True)
            line = self._lines.readline()
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            error = f"the inspection of the task took more than {limit_s:g} s (train.hang_timeout): a method does not "
            line = json.dumps({"error": f"{error}end, or needs a higher limit."}) + "\n"
            self.__exit__()
        except (OSError, ValueError):  # ValueError: it ended before it sent its process id
            line = ""
        if not line.endswith("\n"):
            self.__exit__()
            return None
        answer = json.loads(line)
        self._seeded, self.seconds = answer.pop("seeded", True), answer.pop("seconds", {})
        self._answers[text] = answer
        return answer

    def slow_notes(self) -> list[str]:
        """Return a note for the plan if the task took long to build."""
        if sum(self.seconds.values()) < SLOW_S:
            return []
        parts = ", ".join(f"{name} {spent:.0f} s" for name, spent in self.seconds.items() if spent >= 0.5)
        return [f"Building the task took {sum(self.seconds.values()):.0f} s ({parts}), as it will on each rank."]


@contextmanager
def new_inspection(given: Inspection | None = None) -> Generator[Inspection]:
    """Return a context with ``given``, or with an inspection of its own."""
    if given is not None:
        yield given
        return
    with InspectionServer() as server, Inspection(server) as inspection:
        yield inspection


def describe_task(
    request: InspectionRequest,
    inspection: Inspection | None = None,
    *,
    limit_s: float | None = None,
) -> TaskPlan:
    """Return a description of the task that a config names, after a check that its optimizer can be built and its
    callbacks exist.

    The bundled tasks compute their description by arithmetic where they can. Any other class is imported in a separate
    process, and so are these if classes, parameter groups or callbacks of the config must be checked.

    Args:
        inspection: of this task; None: one that ends with the call.
        limit_s: seconds that the inspection may take: train.hang_timeout.

    Raises:
        ConfigError: no task is named.
        TaskError: it cannot be imported, constructed or used; the message says why.
    """
    if (described := _by_arithmetic(request)) is not None:
        return described
    fields = dataclasses.asdict(request)
    with new_inspection(inspection) as asked:
        result = asked.ask("describe", fields, request.build, fields | {"seed": None}, limit_s)
    if result is None:
        raise TaskError(
            f"task._target_={request.target}: the process that inspected it ended early; its output is above."
        )
    if "error" in result:
        raise TaskError(result["error"])
    return value_from_json(TaskPlan, result["task"])


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
    checks = checks or float_format(request) is not None
    if target.startswith(_WITH_FACTS) and not checks:
        try:
            task: Any = load_task(target, params, [])
            facts: dict[str, Any] = task.facts()
        except (TypeError, ValueError) as error:  # a parameter of the wrong type
            raise TaskError(f"task: {target} with {params}: {error}.") from None
        vectors, parameters = facts.pop("vector_parameters"), facts["parameters"]
        # the parameters in no group, and in each group of the default
        groups = (parameters - vectors, vectors) if parameter_groups(optimizer) else (parameters,)
        return TaskPlan(
            target=target, params=params, **facts, gradient_bytes=4 * parameters, one_value_norm="",
            group_parameters=groups, eval_sets=("",), lengths=False,
        )  # fmt: skip
    return None


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


def weigh_memory(plan: RunPlan, inspection: Inspection | None = None, *, choose: bool) -> RunPlan:
    """Return ``plan`` with each policy's traffic and memory, as the installed forecast predicts them.

    It runs in the process that inspects the task, for some seconds. Without one, or if it fails, the plan keeps the
    figures computed from the number of parameters, or lacks only the memory, and a note says why.

    Args:
        inspection: of the plan's task; None: one that ends with the call.
        choose: whether to switch to the policy that sends the fewest bytes among those that fit.

    Raises:
        TaskError: the job would fail at its first step.
    """
    # another package's replaces the launcher's own
    installed = sorted(
        entry_points(FORECASTS).values(), key=lambda point: getattr(point.dist, "name", "") == DISTRIBUTION
    )
    build = plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed
    about = {"plan": dataclasses.asdict(plan), "target": installed[0].value if installed else None}
    with new_inspection(inspection) as asked:
        answer = asked.ask("forecast", about, build, _traced_parts(plan), plan.train.hang_timeout)
    answer = answer or {"problem": "the process that measured it ended early"}
    if "error" in answer:
        raise TaskError(f"task._target_={plan.task.target}: {answer['error']}")
    known = [value_from_json(Forecast, fields) for fields in answer.get("forecasts", ())] or plan.strategy.forecasts
    forecasts = tuple(
        replace(each, least_bytes=least_bytes(plan, each.sync)) if each.peak_bytes is None else each for each in known
    )
    problem, memory = answer.get("problem"), _rank_memory(plan, answer.get("device_bytes"))
    note = ""
    if problem:
        why = f"{str(problem).rstrip('.')}. {least_note(plan, memory)}".rstrip()
        note = f"The memory of each sync policy is unknown, and activations were not considered: {why}"
    elif choose and memory is None and plan.cluster.kind == ClusterKind.elsewhere:
        note = "It is unknown which policies fit into the memory of the hosts: name their GPU (cluster.gpu=h100)."
    elif choose and memory is None:
        note = "No GPU is visible here, so it is unknown which policies fit into its memory."
    if note:
        plan = plan.with_notes([note])
    if plan.train.compile and any(forecast.peak_bytes is not None for forecast in forecasts):
        plan = plan.with_notes([COMPILED_NOTE])
    if not forecasts:
        return plan
    strategy = replace(plan.strategy, memory_bytes=memory, forecasts=forecasts)
    if choose and memory is not None:
        strategy = with_memory(strategy, forecasts, memory)
    plan = replace(plan, strategy=strategy)
    return plan.with_notes(excess_notes(plan))


def _traced_parts(plan: RunPlan) -> dict[str, Any]:
    """Return the parts of ``plan`` that its traces depend on, beside the seed."""
    kept = part(plan, "memory")
    del kept["strategy.sync"]  # each policy is traced
    return kept | {"task": dataclasses.asdict(plan.task)}


def _rank_memory(plan: RunPlan, device_bytes: int | None) -> int | None:
    """Return the bytes of memory of one rank's device; None if it is not known.

    Args:
        device_bytes: memory of this machine's GPU; None without one.
    """
    if plan.cluster.gpu is not None:
        return find_gpu(plan.cluster.gpu).usable_bytes
    if plan.cluster.kind == ClusterKind.elsewhere:
        return None
    if plan.cluster.device is Device.cuda:
        return None if device_bytes is None else device_bytes - OVERHEAD_BYTES
    return free_host_bytes() // plan.cluster.workers_per_node
