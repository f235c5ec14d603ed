"""Watchdog: follows this host's workers, asks hanging ones for their stacks, and ends the attempt.

A worker has a handler for ASK that runs in C (faulthandler): it answers while Python is blocked, waits in a system
call, or holds the interpreter's lock, and it writes to the worker's own log.

Each agent posts how its ranks stand; node 0's looks at all of them once its own do not move, and gives the one verdict:
everyone else's ranks wait for the one that hangs. Then that one is killed, and torchrun does what it does about any
worker that died.
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
from launcher.launch import hang_verdict
from launcher.launch.hang_verdict import Answer, Hang, Seen
from launcher.launch.rendezvous import Board, Gone, OwnBoard, StoreBoard
from launcher.plan.launch_plan import Place
from launcher.plan.run_plan import RunPlan
from launcher.process import STACK_SIGNAL, children, handles, has_variable, state_of
from launcher.rundir import records

_ANSWERS_WITHIN_S, _QUIET_S, _LOOK_EVERY_S = 3.0, 0.3, 0.05
_ALL_WITHIN_S = 5.0  # until the last loader process is asked
_MOST_BYTES = 32_000
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# code that waits on behalf of whoever called it
_STDLIB = re.compile(r"/python3[^/]*/(?!site-packages|dist-packages)|^<frozen")
# where a rank stands that waits for others: in a collective, in the backward pass that DDP's collectives end, or in the
# launcher's own code, which does nothing there but wait for the GPU, whose kernels wait for the other ranks. Not so
# what reads and writes: a disk that does not answer is no other rank
_WAITS = re.compile(
    r"/torch/(distributed/(?!checkpoint/)|autograd/|futures/)|/launcher/train/(?!(data/(loader|window_feed)|evaluation|metrics|"
    r"checkpoint/(file_format|load|resume|save))\.py)"
)
_SAVER = "/launcher/train/checkpoint/async_save.py"


@dataclass(frozen=True)
class Stacks:
    """What a process answered. ``text``: of all its threads, and its loader processes'; empty without an answer, and
    then ``why`` says why."""

    text: str
    why: str = ""

    @property
    def telling(self) -> str:
        """The part of the thread that tells what the process is at, innermost frame first: the main thread, which is
        the oldest and so the last in the dump; where that waits for the save under way, the thread that writes it."""
        *others, main = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        innermost = next(iter(_frames(main)), None)
        if innermost is not None and innermost[0].endswith(_SAVER):
            for thread in others:
                if any(file.endswith(_SAVER) and name.startswith("_write") for file, _, name in _frames(thread)):
                    return thread.strip()
        return main.strip()

    @property
    def place(self) -> str:
        """``FILE:LINE in FUNCTION``, of the innermost frame that is neither Python's library nor torch's."""
        frames = _frames(self.telling)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as Python's frames tell."""
        for file, _, name in _frames(self.telling):
            return bool(_WAITS.search(file)) or ("/torch/" in file and name == "synchronize")
        return False


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """File, line and function, without Python's own library, innermost first."""
    return [frame for frame in _FRAME.findall(thread) if not _STDLIB.search(frame[0])]


def ask_all_stacks(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Stacks]:
    """``ask`` of each rank's process and log, all at the same time: together they take no longer than one."""
    with ThreadPoolExecutor(max(1, len(workers))) as asking:
        said = {rank: asking.submit(ask_stacks, pid, log) for rank, (pid, log) in workers.items()}
    return {rank: answer.result() for rank, answer in said.items()}


