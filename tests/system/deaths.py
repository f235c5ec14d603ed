"""One run that dies in many ways, and is begun again each time: what tests.system.chaos is made of."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.drill.processes import Process, describe_survivors, kill_all, processes_of
from launcher.drill.verdict import Record
from launcher.process import children
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths
from tests.helpers import launch_command, patience

EVERY = 4
PACE = 12  # steps a death: those that pass until it is noticed included
WAIT_S = patience(300)
JOB = (
    f"task.corpus={sysconfig.get_path('stdlib')}/asyncio", "task.width=32", "task.depth=2", "task.heads=2",
    "task.seq_len=64", "task.eval_samples=16", "batch.global_size=32", "batch.micro_size=4", "train.deterministic=true",
    "train.eval_every=40", f"checkpoint.every={EVERY}", "checkpoint.keep=3", "cluster.device=cpu",
    "cluster.workers_per_node=2", "cluster.max_restarts=1000", "cluster.grace_s=20", "wandb.mode=offline",
)  # fmt: skip


@dataclass
class Chaos:
    """``only``: these kinds of death; all where it is empty. ``book``: a line a death: its kind, the step at which it
    came, and what was done. ``wrong``: what must not be."""

    place: Path
    deaths: int
    chance: random.Random
    only: Collection[str] = ()
    book: list[tuple[str, int, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.place / "runs" / "chaos")
        self.steps = PACE * (self.deaths + 2)

    # -- the run and its processes

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.place / "launch.log").open("ab") as log:
            return subprocess.Popen(
                launch_command(*words), cwd=self.place, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def resume(self) -> None:
        self.job = self.begin("resume", "--quiet", "chaos")
        self.began = time.monotonic()

    def run_id(self) -> str:
        return (read_json(self.paths.plan) or {}).get("run", {}).get("id", "-")

    def processes(self) -> list[Process]:
        return processes_of(self.run_id(), self.launch())

    def agent(self) -> int | None:
        return self.of_role("agent")

    def worker(self) -> int | None:
        return self.of_role(f"rank {self.chance.randrange(2)}")

    def of_role(self, role: str) -> int | None:
        return next((process.pid for process in self.processes() if process.role == role), None)

    def loader(self) -> int | None:
        """A child of a worker that has loaded its code: torch's own helpers are none."""
        processes = self.processes()
        below = {pid for process in processes if process.role.startswith("rank") for pid in children(process.pid)}
        loaders = [p.pid for p in processes if p.pid in below and "resource_tracker" not in p.command]
        return self.chance.choice(loaders) if loaders else None

    def mirror(self) -> int | None:
        return next((p.pid for p in self.processes() if "launcher.report.trackers" in p.command), None)

    def wait(self, condition: Callable[[], Any], what: str) -> bool:
        """Whether ``condition`` came true before the run was over. A run that hangs ends the chaos."""
        end = time.monotonic() + WAIT_S
        while not condition():
            if self.job.poll() is not None:
                return bool(condition())
            if time.monotonic() > end:
                raise TimeoutError(f"waited {WAIT_S} s for {what}, at step {self.step}")
            time.sleep(0.01)
        return True

    @property
    def step(self) -> int:
        return Record.of(self.paths.metrics).step

    # -- deaths: each returns what it did, in words; empty where its victim was not there

    def kill(self, victim: Callable[[], int | None], number: int = signal.SIGKILL) -> str:
        if (pid := victim()) is None:
            return ""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return ""
        return f"{signal.Signals(number).name} to {getattr(victim, '__name__', 'launch')}"

    def launch(self) -> int | None:
        return self.job.pid if self.job.poll() is None else None

    def tree(self) -> str:
        count, left = kill_all(self.run_id(), self.launch())
        self.wrong += [describe_survivors(left)] if left else []
        return f"SIGKILL to all {count}"

    def twice(self) -> str:
        first = self.kill(self.chance.choice([self.worker, self.loader]))
        pause = self.chance.uniform(0, 2)
        time.sleep(pause)
        second = self.chance.choice([self.tree, lambda: self.kill(self.worker), lambda: self.kill(self.agent)])()
        return f"{first}, {pause:.1f} s later {second or 'nobody'}" if first else second

    def damage(self) -> str:
        """All is killed; then the newest checkpoint is not what it was, as long as there is one before it."""
        did = self.tree()
        self.job.wait()
        checkpoints = self.paths.committed_checkpoints()
        if len(checkpoints) < 2:
            return did
        file = self.chance.choice(sorted(path for path in checkpoints[0].iterdir() if path.stat().st_size))
        content = bytearray(file.read_bytes())
        at = self.chance.randrange(max(1, len(content) - 1))  # a text without its last newline says the same
        self.refusals += 1
        if self.chance.random() < 0.5:
            file.write_bytes(content[:at])
            return f"{did}, {checkpoints[0].name}/{file.name} cut short"
        content[at] ^= 1 << self.chance.randrange(8)
        file.write_bytes(content)
        return f"{did}, a bit of {checkpoints[0].name}/{file.name} flipped"

    def saving(self) -> bool:
        writing = re.compile(r"\.step_\d+\.[\d.]+\.partial")  # what is taken away has another name
        places = self.paths.checkpoints.iterdir() if self.paths.checkpoints.is_dir() else ()
        return any(writing.fullmatch(path.name) for path in places)

    def while_saving(self) -> str:
        if not self.wait(self.saving, "a save"):
            return ""
        time.sleep(self.chance.uniform(0, 0.03))
        return self.chance.choice([self.tree, lambda: self.kill(self.worker), lambda: self.kill(self.agent)])()

    def while_starting(self) -> str:
        """Everything dies; what comes after it dies before its first step, at whatever it is doing."""
        did = self.tree()
        self.job.wait()
        self.resume()
        pause = self.chance.uniform(0.1, 4)
        time.sleep(pause)
        victims = [self.tree, *(lambda v=v: self.kill(v) for v in (self.launch, self.agent, self.worker))]
        again = self.chance.choice(victims)() or self.tree()
        return f"{did}; {pause:.1f} s after the start {again}"

    def kinds(self) -> dict[str, tuple[Callable[[], str], bool]]:
        """Each with whether the run goes on by itself."""
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

    # -- the whole of it

    def run(self) -> None:
        self.job = self.begin("train", *JOB, "run.name=chaos", f"train.steps={self.steps}", "--quiet")
        self.began = time.monotonic()
        kinds = {kind: act for kind, act in self.kinds().items() if kind in self.only or not self.only}
        order: list[str] = []
        while len(order) < self.deaths:  # each as often as the others
            order += self.chance.sample(list(kinds), len(kinds))
        for number, kind in enumerate(order[: self.deaths]):
            at = self.step
            left = max(1, (self.steps - PACE - at) // (self.deaths - number))
            target = at + self.chance.randint(1, min(left, PACE))
            if not self.wait(lambda target=target: self.step >= target, f"step {target}"):
                self.go_on(f"after {self.book[-1][2] if self.book else 'the start'}")
                self.wait(lambda target=target: self.step >= target, f"step {target}")
            time.sleep(self.chance.uniform(0, 0.1))
            act, by_itself = kinds[kind]
            at = self.step
            did = act()
            if not did:
                self.wrong.append(f"{kind} at step {at}: there was nobody to kill")
                continue
            self.book.append((kind, at, did))
            print(f"{number + 1:4d}  step {at:5d}  {kind}: {did}", flush=True)
            if not by_itself:
                self.settle(kind)
        while self.job.wait(WAIT_S) != 0:
            self.go_on("towards the end")

    def settle(self, kind: str) -> None:
        """After a death that `launch` need not have survived: where it did not, the run is resumed."""
        if kind in ("two in a row", "in a save", "at the start"):
            before = Record.of(self.paths.metrics)
            ended = lambda: self.job.poll() is not None or Record.of(self.paths.metrics).file != before.file  # noqa: E731
            self.wait(ended, "what follows a death")
            if self.job.poll() is None:
                return
        self.job.wait(WAIT_S)
        if (read_json(self.paths.summary) or {}).get("verdict") != "done":
            # a user does not look whether something of it is still about to save
            self.resume()

    def go_on(self, when: str) -> None:
        """It ended where it should not have."""
        status = self.job.returncode
        if (read_json(self.paths.summary) or {}).get("verdict") == "done":
            raise RuntimeError(f"the run was over at step {self.step}, {len(self.book)} deaths after its start")
        self.wrong.append(f"`launch` ended with status {status} {when}")
        self.resume()
