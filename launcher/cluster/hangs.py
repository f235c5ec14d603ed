"""Watches the progress of this host's workers, and ends the job's attempt where a rank hangs.

Each agent posts how its ranks stand; node 0's looks at all of them once its own do not move, and gives the one verdict:
everyone else's ranks wait for the one that hangs. Then that one is killed, and torchrun does what it does about any
worker that died.
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

from launcher import progress
from launcher.cluster import events, hang, stacks
from launcher.cluster.boards import Board, Gone, OwnBoard, StoreBoard
from launcher.cluster.hang import Answer, Hang, Seen
from launcher.cluster.procfs import children, has_variable, state_of
from launcher.plan import Place, RunPlan

_MOST_S_BETWEEN_LOOKS = 5.0
_STACKS_WITHIN_S = 15.0


@dataclass
class _Attempt:
    """The workers as they were started last. ``ranks``: rank and log by local rank. ``quiet_s``: for how long each of
    them has not moved, and ``unheard_s`` each node's agent, in time that this process was there to see. ``asked``: how
    often the stacks were."""

    number: int
    ranks: Mapping[int, tuple[int, Path]]
    stands: dict[int, progress.Stand] = field(default_factory=dict[int, progress.Stand])
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
        os.ftruncate(self._file, progress.size_of(plan.cluster.workers_per_node))
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
        return {local_rank: progress.address(self._file, local_rank) for local_rank in ranks}

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
        self._board.post(attempt.key("seen", self._node), f"{attempt.looks}\n{hang.to_json(seen)}")
        verdict = self._decide(attempt, seen, pids, passed) if self._node == 0 else self._follow(attempt, pids)
        # it took seconds, in which the workers may have been started anew, or asked to stop
        if verdict is not None and attempt is self._attempt and not self._over.is_set() and self._asked() is None:
            self._conclude(attempt, verdict, pids)

    def _pids(self, attempt: _Attempt) -> dict[int, int]:
        """The living workers, by rank."""
        living = [pid for pid in children(os.getpid()) if state_of(pid) not in (None, "Z")]
        found: dict[int, int] = {}
        for local_rank, (rank, _) in attempt.ranks.items():
            own = progress.address(self._file, local_rank)
            for pid in living:
                if has_variable(pid, progress.PROGRESS, own):
                    found[rank] = pid
        return found

    def _seen(self, attempt: _Attempt, pids: Mapping[int, int], passed: float) -> list[Seen]:
        seen: list[Seen] = []
        for local_rank, (rank, _) in attempt.ranks.items():
            stand = progress.read(self._memory, local_rank)
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
        everyone = own + [one for text in heard.values() for one in hang.from_json(text.partition("\n")[2])]
        silent = [node for node in others if attempt.unheard_s[node] >= self._timeout_s]
        if silent and own:
            host = next((one.host for one in everyone if one.node == silent[0]), f"host {silent[0]}")
            victim = min(own, key=lambda one: one.stand.position)
            return hang.silent_host(silent[0], host, victim, self._timeout_s)
        if len(heard) < len(others):  # one has not even begun to look
            return None
        behind = hang.suspects(everyone, self._timeout_s)
        if not behind:
            return None
        answers = self._ask(attempt, behind, pids)
        return None if any(answer.moved for answer in answers) else hang.judge(behind, answers, self._timeout_s)

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
        told = stacks.ask_all({rank: (pids[rank], log) for rank, (_, log) in here.items()})
        answers: list[Answer] = []
        for rank, said in told.items():
            moved = progress.read(self._memory, here[rank][0]).beats != asked[rank]
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
                    events.note(self._plan.paths, "hang", **verdict.entry, what=verdict.sentence)


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
