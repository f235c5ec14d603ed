"""Watchdog: follows this host's workers, requests the stacks of hanging ones, and ends the workers.

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
from typing import Any, Self

from launcher import heartbeat
from launcher.launch import flight_recorder, hang_verdict
from launcher.launch.flight_recorder import GroupTrace
from launcher.launch.hang_verdict import Hang, RankState, Stacks, request_all_stacks
from launcher.launch.rendezvous import AgentStore, StoreLost
from launcher.plan.launch_plan import HostPosition
from launcher.plan.run_plan import RunPlan
from launcher.process import has_variable, living_children, wait_until
from launcher.rundir import history
from launcher.rundir.files import value_from_json

_LONGEST_INTERVAL_S = 5.0
_STACKS_WITHIN_S = 15.0


@dataclass
class _WorkerStart:
    """Watch state of the current start of the workers.

    Args:
        ranks: (rank, log) by local rank.
        pids: process ids of the living workers by rank.
        observed: last value, and for how many seconds it has not changed, by name.
        checks: number of checks so far.
        requests: number of requests for stacks or traces so far.
        over: True once it has a verdict, or node 0 is gone.
    """

    number: int
    ranks: Mapping[int, tuple[int, Path]]
    pids: dict[int, int] = field(default_factory=dict[int, int])
    observed: dict[str, tuple[object, float]] = field(default_factory=dict[str, tuple[object, float]])
    checks: int = 0
    requests: int = 0
    over: bool = False

    def key(self, name: str, node: int | None = None) -> str:
        return f"{self.number}/{name}" + ("" if node is None else f"/{node}")

    def unchanged_s(self, name: str, value: object, passed_s: float) -> float:
        """Return for how many seconds ``value`` has not changed, counting only time in which this process ran."""
        before, quiet_s = self.observed.get(name, (None, 0.0))
        quiet_s = quiet_s + passed_s if value == before else 0.0
        self.observed[name] = value, quiet_s
        return quiet_s


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
        self._current: _WorkerStart | None = None
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
        """Watch the workers that are about to start; the earlier ones have ended.

        Args:
            ranks: (rank, log) by local rank.

        Returns:
            The value of the environment variable PROGRESS by local rank.
        """
        flight_recorder.make_pipes_directory()
        self._memory[:] = bytes(len(self._memory))
        self._current = _WorkerStart(self._numbers, ranks)
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
            start = self._current
            if start is None or start.over or self._stop_signal() is not None:
                continue
            try:
                self._check(start, passed_s)
            except StoreLost:  # node 0 is gone; `launch` notices that by itself
                start.over = True
            except OSError as error:  # the next check may succeed
                _print(f"Watching for ranks that hang: {error}")

    def _check(self, start: _WorkerStart, passed_s: float) -> None:
        start.pids = self._pids(start)
        states = self._rank_states(start, passed_s)
        start.checks += 1
        message = json.dumps([start.checks, [dataclasses.asdict(state) for state in states]])
        self._store.post(start.key("states", self._node), message)
        verdict = self._follow_node_0(start) if self._node else self._decide(start, states, passed_s)
        # the decision took seconds, in which the workers may have been restarted or asked to stop
        if verdict is not None and start is self._current and not self._over.is_set() and self._stop_signal() is None:
            self._end_workers(start, verdict)

    def _pids(self, start: _WorkerStart) -> dict[int, int]:
        """Return the process ids of the living workers by rank."""
        addresses = {rank: heartbeat.address(self._file, local_rank) for local_rank, (rank, _) in start.ranks.items()}
        return {
            rank: pid
            for pid in living_children()
            for rank, address in addresses.items()
            if has_variable(pid, heartbeat.PROGRESS, address)
        }

    def _rank_states(self, start: _WorkerStart, passed_s: float) -> list[RankState]:
        states: list[RankState] = []
        for local_rank, (rank, _) in start.ranks.items():
            progress = heartbeat.read_progress(self._memory, local_rank)
            quiet_s = start.unchanged_s(f"rank {rank}", progress, passed_s)
            if rank in start.pids:
                states.append(RankState(rank, self._node, self._host, progress, quiet_s))
        return states

    def _decide(self, start: _WorkerStart, own: list[RankState], passed_s: float) -> Hang | None:
        """Return the verdict if some rank hangs; runs on node 0 only."""
        key_of = {node: start.key("states", node) for node in range(1, self._plan.cluster.nodes)}
        messages = self._store.read(key_of.values())
        silent_s = {node: start.unchanged_s(key, messages.get(key, ""), passed_s) for node, key in key_of.items()}
        if own and max(state.quiet_s for state in own) < self._timeout_s:
            return None  # a hanging rank would hold up all of them
        received = [fields for message in messages.values() for fields in json.loads(message)[1]]
        states = [*own, *(value_from_json(RankState, fields) for fields in received)]
        silent = [node for node in key_of if silent_s[node] >= self._timeout_s]
        if silent and own:
            host = next((state.host for state in states if state.node == silent[0]), f"host {silent[0]}")
            victim = min(own, key=lambda state: state.progress.position)
            return hang_verdict.silent_host(silent[0], host, victim, self._timeout_s)
        if len(messages) < len(key_of):  # some node has not posted yet
            return None
        behind = hang_verdict.suspects(states, self._timeout_s)
        if not behind:
            return None
        found = flight_recorder.NO_TRACES
        if flight_recorder.PIPE in os.environ:  # what is queued on a GPU says more than how far the host is
            traces = {
                rank: [value_from_json(GroupTrace, group) for group in groups]
                for rank, groups in self._request(start, states, traces=True).items()
            }
            found = flight_recorder.compare_traces(traces, [state.rank for state in states])
        concerned = {*found.ranks, *found.unknown}
        others = [state for state in states if state.rank in concerned and state not in behind]
        if any(state.quiet_s < self._timeout_s for state in others):  # the ranks behind wait for one that moves
            return None
        answers = {
            rank: value_from_json(Stacks, fields)
            for rank, fields in self._request(start, [*behind, *others], traces=False).items()
        }
        if any(answer.moved for answer in answers.values()):
            return None
        return hang_verdict.judge_hang(behind, answers, self._timeout_s, others, found)

    def _request(self, start: _WorkerStart, ranks: list[RankState], *, traces: bool) -> dict[int, Any]:
        """Request the stacks of ``ranks``, or NCCL's traces, from their nodes. Return them by rank, as JSON values."""
        start.requests += 1
        beats = [(state.rank, state.progress.beats) for state in ranks]
        self._store.post(start.key("request"), json.dumps([start.requests, traces, beats]))
        texts = [self._response(start, beats, traces=traces)]
        missing = {start.key(f"response {start.requests}", state.node) for state in ranks if state.node}

        def complete() -> bool:
            new = self._store.read(missing)  # each once: together they are large
            texts.extend(new.values())
            missing.difference_update(new)
            return not missing

        wait_until(complete, _STACKS_WITHIN_S + self._every_s)
        return {int(rank): value for text in texts for rank, value in json.loads(text).items()}

    def _follow_node_0(self, start: _WorkerStart) -> Hang | None:
        """Answer a request for stacks or traces, and return node 0's verdict, if any; runs on nodes other than 0."""
        messages = self._store.read([start.key("request"), start.key("verdict")])
        if (verdict := messages.get(start.key("verdict"))) is not None:
            return Hang(**json.loads(verdict))
        if (request := messages.get(start.key("request"))) is not None:
            number, traces, beats = json.loads(request)
            if number != start.requests:
                response = self._response(start, beats, traces=traces)
                self._store.post(start.key(f"response {number}", self._node), response)
                start.requests = number
        return None

    def _response(self, start: _WorkerStart, beats: Iterable[Sequence[int]], *, traces: bool) -> str:
        """Return the response of this host to a request."""
        if not traces:
            answers = self._answers(start, beats)
            return json.dumps({rank: dataclasses.asdict(answer) for rank, answer in answers.items()})
        found = flight_recorder.request_traces([rank for rank, _ in beats if rank in start.pids])
        return json.dumps({rank: [dataclasses.asdict(group) for group in groups] for rank, groups in found.items()})

    def _answers(self, start: _WorkerStart, beats: Iterable[Sequence[int]]) -> dict[int, Stacks]:
        """Return by rank the stacks of those ranks that run on this host; they are also written to their logs.

        Args:
            beats: (rank, beat count that node 0 has seen); a rank with another count has moved since.
        """
        expected = {rank: count for rank, count in beats if rank in start.pids}
        workers = {rank: (start.pids[rank], log) for rank, log in start.ranks.values() if rank in expected}
        stacks = request_all_stacks(workers)
        for local_rank, (rank, _) in start.ranks.items():
            if rank in stacks:
                now = heartbeat.read_progress(self._memory, local_rank)
                moved = now.beats != expected[rank]
                stacks[rank] = dataclasses.replace(stacks[rank], wait=now.wait, thread=now.thread, moved=moved)
        return stacks

    def _end_workers(self, start: _WorkerStart, verdict: Hang) -> None:
        """Kill the hanging rank, which ends the workers on all hosts, and publish the verdict (one per start).

        The kill comes before the report: a full disk must not keep the hanging rank alive.
        """
        start.over = True
        self.last = verdict
        if (pid := start.pids.get(verdict.victim)) is not None:
            self._killed[pid] = verdict
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if self._node == 0:
                self._store.post(start.key("verdict"), json.dumps(dataclasses.asdict(verdict)))
        finally:
            _print(f"{verdict.sentence}\n{verdict.stack}")
            if self._node == 0:
                with suppress(OSError):
                    history.note_event(self._plan.paths, "hang", **verdict.entry, what=verdict.sentence)


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
