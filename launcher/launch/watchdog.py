"""Watchdog: follows this host's workers, asks hanging ones for their stacks, and ends the attempt.

A worker handles STACK_SIGNAL in C (faulthandler): the handler writes to the worker's own log even while Python is
blocked, waits in a system call, or holds the interpreter's lock.

Each agent posts the progress of its ranks. Once the ranks of node 0 stop moving, its agent compares all ranks and
decides which one hangs, because all others wait for that one. The hanging rank is killed, and torchrun then handles it
as any other dead worker.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from launcher import heartbeat
from launcher.heartbeat import Role
from launcher.launch import hang_verdict
from launcher.launch.hang_verdict import Answer, Hang, Seen
from launcher.launch.rendezvous import Board, Gone, OwnBoard, StoreBoard
from launcher.plan.launch_plan import Place
from launcher.plan.run_plan import RunPlan
from launcher.process import STACK_SIGNAL, children, handles, has_variable, state_of, wait_until
from launcher.rundir import records

_ANSWERS_WITHIN_S, _QUIET_S, _LOOK_EVERY_S = 3.0, 0.3, 0.05
_ALL_WITHIN_S = 5.0  # no further loader process is asked after this time
_MOST_BYTES = 32_000
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# standard library frames: they wait on behalf of their caller
_STDLIB = re.compile(r"/python3[^/]*/(?!site-packages|dist-packages)|^<frozen")
# packages of torch in which a rank waits for others: collectives, and the backward pass, which ends with DDP's
_TORCH_WAITS = re.compile(r"/torch/(distributed/(?!checkpoint/)|autograd/|futures/)")


@dataclass(frozen=True)
class Stacks:
    """Stacks of a process and its loaders.

    Args:
        text: the stacks; empty without an answer.
        why: reason for a missing answer.
        role, thread: of the rank's heartbeat.
    """

    text: str
    why: str = ""
    role: Role = Role.io
    thread: int = 0

    @property
    def telling(self) -> str:
        """Stack of the thread that shows what the process is doing, innermost frame first.

        This is the main thread, which is the oldest and so the last in the dump, or the thread for which it waits.
        """
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        awaited = (thread for thread in threads if self.thread and f"hread 0x{self.thread:016x} " in thread)
        return next(awaited, threads[-1]).strip()

    @property
    def place(self) -> str:
        """Innermost frame outside the standard library and torch, as ``FILE:LINE in FUNCTION``."""
        frames = _frames(self.telling)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """True if the process waits for other ranks: in torch, or in the launcher's code as its heartbeat declares."""
        if self.thread and f"0x{self.thread:016x} " not in self.text:
            return bool(self.text)  # the thread has just ended, so the rank moves
        for file, _, name in _frames(self.telling):
            if "/torch/" in file:
                return bool(_TORCH_WAITS.search(file)) or name == "synchronize"
            return self.role is Role.collective and "/launcher/train/" in file
        return False


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of each frame outside the standard library, innermost first."""
    return [frame for frame in _FRAME.findall(thread) if not _STDLIB.search(frame[0])]


def ask_all_stacks(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Stacks]:
    """Call ``ask_stacks`` for all ranks in parallel. ``workers``: (process id, log) by rank."""
    with ThreadPoolExecutor(max(1, len(workers))) as asking:
        said = {rank: asking.submit(ask_stacks, pid, log) for rank, (pid, log) in workers.items()}
    return {rank: answer.result() for rank, answer in said.items()}


def ask_stacks(pid: int, log: Path) -> Stacks:
    """Have ``pid`` and its loader processes write their stacks into ``log``, and return them.

    The processes are asked one after the other, because their standard error shares this log. The call takes a few
    seconds at most, however many processes do not answer.
    """
    end = time.monotonic() + _ALL_WITHIN_S
    if (state := state_of(pid)) in ("T", "t"):
        return Stacks("", f"the process is stopped (state {state}: SIGSTOP, or a debugger), and cannot show its stack")
    if not handles(pid, STACK_SIGNAL):
        return Stacks("", "the process has not come to where it could show its stack")
    text = _answer(pid, log)
    if not text:
        return Stacks("", f"the process (state {state_of(pid) or 'gone'}) does not show its stack")
    for child in children(pid):
        if time.monotonic() < end and handles(child, STACK_SIGNAL) and (more := _answer(child, log)):
            text += f"\n--- its process {child} ---\n{more}"
    return Stacks(text)


def _answer(pid: int, log: Path) -> str:
    try:
        text = _written(pid, log)
    except OSError:  # the process is gone, or its log
        return ""
    begin = re.search(r"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].rstrip() if begin else ""


def _written(pid: int, log: Path) -> str:
    """Send STACK_SIGNAL and return what is appended to the log. Raises OSError if the process or its log is gone."""
    before = log.stat().st_size
    os.kill(pid, STACK_SIGNAL)
    size, since, end = before, time.monotonic(), time.monotonic() + _ANSWERS_WITHIN_S
    while time.monotonic() < end and (size == before or time.monotonic() - since < _QUIET_S):
        time.sleep(_LOOK_EVERY_S)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
    with log.open("rb") as file:
        file.seek(before)
        return file.read(_MOST_BYTES).decode(errors="replace")


_MOST_S_BETWEEN_LOOKS = 5.0
_STACKS_WITHIN_S = 15.0


@dataclass
class _Attempt:
    """Watch state of the current attempt.

    Args:
        ranks: (rank, log) by local rank.
        stands: last progress by rank.
        quiet_s: seconds without progress, by rank. Like ``unheard_s`` it only counts time in which this process ran.
        heard: last message by node.
        unheard_s: seconds without a new message, by node.
        asked: number of requests for stacks so far.
        over: True once the attempt has a verdict, or node 0 is gone.
    """

    number: int
    ranks: Mapping[int, tuple[int, Path]]
    stands: dict[int, heartbeat.Stand] = field(default_factory=dict[int, heartbeat.Stand])
    quiet_s: dict[int, float] = field(default_factory=dict[int, float])
    heard: dict[int, str] = field(default_factory=dict[int, str])
    unheard_s: dict[int, float] = field(default_factory=dict[int, float])
    looks: int = 0
    asked: int = 0
    over: bool = False

    def key(self, name: str, node: int | None = None) -> str:
        return f"{self.number}/{name}" + ("" if node is None else f"/{node}")


class NoWatch:
    """Null object: hang detection is off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...
    def begin(self, ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:  # noqa: ARG002
        return {}

    def of(self, pid: int) -> Hang | None:  # noqa: ARG002
        return None

    @property
    def last(self) -> Hang | None:
        return None


class HangWatch(threading.Thread):
    """Thread that watches for hangs while the context is open. ``last``: newest hang found, on any host."""

    def __init__(self, plan: RunPlan, place: Place, timeout_s: float, asked: Callable[[], object]) -> None:
        """Create the watch. ``asked``: not None once the workers must stop, for which another time limit applies."""
        super().__init__(daemon=True)
        self._plan, self._node, self._asked, self._timeout_s = plan, place.node, asked, timeout_s
        self._every_s = min(_MOST_S_BETWEEN_LOOKS, timeout_s / 8)
        self._host = socket.gethostname()
        self._board: Board = OwnBoard() if plan.cluster.nodes == 1 else StoreBoard(place)
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

    def of(self, pid: int) -> Hang | None:
        """Return the hang for which ``pid`` was killed, or None."""
        return self._killed.get(pid)

    def run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self._every_s):
            now = time.monotonic()
            # a scheduler that suspends a job stops this process too: that time says nothing about a worker
            passed, looked = min(now - looked, 2 * self._every_s), now
            attempt = self._attempt
            if attempt is None or attempt.over or self._asked() is not None:
                continue
            try:
                self._look(attempt, passed)
            except Gone:  # node 0 is gone; `launch` notices that by itself
                attempt.over = True
            except OSError as error:  # the next look may succeed
                _say(f"Looking for ranks that hang: {error}")

    def _look(self, attempt: _Attempt, passed: float) -> None:
        pids = self._pids(attempt)
        seen = self._seen(attempt, pids, passed)
        attempt.looks += 1
        self._board.post(attempt.key("seen", self._node), f"{attempt.looks}\n{hang_verdict.to_json(seen)}")
        verdict = self._decide(attempt, seen, pids, passed) if self._node == 0 else self._follow(attempt, pids)
        # the decision took seconds, in which the workers may have been restarted or asked to stop
        if verdict is not None and attempt is self._attempt and not self._over.is_set() and self._asked() is None:
            self._conclude(attempt, verdict, pids)

    def _pids(self, attempt: _Attempt) -> dict[int, int]:
        """Return the process ids of the living workers by rank."""
        living = [pid for pid in children(os.getpid()) if state_of(pid) not in (None, "Z")]
        found: dict[int, int] = {}
        for local_rank, (rank, _) in attempt.ranks.items():
            own = heartbeat.address(self._file, local_rank)
            for pid in living:
                if has_variable(pid, heartbeat.PROGRESS, own):
                    found[rank] = pid
        return found

    def _seen(self, attempt: _Attempt, pids: Mapping[int, int], passed: float) -> list[Seen]:
        seen: list[Seen] = []
        for local_rank, (rank, _) in attempt.ranks.items():
            stand = heartbeat.read(self._memory, local_rank)
            moved = attempt.stands.get(rank) != stand
            attempt.stands[rank] = stand
            attempt.quiet_s[rank] = 0.0 if moved else attempt.quiet_s[rank] + passed
            if rank in pids:
                seen.append(Seen(rank, self._node, self._host, stand, attempt.quiet_s[rank]))
        return seen

    def _decide(self, attempt: _Attempt, own: list[Seen], pids: Mapping[int, int], passed: float) -> Hang | None:
        """Return the verdict if some rank hangs; runs on node 0 only."""
        others = range(1, self._plan.cluster.nodes)
        heard = self._board.read([attempt.key("seen", node) for node in others])
        for node in others:
            text = heard.get(attempt.key("seen", node), "")
            spoke = attempt.heard.get(node) != text
            attempt.heard[node] = text
            attempt.unheard_s[node] = 0.0 if spoke else attempt.unheard_s[node] + passed
        if own and max(one.quiet_s for one in own) < self._timeout_s:
            return None  # a hanging rank would hold up all of them
        everyone = own + [one for text in heard.values() for one in hang_verdict.from_json(text.partition("\n")[2])]
        silent = [node for node in others if attempt.unheard_s[node] >= self._timeout_s]
        if silent and own:
            host = next((one.host for one in everyone if one.node == silent[0]), f"host {silent[0]}")
            victim = min(own, key=lambda one: one.stand.position)
            return hang_verdict.silent_host(silent[0], host, victim, self._timeout_s)
        if len(heard) < len(others):  # some node has not posted yet
            return None
        behind = hang_verdict.suspects(everyone, self._timeout_s)
        if not behind:
            return None
        answers = self._ask(attempt, behind, pids)
        return None if any(answer.moved for answer in answers) else hang_verdict.judge(behind, answers, self._timeout_s)

    def _ask(self, attempt: _Attempt, behind: list[Seen], pids: Mapping[int, int]) -> list[Answer]:
        """Request the stacks of ``behind`` from the nodes on which they run."""
        attempt.asked += 1
        beats = [(one.rank, one.stand.beats) for one in behind]
        self._board.post(attempt.key("who"), json.dumps([attempt.asked, beats]))
        answers = self._answers(attempt, beats, pids)
        wanted = {attempt.key(f"stacks {attempt.asked}", one.node) for one in behind if one.node}
        wait_until(lambda: len(self._board.read(wanted)) == len(wanted), _STACKS_WITHIN_S + self._every_s)
        texts = self._board.read(wanted).values()
        return answers + [Answer(**fields) for text in texts for fields in json.loads(text)]

    def _follow(self, attempt: _Attempt, pids: Mapping[int, int]) -> Hang | None:
        """Answer a request for stacks and return node 0's verdict, if any; runs on nodes other than 0."""
        said = self._board.read([attempt.key("who"), attempt.key("verdict")])
        if (verdict := said.get(attempt.key("verdict"))) is not None:
            return Hang.from_json(verdict)
        if (who := said.get(attempt.key("who"))) is not None:
            number, beats = json.loads(who)
            if number != attempt.asked:
                answers = self._answers(attempt, beats, pids)
                text = json.dumps([dataclasses.asdict(answer) for answer in answers])
                self._board.post(attempt.key(f"stacks {number}", self._node), text)
                attempt.asked = number
        return None

    def _answers(self, attempt: _Attempt, beats: Iterable[Sequence[int]], pids: Mapping[int, int]) -> list[Answer]:
        """Return the answers of those ranks that run on this host; the stacks go to their logs.

        Args:
            beats: (rank, beat count that node 0 has seen); a rank with another count has moved since.
        """
        asked = {rank: beat for rank, beat in beats if rank in pids}
        here = {rank: (at, log) for at, (rank, log) in attempt.ranks.items() if rank in asked}
        told = ask_all_stacks({rank: (pids[rank], log) for rank, (_, log) in here.items()})
        answers: list[Answer] = []
        for rank, said in told.items():
            stand = heartbeat.read(self._memory, here[rank][0])
            stacks = dataclasses.replace(said, role=stand.role, thread=stand.thread)
            moved = stand.beats != asked[rank]
            answers.append(Answer(rank, stacks.text, stacks.place, stacks.waits, stacks.why, moved))
        return answers

    def _conclude(self, attempt: _Attempt, verdict: Hang, pids: Mapping[int, int]) -> None:
        """Kill the hanging rank, which ends the attempt on all hosts, and publish the verdict (one per attempt).

        The kill comes before the report: a full disk must not keep the hanging rank alive.
        """
        attempt.over = True
        self.last = verdict
        if verdict.victim in pids:
            self._killed[pids[verdict.victim]] = verdict
            with suppress(ProcessLookupError):
                os.kill(pids[verdict.victim], signal.SIGKILL)
        try:
            if self._node == 0:
                self._board.post(attempt.key("verdict"), verdict.to_json())
        finally:
            _say(f"{verdict.sentence}\n{verdict.stack}")
            if self._node == 0:
                with suppress(OSError):
                    records.note_event(self._plan.paths, "hang", **verdict.entry, what=verdict.sentence)


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
