"""Hang verdict: the hanging rank is the one that is behind all others and does not move, as seen by the agents; and the
stacks that tell which of several it is.

A worker handles STACK_SIGNAL in C (faulthandler): the handler writes to the worker's own log even while Python is
blocked, waits in a system call, or holds the interpreter's lock.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.heartbeat import IMPORTS, Phase, Progress, Wait
from launcher.launch.flight_recorder import NO_TRACES, WaitingCollectives
from launcher.process import STACK_SIGNAL, children, handles, state_of
from launcher.quantities import first_lines

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
        missing_reason: reason for a missing answer.
        wait, thread: those of the rank's heartbeat.
        moved: True if the rank has made progress since it was suspected.
    """

    text: str
    missing_reason: str = ""
    wait: Wait = Wait.io
    thread: int = 0
    moved: bool = False

    @property
    def shown_thread(self) -> str:
        """Stack of the thread that shows what the process is doing, innermost frame first.

        This is the main thread, which is the oldest and so the last in the dump, or the thread for which it waits.
        """
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        awaited = (thread for thread in threads if self.thread and f"hread 0x{self.thread:016x} " in thread)
        return next(awaited, threads[-1]).strip()

    @property
    def location(self) -> str:
        """Innermost frame outside the standard library and torch, as ``FILE:LINE in FUNCTION``."""
        frames = _frames(self.shown_thread)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """True if the process waits for other ranks: in torch, or in the launcher's code as its heartbeat declares."""
        if self.thread and f"0x{self.thread:016x} " not in self.text:
            return bool(self.text)  # the thread has just ended, so the rank moves
        for file, _, name in _frames(self.shown_thread):
            if "/torch/" in file:
                return bool(_TORCH_WAITS.search(file)) or name == "synchronize"
            return self.wait is Wait.collective and "/launcher/train/" in file
        return False


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of each frame outside the standard library, innermost first."""
    return [frame for frame in _FRAME.findall(thread) if not _STDLIB.search(frame[0])]


def request_all_stacks(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Stacks]:
    """Call ``request_stacks`` for all ranks in parallel. ``workers``: (process id, log) by rank."""
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        answers = {rank: threads.submit(request_stacks, pid, log) for rank, (pid, log) in workers.items()}
    return {rank: answer.result() for rank, answer in answers.items()}


def request_stacks(pid: int, log: Path) -> Stacks:
    """Have ``pid`` and its loader processes write their stacks into ``log``, and return them.

    The requests are sent one after the other, because their standard error shares this log. The call takes a few
    seconds at most, however many processes do not answer.
    """
    end = time.monotonic() + _ALL_WITHIN_S
    if (state := state_of(pid)) in ("T", "t"):
        return Stacks("", f"the process is stopped (state {state}: SIGSTOP, or a debugger), and cannot show its stack")
    if not handles(pid, STACK_SIGNAL):
        return Stacks("", "the process has not yet installed the signal handler that shows its stack")
    if not (text := _answer(pid, log)):
        return Stacks("", f"the process (state {state_of(pid) or 'gone'}) does not show its stack")
    for child in children(pid):
        if time.monotonic() < end and handles(child, STACK_SIGNAL) and (more := _answer(child, log)):
            text += f"\n--- its process {child} ---\n{more}"
    return Stacks(text)


def _answer(pid: int, log: Path) -> str:
    """Send STACK_SIGNAL and return the stacks that are appended to the log; empty if the process or its log is gone."""
    try:
        before = log.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        size, since, end = before, time.monotonic(), time.monotonic() + _ANSWERS_WITHIN_S
        while time.monotonic() < end and (size == before or time.monotonic() - since < _QUIET_S):
            time.sleep(_LOOK_EVERY_S)
            if (now := log.stat().st_size) != size:
                size, since = now, time.monotonic()
        with log.open("rb") as file:
            file.seek(before)
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    begin = re.search(r"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].rstrip() if begin else ""


@dataclass(frozen=True)
class RankState:
    """One rank as its agent sees it. ``quiet_s``: seconds without progress."""

    rank: int
    node: int
    host: str
    progress: Progress
    quiet_s: float


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Verdict on a hang.

    Args:
        rank: hanging rank; None if all ranks wait for each other, or a whole host is silent.
        victim: rank to kill, so that all workers end.
        node, host: of ``rank``, else of the silent host, else of the victim.
        step: optimizer step from 1; 0 before the first.
        phase: name of the rank's ``Phase``.
        text: description of what that rank does or, without a rank, of what happened; may have several lines.
        stack: stacks of all threads of that rank, or of all waiting ranks.
    """

    rank: int | None
    victim: int
    node: int
    host: str
    step: int
    phase: str
    text: str
    stack: str

    @property
    def sentence(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank} {self.text}"

    @property
    def entry(self) -> dict[str, Any]:
        """Fields for summary.json and the events."""
        return {"rank": self.rank, "host": self.host, "step": self.step, "phase": self.phase, "stack": self.stack}


_SHOWN = 16
# seconds; imports may come from a busy disk, so a shorter time limit does not apply to them
_IMPORTS_WITHIN_S = 300.0


