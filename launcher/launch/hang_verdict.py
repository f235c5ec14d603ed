"""Hang verdict: the hanging rank is the one that is behind all others and does not move, as seen by the agents."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.heartbeat import IMPORTS, Phase, Stand
from launcher.rundir.files import build


@dataclass(frozen=True)
class Seen:
    """One rank as its agent sees it. ``quiet_s``: seconds without progress."""

    rank: int
    node: int
    host: str
    stand: Stand
    quiet_s: float


@dataclass(frozen=True)
class Answer:
    """Answer of a rank that was asked for its stack.

    Args:
        place: innermost frame outside the standard library and torch.
        waits: True if the rank waits for other ranks.
        silent: reason for a missing stack.
        moved: True if the rank made progress before it was asked.
    """

    rank: int
    stack: str
    place: str
    waits: bool
    silent: str = ""
    moved: bool = False


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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Hang:
        return cls(**json.loads(text))

    @property
    def sentence(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank} {self.text}"

    @property
    def entry(self) -> dict[str, Any]:
        """Fields for summary.json and the events."""
        return {"rank": self.rank, "host": self.host, "step": self.step, "phase": self.phase, "stack": self.stack}


def to_json(seen: Sequence[Seen]) -> str:
    return json.dumps([dataclasses.asdict(one) for one in seen])


def from_json(text: str) -> list[Seen]:
    return [build(Seen, fields) for fields in json.loads(text)]


def suspects(seen: Sequence[Seen], timeout_s: float) -> list[Seen]:
    """Return the ranks that are furthest behind if none of them has moved for ``timeout_s``, else an empty list.

    A rank that waits for a slow one is ahead of it, and a slow rank still moves, so slowness never counts as a hang.
    """
    if not seen:
        return []
    last = min(one.stand.position for one in seen)
    behind = [one for one in seen if one.stand.position == last]
    return behind if all(one.quiet_s >= _patience_s(one.stand, timeout_s) for one in behind) else []


def _patience_s(stand: Stand, timeout_s: float) -> float:
    """Return the time limit of a rank: a short one does not apply to imports, which may come from a busy disk."""
    imports = stand.phase is Phase.starting and stand.number <= IMPORTS
    return max(timeout_s, _IMPORTS_WITHIN_S) if imports else timeout_s


_IMPORTS_WITHIN_S = 300.0


def judge(behind: Sequence[Seen], answers: Sequence[Answer], timeout_s: float) -> Hang:
    """Return the verdict on ``behind``.

    The hanging rank is one that does not wait for others. If all ranks that answered do, it is one without an answer.
    If all answered and wait, no rank is named, unless there is only one.
    """
    told = {answer.rank: answer for answer in answers}
    ranks = sorted(behind, key=lambda one: one.rank)
    said = [(one, told[one.rank]) for one in ranks if one.rank in told]
    unheard = [one for one in ranks if one.rank not in told]
    guilty = [(one, answer) for one, answer in said if not answer.waits]
    quiet = f"nothing moved for {timeout_s:g} s (train.hang_timeout)"
    if guilty:
        (one, answer), others = guilty[0], [str(other.rank) for other, _ in guilty[1:]]
        where = answer.silent or f"at {answer.place}"
        also = f"\n  So does rank {', '.join(others)}." if others else ""
        text = f"hangs on {one.host} in {one.stand.words}: {quiet}; {where}{also}"
        return _hang(one, one.rank, text, answer.stack)
    if unheard:
        one, others = unheard[0], [str(other.rank) for other in unheard[1:]]
        others_wait = ", and the ranks that answered wait for others" if said else ""
        where = f"its agent did not answer where it stands{others_wait}"
        also = f"\n  Nor is it known of rank {', '.join(others)}, which may be the one as well." if others else ""
        return _hang(one, one.rank, f"hangs on {one.host} in {one.stand.words}: {quiet}; {where}{also}", "")
    one, answer = said[0]
    if len(said) == 1:  # all other ranks are ahead, so this one does not wait for them
        text = (
            f"hangs on {one.host} in {one.stand.words}: {quiet}; it waits at {answer.place}. A GPU kernel that does "
            "not end, or a broken link, looks like that"
        )
        return _hang(one, one.rank, text, answer.stack)
    text = (
        f"{len(said)} ranks wait for each other in {one.stand.words}: {quiet}, and none of them does anything else. A "
        "collective that not all of them run, a GPU kernel that does not end, or a broken link looks like that:"
    )
    shown = [f"rank {one.rank} on {one.host}: at {answer.place}" for one, answer in said]
    text = "\n  ".join([text, *shown[:_SHOWN], *([f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else [])])
    stack = "\n".join(f"--- rank {one.rank} ---\n{answer.stack}" for one, answer in said[:_SHOWN])
    return _hang(one, None, text, stack)


_SHOWN = 16


def _hang(one: Seen, rank: int | None, text: str, stack: str) -> Hang:
    stand = one.stand
    return Hang(
        rank=rank, victim=one.rank, node=one.node, host=one.host, step=stand.step, phase=stand.phase.name, text=text,
        stack=stack,
    )  # fmt: skip


def silent_host(node: int, host: str, victim: Seen, timeout_s: float) -> Hang:
    """Return the verdict on a host whose agent has been silent for ``timeout_s`` while ranks elsewhere wait."""
    text = (
        f"node {node} ({host}) hangs as a whole: its agent has said nothing for {timeout_s:g} s (train.hang_timeout), "
        f"and rank {victim.rank} does not move in {victim.stand.words}"
    )
    return dataclasses.replace(_hang(victim, None, text, ""), node=node, host=host)
