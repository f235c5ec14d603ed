"""What the plan must know of the task: samples, parameters, gradient bytes. Found without importing torch here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Protocol, cast

from launcher.errors import ConfigError, TaskError
from launcher.fromjson import build
from launcher.plan import TaskPlan
from launcher.train.task import load_task

_BUNDLED = "launcher.tasks."


class HasFacts(Protocol):
    def facts(self) -> dict[str, int]: ...


def describe_task(config: dict[str, Any], cwd: str, *, shards: bool, seed: int) -> TaskPlan:
    """Look at the task that the config names.

    A bundled task says it itself, from arithmetic. A user's class is imported in a process of its own.

    Args:
        shards: whether the task's shard units matter, and must be right.
        seed: of the job: the task is built under it here as it is in training.

    Raises:
        ConfigError: no task is named.
        TaskError: it cannot be imported, constructed or used; the message says why.
    """
    params = {name: value for name, value in config.items() if name != "_target_"}
    target = config.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(
            "task._target_", target, "is not set.", "Name the task's class: task._target_=my_tasks.MyTask."
        )
    if target.startswith(_BUNDLED):
        try:
            facts = cast("HasFacts", load_task(target, params, [])).facts()
        except (TypeError, ValueError) as error:  # a parameter of another type than the class's
            raise TaskError(f"task: {target} with {params}: {error}.") from None
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
        )
    request = {"target": target, "params": params, "search_path": [cwd], "shards": shards, "seed": seed}
    result = ask("launcher.train.probe", json.dumps(request))
    if result is None:
        raise TaskError(f"task._target_={target}: looking at the task ended the process that looked.")
    if "error" in result:
        raise TaskError(result["error"])
    return build(TaskPlan, result["task"])


def ask(module: str, question: str) -> dict[str, Any] | None:
    """Return the JSON object that ``python -m module FILE PARENT_PID`` writes into FILE for ``question`` on its
    standard input, or None if it ends without an answer.

    A separate process, because torch and the user's code must not be imported here. It ends with this one, whatever
    kills this one, and the file has no name that could be left behind.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        subprocess.run(
            [sys.executable, "-P", "-m", module, f"/dev/fd/{answer.fileno()}", str(os.getpid())],
            input=question,
            text=True,
            start_new_session=True,  # this process handles Ctrl-C: it kills the other one, which prints no traceback
            stdout=sys.stderr,  # what the user's code prints must not end up in `launch plan --json`
            pass_fds=(answer.fileno(),),
            check=False,
        )
        text = answer.read()
    return json.loads(text) if text else None