def suspects(states: Sequence[RankState], timeout_s: float) -> list[RankState]:
    """Return the ranks that are furthest behind if none of them has moved for ``timeout_s``, else an empty list.

    A rank that waits for a slow one is ahead of it, and a slow rank still moves, so slowness never counts as a hang.
    """
    last = min((state.progress.position for state in states), default=None)
    behind = [state for state in states if state.progress.position == last]
    return behind if all(state.quiet_s >= _limit_s(state.progress, timeout_s) for state in behind) else []


def _limit_s(progress: Progress, timeout_s: float) -> float:
    """Return the seconds without progress after which a rank hangs."""
    imports = progress.phase is Phase.starting and progress.number <= IMPORTS
    return max(timeout_s, _IMPORTS_WITHIN_S) if imports else timeout_s


def judge_hang(
    behind: Sequence[RankState],
    answers: Mapping[int, Stacks],
    timeout_s: float,
    others: Sequence[RankState] = (),
    found: WaitingCollectives = NO_TRACES,
) -> Hang:
    """Return the verdict on ``behind``.

    The hanging rank is one that does not wait for others. If all ranks that answered do, it is one without an answer.
    If all answered and wait, no rank is named, unless there is only one. Collectives of NCCL that are not completed
    decide before the stacks do: a rank whose GPU has a full queue waits wherever it stands. A rank that can give
    neither is named before both.

    Args:
        answers: stacks by rank, of the ranks whose agent answered.
        others: ranks that are not behind, and that ``found`` concerns.
        found: NCCL's collectives.
    """
    states = [*behind, *others]
    awaited = [state for state in states if state.rank in found.ranks] or [*behind]
    awaited += [state for state in states if state.rank in found.unknown and state not in awaited]
    silent = [state for state in states if state.rank in answers and answers[state.rank].missing_reason]
    silent = [state for state in silent if state.rank not in found.waiting]
    verdict = _judge(silent or awaited, answers, timeout_s, found.waiting)
    return dataclasses.replace(verdict, text=f"{verdict.text}\n  {found.text}") if found.text else verdict


def _judge(
    behind: Sequence[RankState], answers: Mapping[int, Stacks], timeout_s: float, waiting: Collection[int]
) -> Hang:
    """``waiting``: ranks that wait wherever they stand."""
    states = sorted(behind, key=lambda state: state.rank)
    answered = [(state, answers[state.rank]) for state in states if state.rank in answers]
    unanswered = [state for state in states if state.rank not in answers]
    quiet = f"nothing moved for {timeout_s:g} s (train.hang_timeout)"
    if not_waiting := [(state, answer) for state, answer in answered if not (state.rank in waiting or answer.waits)]:
        (state, answer), *others = not_waiting
        what = answer.missing_reason or f"at {answer.location}"
        also = f"\n  So does rank {_ranks(state for state, _ in others)}." if others else ""
        return _hang_of(state, quiet, what + also, answer.text)
    if unanswered:
        state, *others = unanswered
        what = "its agent did not send its stack"
        what += ", and the ranks that answered wait for others" if answered else ""
        also = f"\n  No stack came from rank {_ranks(others)} either, which may be the cause instead." if others else ""
        return _hang_of(state, quiet, what + also, "")
    state, answer = answered[0]
    if len(answered) == 1:  # all other ranks are ahead, so this one does not wait for them
        what = (
            f"it waits at {answer.location}. A collective that the other ranks do not run, a GPU kernel that does not "
            "end, or a broken link looks like that"
        )
        return _hang_of(state, quiet, what, answer.text)
    text = (
        f"{len(answered)} ranks wait for each other in {state.progress.description}: {quiet}, and none of them does "
        "anything else. A collective that not all of them run, a GPU kernel that does not end, or a broken link looks "
        "like that:"
    )
    lines = [f"rank {state.rank} on {state.host}: at {answer.location}" for state, answer in answered]
    stack = "\n".join(f"--- rank {state.rank} ---\n{answer.text}" for state, answer in answered[:_SHOWN])
    return _hang(state, None, "\n  ".join([text, *first_lines(lines, _SHOWN)]), stack)


def _ranks(states: Iterable[RankState]) -> str:
    return ", ".join(str(state.rank) for state in states)


def _hang_of(state: RankState, quiet: str, what: str, stack: str) -> Hang:
    """Return the verdict that this rank hangs. ``quiet``: for how long nothing moved. ``what``: what the rank does."""
    return _hang(state, state.rank, f"hangs on {state.host} in {state.progress.description}: {quiet}; {what}", stack)


def _hang(victim: RankState, rank: int | None, text: str, stack: str) -> Hang:
    progress = victim.progress
    return Hang(
        rank=rank, victim=victim.rank, node=victim.node, host=victim.host, step=progress.step,
        phase=progress.phase.name, text=text, stack=stack,
    )  # fmt: skip


def silent_host(node: int, host: str, victim: RankState, timeout_s: float) -> Hang:
    """Return the verdict on a host whose agent has been silent for ``timeout_s`` while ranks elsewhere wait."""
    text = (
        f"node {node} ({host}) hangs: its agent has sent no report for {timeout_s:g} s "
        f"(train.hang_timeout), and rank {victim.rank} does not move in {victim.progress.description}"
    )
    return dataclasses.replace(_hang(victim, None, text, ""), node=node, host=host)