def ask_stacks(pid: int, log: Path) -> Stacks:
    """Have ``pid``, and the processes that load its data, write their stacks into ``log``, to which their standard
    error goes: one after the other, for they share it. It takes a few seconds, however many do not answer."""
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
    """What the signal brings into the log. Raises OSError."""
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
    """The workers as they were started last. ``ranks``: rank and log by local rank. ``quiet_s``: for how long each of
    them has not moved, and ``unheard_s`` each node's agent, in time that this process was there to see. ``asked``: how
    often the stacks were."""

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
    """Where nobody asked for it."""

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
    """Looks while it is entered. ``last``: the newest hang that was found, on any host."""

    def __init__(self, plan: RunPlan, place: Place, timeout_s: float, asked: Callable[[], object]) -> None:
        """``asked``: not None once the workers were asked to stop; then there is a limit to how long they take."""
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
        """New workers are about to start, and the old ones are gone: rank and log by local rank. What PROGRESS is to
        say for each of them."""
        self._memory[:] = bytes(len(self._memory))
        self._attempt = _Attempt(self._numbers, ranks)
        self._numbers += 1
        return {local_rank: heartbeat.address(self._file, local_rank) for local_rank in ranks}

    def of(self, pid: int) -> Hang | None:
        """The hang for which ``pid`` was killed."""
        return self._killed.get(pid)

    def run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self._every_s):
            now = time.monotonic()
            # time in which this process was stopped too, by a scheduler that suspends jobs, tells nothing of a worker
            passed, looked = min(now - looked, 2 * self._every_s), now
            attempt = self._attempt
            if attempt is None or attempt.over or self._asked() is not None:
                continue
            try:
                self._look(attempt, passed)
            except Gone:  # with node 0, which others notice
                attempt.over = True
            except OSError as error:  # the next look may do better
                _say(f"Looking for ranks that hang: {error}")

    def _look(self, attempt: _Attempt, passed: float) -> None:
        pids = self._pids(attempt)
        seen = self._seen(attempt, pids, passed)
        attempt.looks += 1
        self._board.post(attempt.key("seen", self._node), f"{attempt.looks}\n{hang_verdict.to_json(seen)}")
        verdict = self._decide(attempt, seen, pids, passed) if self._node == 0 else self._follow(attempt, pids)
        # it took seconds, in which the workers may have been started anew, or asked to stop
        if verdict is not None and attempt is self._attempt and not self._over.is_set() and self._asked() is None:
            self._conclude(attempt, verdict, pids)

    def _pids(self, attempt: _Attempt) -> dict[int, int]:
        """The living workers, by rank."""
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
        """Node 0's part."""
        others = range(1, self._plan.cluster.nodes)
        heard = self._board.read([attempt.key("seen", node) for node in others])
        for node in others:
            text = heard.get(attempt.key("seen", node), "")
            spoke = attempt.heard.get(node) != text
            attempt.heard[node] = text
            attempt.unheard_s[node] = 0.0 if spoke else attempt.unheard_s[node] + passed
        if own and max(one.quiet_s for one in own) < self._timeout_s:
            return None  # a rank that hangs holds up all of them
        everyone = own + [one for text in heard.values() for one in hang_verdict.from_json(text.partition("\n")[2])]
        silent = [node for node in others if attempt.unheard_s[node] >= self._timeout_s]
        if silent and own:
            host = next((one.host for one in everyone if one.node == silent[0]), f"host {silent[0]}")
            victim = min(own, key=lambda one: one.stand.position)
            return hang_verdict.silent_host(silent[0], host, victim, self._timeout_s)
        if len(heard) < len(others):  # one has not even begun to look
            return None
        behind = hang_verdict.suspects(everyone, self._timeout_s)
        if not behind:
            return None
        answers = self._ask(attempt, behind, pids)
        return None if any(answer.moved for answer in answers) else hang_verdict.judge(behind, answers, self._timeout_s)

    def _ask(self, attempt: _Attempt, behind: list[Seen], pids: Mapping[int, int]) -> list[Answer]:
        """Of every node that has some of them."""
        attempt.asked += 1
        beats = [(one.rank, one.stand.beats) for one in behind]
        self._board.post(attempt.key("who"), json.dumps([attempt.asked, beats]))
        answers = self._answers(attempt, beats, pids)
        wanted = {attempt.key(f"stacks {attempt.asked}", one.node) for one in behind if one.node}
        end = time.monotonic() + _STACKS_WITHIN_S + self._every_s
        while len(found := self._board.read(wanted)) < len(wanted) and time.monotonic() < end:
            time.sleep(0.1)
        return answers + [Answer(**fields) for text in found.values() for fields in json.loads(text)]

    def _follow(self, attempt: _Attempt, pids: Mapping[int, int]) -> Hang | None:
        """Every other node's part: it shows the stacks that node 0 asks for, and hears the verdict."""
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
        """Of those ranks that are here, whose logs get the stacks. ``beats``: each with what node 0 knows of it."""
        asked = {rank: beat for rank, beat in beats if rank in pids}
        here = {rank: (at, log) for at, (rank, log) in attempt.ranks.items() if rank in asked}
        told = ask_all_stacks({rank: (pids[rank], log) for rank, (_, log) in here.items()})
        answers: list[Answer] = []
        for rank, said in told.items():
            moved = heartbeat.read(self._memory, here[rank][0]).beats != asked[rank]
            answers.append(Answer(rank, said.text, said.place, said.waits, said.why, moved))
        return answers

    def _conclude(self, attempt: _Attempt, verdict: Hang, pids: Mapping[int, int]) -> None:
        """One verdict an attempt. The death that follows ends the attempt everywhere. What is said of it comes after: a
        disk that is full must not save the one that hangs."""
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
