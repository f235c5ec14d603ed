"""This machine: make the run's directory, start the node agent, follow it to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from launcher.errors import EXIT_FAILED, EXIT_INTERRUPTED, SiteError
from launcher.paths import RunPaths, read_json, write_json, write_text
from launcher.plan import LaunchPlan
from launcher.site import WANDB_ENV, allowed_env

POLL_S = 0.1


class Display(Protocol):
    """Who shows a run while it is under way."""

    def refresh(self) -> None:
        """Called several times a second: show what the run's files have gained."""
        ...

    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """How a run ended. ``summary``: what summary.json says."""

    status: int
    summary: dict[str, Any]


def create(plan: LaunchPlan, config_yaml: str) -> None:
    """Make the run's directory, with its plan and config.

    Raises:
        SiteError: it exists, or cannot be made; nothing is left behind then.
    """
    paths = plan.paths
    try:
        paths.root.parent.mkdir(parents=True, exist_ok=True)
        paths.root.mkdir()
    except FileExistsError:
        occupied = paths.root if paths.root.exists() else paths.root.parent
        raise SiteError(
            f"run.name={plan.run.name}: {occupied} exists, and a run never writes into another one's directory.\n"
            "  Choose another run.name, or leave it out for a name of its own."
        ) from None
    except OSError as error:
        raise SiteError(
            f"run.dir: {paths.root} cannot be made: {error.strerror}.\n  Choose a run.dir that you may write to."
        ) from None
    paths.logs.mkdir()
    write_text(paths.config, config_yaml)
    plan.save()


def run(plan: LaunchPlan, display: Display) -> Verdict:
    """Run a created plan to its end. Ctrl-C asks the workers to stop after their window; a second one kills them."""
    paths = plan.paths
    asked: list[int] = []
    passed_on = 0

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        asked.append(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        agent = _start_agent(plan)
        while agent.poll() is None:
            display.refresh()
            if len(asked) > passed_on:
                passed_on = len(asked)
                # the workers and the mirror notice a killed agent by themselves
                agent.send_signal(signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
                if passed_on == 1:
                    display.say("Stopping at the end of this window. Ctrl-C again kills the workers at once.")
            time.sleep(POLL_S)
        display.refresh()
    finally:
        display.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # a second Ctrl-C, or one before the agent was up, ends it by the signal itself
    status = EXIT_INTERRUPTED if asked else agent.returncode
    return Verdict(status if status >= 0 else EXIT_FAILED, _summary(paths, status))


def _start_agent(plan: LaunchPlan) -> subprocess.Popen[bytes]:
    with plan.paths.node_log(0).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.cluster.agent", plan.run.dir, str(os.getpid())],
            env=allowed_env(os.environ, (*plan.env.allow, *WANDB_ENV)),
            cwd=plan.cluster.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C comes to this process, which passes it on in order
        )


def _summary(paths: RunPaths, status: int) -> dict[str, Any]:
    """What the job wrote, or, where it was killed before it could, what is known of it; written down then."""
    summary = read_json(paths.summary)
    if summary is None:
        summary = _verdict_without_words(paths, status)
        write_json(paths.summary, summary)
    return summary


def _verdict_without_words(paths: RunPaths, status: int) -> dict[str, Any]:
    if status == EXIT_INTERRUPTED:
        return {"verdict": "killed"}
    if status == 0:  # a script of the user's own writes no summary
        return {"verdict": "done"}
    failure = {
        "rank": None,
        "exit_code": status,
        "kind": None,
        "error": f"the node agent ended with status {status}",
        "traceback": None,
        "log": str(paths.node_log(0)),
    }
    return {"verdict": "killed" if status < 0 else "failed", "failure": failure}
