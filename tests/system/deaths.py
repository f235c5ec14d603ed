"""A run that is killed in many ways and resumed each time, for tests.system.chaos."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launcher.extensions.drill.processes import describe_survivors, kill_all, processes_of, workers_of
from launcher.extensions.drill.verdict import RecordLines
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths
from tests.helpers import launch_command, patience
from tests.infra import warm

EVERY = 4
STEPS_PER_DEATH = 12  # including those that pass until the death is noticed
WAIT_S = patience(300)
JOB = (
    f"task.corpus={sysconfig.get_path('stdlib')}/asyncio", "task.width=32", "task.depth=2", "task.heads=2",
    "task.seq_len=64", "task.eval_samples=16", "batch.global_size=32", "batch.micro_size=8", "train.deterministic=true",
    "train.eval_every=40", f"checkpoint.every={EVERY}", "checkpoint.keep=3", "cluster.device=cpu",
    "cluster.workers_per_node=2", "cluster.max_restarts=1000", "cluster.grace_s=20", "wandb.mode=offline",
)  # fmt: skip


@dataclass
class Chaos:
    """Run of a small job in ``directory``, with random deaths.

    Args:
        deaths: number of deaths.
        only: kinds of death; empty: all. In each round, each of them once, in random order.
        last: kind that ends each round.
        job: overrides of the run.
        done: kind, step and description of each death so far.
        problems: descriptions of what went wrong.
        damaged: number of checkpoints that were damaged.
    """

    directory: Path
    deaths: int
    rng: random.Random
    only: Collection[str] = ()
    last: str = ""
    job: Sequence[str] = JOB
    done: list[tuple[str, int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damaged: int = 0

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.directory / "runs" / "chaos")
        # twice as many as the deaths need: a run that is quicker than this process would be over before the last one
        self.steps = 2 * STEPS_PER_DEATH * (self.deaths + 2)

    # -- the run and its processes

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.directory / "launch.log").open("ab") as log:
            return warm.Popen(
                launch_command(*words), cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def resume(self) -> None:
        self.process = self.start("resume", "--quiet", "chaos")
        self.began = time.monotonic()

    def run_id(self) -> str:
        return (read_json(self.paths.plan) or {}).get("run", {}).get("id", "-")

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.run_id())

    def agent(self) -> int | None:
        return self.of_command("launcher.launch.agent")

    def worker(self) -> int | None:
        workers = workers_of(self.run_id())
        return workers[self.rng.choice(sorted(workers))].pid if workers else None

    def loader(self) -> int | None:
        """A child of a worker that has loaded its code: torch's own helpers are none."""
        loaders: list[int] = []
        with suppress(psutil.Error):
            children = [child for worker in workers_of(self.run_id()).values() for child in worker.children()]
            loaders = [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        return self.rng.choice(loaders) if loaders else None

    def mirror(self) -> int | None:
        return self.of_command("launcher.trackers.mirror")

    def of_command(self, module: str) -> int | None:
        with suppress(psutil.Error):
            return next((process.pid for process in self.processes() if module in process.cmdline()), None)
        return None

    def wait(self, condition: Callable[[], Any], what: str, every_s: float = 0.1) -> bool:
        """Return True if ``condition`` became true before the run ended. Raises TimeoutError if the run hangs."""
        end = time.monotonic() + WAIT_S
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            if time.monotonic() > end:
                raise TimeoutError(f"waited {WAIT_S} s for {what}, at step {self.step}")
            time.sleep(every_s)
        return True

    @property
    def step(self) -> int:
        return RecordLines.of(self.paths.metrics).step

    # -- deaths: each returns a description of what it did; empty if its victim did not exist

    def kill(self, victim: Callable[[], int | None], number: int = signal.SIGKILL) -> str:
        if (pid := victim()) is None:
            return ""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return ""
        return f"{signal.Signals(number).name} to {getattr(victim, '__name__', 'launch')}"

    def launch(self) -> int | None:
        return self.process.pid if self.process.poll() is None else None

    def tree(self) -> str:
        self.kill(self.launch)
        count, left = kill_all(self.run_id())
        self.problems += [describe_survivors(left)] if left else []
        return f"SIGKILL to all {count}"

    def twice(self) -> str:
        first = self.kill(self.rng.choice([self.worker, self.loader]))
        pause = self.rng.uniform(0, 2)
        time.sleep(pause)
        second = self.rng.choice([self.tree, lambda: self.kill(self.worker), lambda: self.kill(self.agent)])()
        return f"{first}, {pause:.1f} s later {second or 'nothing'}" if first else second

    def damage(self) -> str:
        """Kill everything, then damage the newest checkpoint if there is an older one."""
        did = self.tree()
        self.process.wait()
        checkpoints = self.paths.committed_checkpoints()
        if len(checkpoints) < 2:
            return did
        file = self.rng.choice(sorted(path for path in checkpoints[0].iterdir() if path.stat().st_size))
        content = bytearray(file.read_bytes())
        at = self.rng.randrange(max(1, len(content) - 1))  # a text without its last newline is not damaged
        self.damaged += 1
        if self.rng.random() < 0.5:
            file.write_bytes(content[:at])
            return f"{did}, {checkpoints[0].name}/{file.name} cut short"
        content[at] ^= 1 << self.rng.randrange(8)
        file.write_bytes(content)
        return f"{did}, a bit of {checkpoints[0].name}/{file.name} flipped"

    def saving(self) -> bool:
        writing = re.compile(r"\.step_\d+\.[\d.]+\.partial")  # a checkpoint that is being removed has another name
        checkpoints = self.paths.checkpoints.iterdir() if self.paths.checkpoints.is_dir() else ()
        return any(writing.fullmatch(path.name) for path in checkpoints)

    def while_saving(self) -> str:
        if not self.wait(self.saving, "a save", 0.01):
            return ""
        time.sleep(self.rng.uniform(0, 0.03))
        return self.rng.choice([self.tree, lambda: self.kill(self.worker), lambda: self.kill(self.agent)])()

    def while_starting(self) -> str:
        """Kill everything, and again at a random time of the start that follows."""
        did = self.tree()
        self.process.wait()
        self.resume()
        pause = self.rng.uniform(0.1, 4)
        time.sleep(pause)
        victims = [self.tree, *(lambda v=v: self.kill(v) for v in (self.launch, self.agent, self.worker))]
        again = self.rng.choice(victims)() or self.tree()
        return f"{did}; {pause:.1f} s after the start {again}"

    def kinds(self) -> dict[str, tuple[Callable[[], str], bool]]:
        """Return the function for each kind of death, and whether the run continues without a resume."""
        return {
            "a worker": (lambda: self.kill(self.worker), True),
            "the agent": (lambda: self.kill(self.agent), False),
            "launch": (lambda: self.kill(self.launch), False),
            "the tree": (self.tree, False),
            "a loader": (lambda: self.kill(self.loader), True),
            "the mirror": (lambda: self.kill(self.mirror), True),
            "SIGTERM": (lambda: self.kill(self.launch, signal.SIGTERM), False),
            "SIGINT": (lambda: self.kill(self.launch, signal.SIGINT), False),
            "two in a row": (self.twice, False),
            "checkpoint damaged": (self.damage, False),
            "in a save": (self.while_saving, False),
            "at the start": (self.while_starting, False),
        }

    # -- the sequence of deaths

    def run(self) -> None:
        self.process = self.start("train", *self.job, "run.name=chaos", f"train.steps={self.steps}", "--quiet")
        self.began = time.monotonic()
        kinds = {kind: act for kind, act in self.kinds().items() if kind in self.only or not self.only}
        order: list[str] = []
        while len(order) < self.deaths:  # all kinds equally often
            order += sorted(self.rng.sample(list(kinds), len(kinds)), key=lambda kind: kind == self.last)
        for number, kind in enumerate(order[: self.deaths]):
            at = self.step
            left = max(1, (self.steps // 2 - STEPS_PER_DEATH - at) // (self.deaths - number))
            target = at + self.rng.randint(1, min(left, STEPS_PER_DEATH))
            if not self.wait(lambda target=target: self.step >= target, f"step {target}"):
                self.resume_after_failure(f"after {self.done[-1][2] if self.done else 'the start'}")
                self.wait(lambda target=target: self.step >= target, f"step {target}")
            time.sleep(self.rng.uniform(0, 0.1))
            act, by_itself = kinds[kind]
            at = self.step
            did = act()
            if not did:
                self.problems.append(f"{kind} at step {at}: there was no process to kill")
                continue
            self.done.append((kind, at, did))
            print(f"{number + 1:4d}  step {at:5d}  {kind}: {did}", flush=True)
            if not by_itself:
                self.settle(kind)
        while self.process.wait(WAIT_S) != 0:
            self.resume_after_failure("towards the end")

    def settle(self, kind: str) -> None:
        """Resume the run if `launch` did not survive the death."""
        if kind in ("two in a row", "in a save", "at the start"):
            before = RecordLines.of(self.paths.metrics)
            ended = lambda: self.process.poll() is not None or RecordLines.of(self.paths.metrics).file != before.file  # noqa: E731
            self.wait(ended, "what follows a death")
            if self.process.poll() is None:
                return
        self.process.wait(WAIT_S)
        if (read_json(self.paths.summary) or {}).get("verdict") != "done":
            # at once, like a user who does not check for processes that are still saving
            self.resume()

    def resume_after_failure(self, when: str) -> None:
        """Record that the run ended when it should not have, and resume it."""
        status = self.process.returncode
        if (read_json(self.paths.summary) or {}).get("verdict") == "done":
            raise RuntimeError(f"the run was over at step {self.step}, {len(self.done)} deaths after its start")
        self.problems.append(f"`launch` ended with status {status} {when}")
        self.resume()
