"""Watchdog: follows this host's workers, requests the stacks of hanging ones, and ends the attempt.

Each agent posts the progress of its ranks. Once the ranks of node 0 stop moving, its agent compares all ranks and
decides which one hangs, because all others wait for that one. The hanging rank is killed, and torchrun then handles it
as any other dead worker.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from launcher import heartbeat
from launcher.launch import hang_verdict
from launcher.launch.hang_verdict import Hang, RankState, StackReport
from launcher.launch.rendezvous import AgentStore, StoreLost
from launcher.launch.stacks import request_all_stacks
from launcher.plan.launch_plan import HostPosition
from launcher.plan.run_plan import RunPlan
from launcher.process import has_variable, living_children, wait_until
from launcher.rundir import records

_LONGEST_INTERVAL_S = 5.0
_STACKS_WITHIN_S = 15.0


@dataclass
class _Attempt:
    """Watch state of the current attempt.

    Args:
        ranks: (rank, log) by local rank.
        pids: process ids of the living workers by rank.
        progress: last progress by rank.
        quiet_s: seconds without progress, by rank. Like ``silent_s`` it only counts time in which this process ran.
        messages: last message by node.
        silent_s: seconds without a new message, by node.
        checks: number of checks so far.
        requests: number of requests for stacks so far.
        over: True once the attempt has a verdict, or node 0 is gone.
    """

    number: int
    ranks: Mapping[int, tuple[int, Path]]
    pids: dict[int, int] = field(default_factory=dict[int, int])
    progress: dict[int, heartbeat.Progress] = field(default_factory=dict[int, heartbeat.Progress])
    quiet_s: dict[int, float] = field(default_factory=dict[int, float])
    messages: dict[int, str] = field(default_factory=dict[int, str])
    silent_s: dict[int, float] = field(default_factory=dict[int, float])
    checks: int = 0
    requests: int = 0
    over: bool = False

    def key(self, name: str, node: int | None = None) -> str:
        return f"{self.number}/{name}" + ("" if node is None else f"/{node}")


class NoWatch:
    """Null object: hang detection is off."""

    last: Hang | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def begin(self, ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:  # noqa: ARG002
        return {}

    def hang_of(self, pid: int) -> Hang | None: ...


class HangWatch(threading.Thread):
    """Thread that watches for hangs while the context is open. ``last``: newest hang found, on any host."""

    def __init__(self, plan: RunPlan, place: HostPosition, timeout_s: float, stop_signal: Callable[[], object]) -> None:
        """Create the watch. ``stop_signal``: not None once the workers must stop; then another time limit applies."""
        super().__init__(daemon=True)
        self._plan, self._node, self._stop_signal, self._timeout_s = plan, place.node, stop_signal, timeout_s
        self._every_s = min(_LONGEST_INTERVAL_S, timeout_s / 8)
        self._host = socket.gethostname()
        self._store = AgentStore(place, plan.cluster.nodes)
        self._file = os.memfd_create("launcher-progress")
        os.ftruncate(self._file, heartbeat.size_of(plan.cluster.workers_per_node))
        self._memory = mmap.mmap(self._file, 0)
        self._attempt: _Attempt | None = None
        self._numbers = 0
        self._killed: dict[int, Hang] = {}
        self._over = threading.Event()
        self.last: Hang | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join(_STACKS_WITHIN_S)
        os.close(self._file)

    def begin(self, ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
        """Start watching a new attempt, after the old workers are gone and before the new ones start.

        Args:
            ranks: (rank, log) by local rank.

        Returns:
            The value of the environment variable PROGRESS by local rank.
        """
        self._memory[:] = bytes(len(self._memory))
        self._attempt = _Attempt(self._numbers, ranks)
        self._numbers += 1
        return {local_rank: heartbeat.address(self._file, local_rank) for local_rank in ranks}

    def hang_of(self, pid: int) -> Hang | None:
        """Return the hang for which ``pid`` was killed, or None."""
        return self._killed.get(pid)

    def run(self) -> None:
        last_check = time.monotonic()
        while not self._over.wait(self._every_s):
            now = time.monotonic()
            # a scheduler that suspends a job stops this process too: that time says nothing about a worker
            passed_s, last_check = min(now - last_check, 2 * self._every_s), now
            attempt = self._attempt
            if attempt is None or attempt.over or self._stop_signal() is not None:
                continue
            try:
                self._check(attempt, passed_s)
            except StoreLost:  # node 0 is gone; `launch` notices that by itself
                attempt.over = True
            except OSError as error:  # the next check may succeed
                _print(f"Watching for ranks that hang: {error}")

    def _check(self, attempt: _Attempt, passed_s: float) -> None:
        attempt.pids = self._pids(attempt)
        states = self._rank_states(attempt, passed_s)
        attempt.checks += 1
        self._store.post(attempt.key("states", self._node), f"{attempt.checks}\n{hang_verdict.to_json(states)}")
        verdict = self._follow_node_0(attempt) if self._node else self._decide(attempt, states, passed_s)
        # the decision took seconds, in which the workers may have been restarted or asked to stop
        if verdict is not None and attempt is self._attempt and not self._over.is_set() and self._stop_signal() is None:
            self._end_attempt(attempt, verdict)

    def _pids(self, attempt: _Attempt) -> dict[int, int]:
        """Return the process ids of the living workers by rank."""
        addresses = {rank: heartbeat.address(self._file, local_rank) for local_rank, (rank, _) in attempt.ranks.items()}
        return {
            rank: pid
            for pid in living_children()
            for rank, address in addresses.items()
            if has_variable(pid, heartbeat.PROGRESS, address)
        }

    def _rank_states(self, attempt: _Attempt, passed_s: float) -> list[RankState]:
        states: list[RankState] = []
        for local_rank, (rank, _) in attempt.ranks.items():
            progress = heartbeat.read_progress(self._memory, local_rank)
            moved = attempt.progress.get(rank) != progress
            attempt.progress[rank] = progress
            attempt.quiet_s[rank] = 0.0 if moved else attempt.quiet_s[rank] + passed_s
            if rank in attempt.pids:
                states.append(RankState(rank, self._node, self._host, progress, attempt.quiet_s[rank]))
        return states

    def _decide(self, attempt: _Attempt, own: list[RankState], passed_s: float) -> Hang | None:
        """Return the verdict if some rank hangs; runs on node 0 only."""
        others = range(1, self._plan.cluster.nodes)
        messages = self._store.read([attempt.key("states", node) for node in others])
        for node in others:
            message = messages.get(attempt.key("states", node), "")
            is_new = attempt.messages.get(node) != message
            attempt.messages[node] = message
            attempt.silent_s[node] = 0.0 if is_new else attempt.silent_s[node] + passed_s
        if own and max(state.quiet_s for state in own) < self._timeout_s:
            return None  # a hanging rank would hold up all of them
        received = [hang_verdict.from_json(message.partition("\n")[2]) for message in messages.values()]
        states = [*own, *(state for host in received for state in host)]
        silent = [node for node in others if attempt.silent_s[node] >= self._timeout_s]
        if silent and own:
            host = next((state.host for state in states if state.node == silent[0]), f"host {silent[0]}")
            victim = min(own, key=lambda state: state.progress.position)
            return hang_verdict.silent_host(silent[0], host, victim, self._timeout_s)
        if len(messages) < len(others):  # some node has not posted yet
            return None
        behind = hang_verdict.suspects(states, self._timeout_s)
        if not behind:
            return None
        answers = self._request_stacks(attempt, behind)
        if any(answer.moved for answer in answers):
            return None
        return hang_verdict.judge_hang(behind, answers, self._timeout_s)

    def _request_stacks(self, attempt: _Attempt, behind: list[RankState]) -> list[StackReport]:
        """Request the stacks of ``behind`` from the nodes on which they run."""
        attempt.requests += 1
        beats = [(state.rank, state.progress.beats) for state in behind]
        self._store.post(attempt.key("request"), json.dumps([attempt.requests, beats]))
        answers = self._answers(attempt, beats)
        keys = {attempt.key(f"stacks {attempt.requests}", state.node) for state in behind if state.node}
        wait_until(lambda: len(self._store.read(keys)) == len(keys), _STACKS_WITHIN_S + self._every_s)
        texts = self._store.read(keys).values()
        return answers + [StackReport(**fields) for text in texts for fields in json.loads(text)]

    def _follow_node_0(self, attempt: _Attempt) -> Hang | None:
        """Answer a request for stacks and return node 0's verdict, if any; runs on nodes other than 0."""
        messages = self._store.read([attempt.key("request"), attempt.key("verdict")])
        if (verdict := messages.get(attempt.key("verdict"))) is not None:
            return Hang.from_json(verdict)
        if (request := messages.get(attempt.key("request"))) is not None:
            number, beats = json.loads(request)
            if number != attempt.requests:
                text = json.dumps([dataclasses.asdict(answer) for answer in self._answers(attempt, beats)])
                self._store.post(attempt.key(f"stacks {number}", self._node), text)
                attempt.requests = number
        return None

    def _answers(self, attempt: _Attempt, beats: Iterable[Sequence[int]]) -> list[StackReport]:
        """Return the answers of those ranks that run on this host; the stacks go to their logs.

        Args:
            beats: (rank, beat count that node 0 has seen); a rank with another count has moved since.
        """
        expected = {rank: count for rank, count in beats if rank in attempt.pids}
        workers = {rank: (local_rank, log) for local_rank, (rank, log) in attempt.ranks.items() if rank in expected}
        stacks = request_all_stacks({rank: (attempt.pids[rank], log) for rank, (_, log) in workers.items()})
        answers: list[StackReport] = []
        for rank, answer in stacks.items():
            progress = heartbeat.read_progress(self._memory, workers[rank][0])
            shown = dataclasses.replace(answer, role=progress.role, thread=progress.thread)
            moved = progress.beats != expected[rank]
            answers.append(StackReport(rank, shown.text, shown.location, shown.waits, shown.why, moved))
        return answers

    def _end_attempt(self, attempt: _Attempt, verdict: Hang) -> None:
        """Kill the hanging rank, which ends the attempt on all hosts, and publish the verdict (one per attempt).

        The kill comes before the report: a full disk must not keep the hanging rank alive.
        """
        attempt.over = True
        self.last = verdict
        if (pid := attempt.pids.get(verdict.victim)) is not None:
            self._killed[pid] = verdict
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if self._node == 0:
                self._store.post(attempt.key("verdict"), verdict.to_json())
        finally:
            _print(f"{verdict.sentence}\n{verdict.stack}")
            if self._node == 0:
                with suppress(OSError):
                    records.note_event(self._plan.paths, "hang", **verdict.entry, what=verdict.sentence)


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
