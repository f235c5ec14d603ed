"""Processes that measure a planned job on this machine, one for each rank of a host. No torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from launcher.config.schema import Sync
from launcher.plan.host import allowed_env
from launcher.plan.run_plan import RunPlan
from launcher.rundir.files import object_from_json

MODULE = "launcher.train.inspection.step_measurement"
HOST = "127.0.0.1"
TIMEOUT_S, COMPILER_S = 150.0, 600.0  # seconds of a whole measurement; additionally with train.compile


def environment_of(plan: RunPlan) -> dict[str, str]:
    """Return the environment of the job's workers."""
    return plan.env.default | allowed_env(os.environ, plan.env.allow) | plan.env.set


def run_ranks(plan: RunPlan, policies: Sequence[Sync], ranks: int, budget_s: float) -> list[dict[str, Any]]:
    """Run the processes, and return the answer of each; of one that has failed, it is the only one.

    They end when this process ends, however that happens, and leave no file.
    """
    alone = plan.cluster.nodes > 1
    cwd = plan.cluster.cwd if Path(plan.cluster.cwd).is_dir() else None
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=max(128, ranks)))
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(ranks)]
        stack.callback(_kill, processes)
        port = listener.getsockname()[1]
        for number, file in enumerate(files):
            request = {
                "plan": plan.to_json(), "policies": policies, "number": number, "ranks": ranks,
                "collectives": not alone, "port": port, "listener": None if number else listener.fileno(),
                "budget_s": budget_s,
            }  # fmt: skip
            of_rank = {
                "RANK": 0 if alone else number, "WORLD_SIZE": plan.batch.world_size,
                "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": HOST, "MASTER_PORT": port,
                # the ranks meet in the store that process 0 serves
                "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
            }  # fmt: skip
            question = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            json.dump(request, question)
            question.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, f"/dev/fd/{file.fileno()}", str(os.getpid())],
                env=environment_of(plan) | {name: str(value) for name, value in of_rank.items()},
                cwd=cwd,
                stdin=question,  # no pipe, which a process that ends early breaks and a long plan fills
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which kills the others
                pass_fds=(file.fileno(), *(() if number else (listener.fileno(),))),
            )
            processes.append(process)
        return _collect(processes, files, TIMEOUT_S + (COMPILER_S if plan.train.compile else 0.0))


def _collect(
    processes: Sequence[subprocess.Popen[bytes]], files: Sequence[IO[str]], limit_s: float
) -> list[dict[str, Any]]:
    """Wait for the answers of all processes, or for one that has failed."""
    end, answers = time.monotonic() + limit_s, dict[int, dict[str, Any]]()
    while len(answers) < len(processes):
        for number, (process, file) in enumerate(zip(processes, files, strict=True)):
            if number in answers or process.poll() is None:
                continue
            file.seek(0)
            answer = object_from_json(file.read()) or {
                "problem": f"a process that measured it ended with status {process.returncode}"
            }
            if "problem" in answer:
                return [answer]
            answers[number] = answer
        if time.monotonic() > end:
            return [{"problem": f"the measurement took more than {limit_s:.0f} s"}]
        time.sleep(0.02)
    return [answers[number] for number in range(len(processes))]


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
