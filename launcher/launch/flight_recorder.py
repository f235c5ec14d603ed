"""NCCL's flight recorder: which collectives each rank has queued, and which of them are completed.

torch keeps the last 2,000 collectives of a process. A thread of it in C++, which waits for neither Python nor the GPU,
writes them to a file once something is written to a pipe. This shows which rank the others wait for even where all
ranks are stuck in code of their own, because the queue of their GPU is full.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.process import wait_until
from launcher.quantities import first_lines

# torch appends the rank, and ".pipe" to the first
PIPE, FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_NEWER_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # a user may have set it, and torch prefers it
# torch looks at its pipe every second
_WITHIN_S = 6.0
_SHOWN = 8


def variables(pipes: str, logs: Path) -> dict[str, str]:
    """Return the environment variables of workers with GPUs. ``pipes``: a directory of this host."""
    return {PIPE: f"{pipes}/rank", FILE: f"{logs}/nccl_trace_rank"}


@dataclass(frozen=True)
class GroupTrace:
    """Collectives of one rank in one process group.

    Args:
        name: number and description of the group, the same on its ranks.
        ranks: its members; empty: all ranks of the job.
        queued, completed: number of the newest collective that was queued, and that is completed; from 1.
        oldest: the collective after ``completed``, if it was queued: its kind, and the sizes of its tensors.
    """

    name: str
    ranks: Sequence[int]
    queued: int
    completed: int
    oldest: str = ""


@dataclass(frozen=True)
class WaitingCollectives:
    """Collectives in which ranks wait.

    Args:
        ranks: ranks that others wait for, and that wait for none themselves.
        text: what waits for what, in lines; empty if nothing is known to wait.
    """

    ranks: Collection[int]
    text: str


def request_traces(ranks: Collection[int]) -> dict[int, list[GroupTrace]]:
    """Have the processes of ``ranks`` on this host write their traces, and return them. The files stay in the logs."""
    pipe, file = os.environ.get(PIPE), os.environ.get(_NEWER_FILE) or os.environ.get(FILE)
    if not pipe or not file:
        return {}
    paths = {rank: Path(f"{file}{rank}") for rank in ranks}
    with suppress(OSError):
        for path in paths.values():
            path.unlink(missing_ok=True)
    paths = {rank: path for rank, path in paths.items() if _ask(f"{pipe}{rank}.pipe")}
    traces: dict[int, list[GroupTrace]] = {}

    def all_there() -> bool:
        for rank, path in paths.items():
            # a file that is being written is no pickle yet
            with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.PickleError):
                if rank not in traces:
                    traces[rank] = read_trace(path.read_bytes())
        return len(traces) == len(paths)

    wait_until(all_there, _WITHIN_S)
    return traces


def _ask(pipe: str) -> bool:
    """Write to the pipe, and return whether a process reads it."""
    try:
        file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no NCCL group, or the process is gone
        return False
    try:
        os.write(file, b"1\n")
    except OSError:
        return False
    finally:
        os.close(file)
    return True


class _PlainValues(pickle.Unpickler):
    """Unpickler of numbers, texts, lists and dicts."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a trace")


def read_trace(content: bytes) -> list[GroupTrace]:
    """Return the groups in a file that torch has written, a pickle or JSON."""
    plain = content.lstrip().startswith(b"{")
    dump: dict[str, Any] = json.loads(content) if plain else _PlainValues(io.BytesIO(content)).load()
    members = {config.get("name"): config.get("ranks") for config in dump.get("pg_config", {}).values()}
    groups: dict[int, list[dict[str, Any]]] = {}
    for entry in dump.get("entries", []):
        if not entry["is_p2p"]:
            groups.setdefault(entry["pg_id"], []).append(entry)
    traces: list[GroupTrace] = []
    for number, entries in groups.items():
        status = dump.get("pg_status", {}).get(str(number), {})
        done = [entry["collective_seq_id"] for entry in entries if entry["state"] == "completed"]
        completed = max([int(status.get("last_completed_collective", 0)), *done, 0])
        queued = max(entry["collective_seq_id"] for entry in entries)
        name, description = entries[0]["process_group"]
        oldest = next((entry for entry in entries if entry["collective_seq_id"] == completed + 1), None)
        ranks = json.loads(members.get(name) or "[]")
        text = "" if oldest is None else _described(oldest)
        traces.append(GroupTrace(f"{name} ({description})", ranks, queued, completed, text))
    return traces


def _described(entry: Mapping[str, Any]) -> str:
    kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    return f"{kind} of {', '.join('x'.join(map(str, size)) or '1' for size in entry['input_sizes']) or 'nothing'}"


def compare_traces(traces: Mapping[int, Sequence[GroupTrace]]) -> WaitingCollectives:
    """Return which ranks the others wait for. ``traces``: by rank, of the ranks that have written one."""
    by_name = {rank: {group.name: group for group in groups} for rank, groups in traces.items()}
    awaited: dict[int, set[int]] = {}  # ranks that wait for it, by rank
    kinds: dict[tuple[str, int], dict[str, list[int]]] = {}  # ranks by the kind of a collective
    late: dict[tuple[str, int], list[int]] = {}
    for rank, groups in by_name.items():
        for name, group in groups.items():
            number = group.completed + 1
            if group.queued < number:
                continue
            kinds.setdefault((name, number), {}).setdefault(group.oldest, []).append(rank)
            absent = GroupTrace(name, (), 0, 0)
            others = [other for other in group.ranks or by_name if other in by_name and other != rank]
            behind = [other for other in others if by_name[other].get(name, absent).queued < number]
            late[name, number] = behind
            for other in behind:
                awaited.setdefault(other, set()).add(rank)
    waiting = set[int]().union(*awaited.values())
    lines: list[str] = []
    for (name, number), of_kind in kinds.items():
        waits = [f"rank {_ranks(ranks)} in {kind or 'an unknown one'}" for kind, ranks in of_kind.items()]
        missing = late[name, number]
        waits.append(f"not queued by rank {_ranks(missing)}" if missing else "queued by all that answered")
        lines.append(f"group {name}, collective {number}: {'; '.join(waits)}")
    text = ["Not completed, by NCCL's flight recorder:", *first_lines(lines, _SHOWN)] if lines else []
    return WaitingCollectives(sorted(awaited.keys() - waiting), "\n  ".join(text))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
