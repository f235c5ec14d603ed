"""NCCL's flight recorder: which collectives each rank has queued, and which of them are completed.

torch keeps the last 2,000 collectives of a process. A thread of it in C++ writes them to a file once something is
written to a pipe. It does not wait for the GPU, but may need the interpreter's lock: a process that holds it in C gives
no trace, like a stopped one. Traces show which rank the others wait for even where all ranks are stuck in code of their
own, because the queue of their GPU is full.
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
from launcher.quantities import first_lines, first_names

# torch appends the rank, and ".pipe" to the first
PIPE, FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_NEWER_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # a user may have set it, and torch prefers it
# torch looks at its pipe every second
_WITHIN_S = 6.0
_SHOWN = 8


def variables(pipes: str, logs: Path) -> dict[str, str]:
    """Return the environment variables of workers with GPUs. ``pipes``: a directory of this host; empty if nobody asks
    for traces."""
    return ({PIPE: f"{pipes}/rank"} if pipes else {}) | {FILE: f"{logs}/nccl_trace_rank"}


def make_pipes_directory() -> None:
    """Make the directory of the pipes again if somebody has emptied /tmp: torch aborts a worker that finds none."""
    if pipe := os.environ.get(PIPE):
        Path(pipe).parent.mkdir(mode=0o700, parents=True, exist_ok=True)


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
        unknown: ranks without a trace that others may wait for.
        waiting: ranks with a collective that is not completed.
        text: what waits for what, in lines; empty if nothing is known to wait.
    """

    ranks: Collection[int] = ()
    unknown: Collection[int] = ()
    waiting: Collection[int] = ()
    text: str = ""


NO_TRACES = WaitingCollectives()


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


def compare_traces(traces: Mapping[int, Sequence[GroupTrace]], ranks: Collection[int]) -> WaitingCollectives:
    """Return which ranks the others wait for.

    Args:
        traces: by rank, of the ranks that have written one.
        ranks: all ranks of the job.
    """
    by_name = {rank: {group.name: group for group in groups} for rank, groups in traces.items()}
    awaited, unknown, waiting, wait_for_others = set[int](), set[int](), set[int](), set[int]()
    # by group and number of a collective: the ranks that wait in it by its kind, those that have not queued it, and
    # those without a trace
    kinds: dict[tuple[str, int], dict[str, list[int]]] = {}
    missing: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
    for rank, groups in by_name.items():
        for name, group in groups.items():
            number = group.completed + 1
            if group.queued < number:
                continue
            waiting.add(rank)
            kinds.setdefault((name, number), {}).setdefault(group.oldest, []).append(rank)
            members, absent = set(group.ranks or ranks), GroupTrace(name, (), 0, 0)
            late = {other for other in members & by_name.keys() if by_name[other].get(name, absent).queued < number}
            silent = members - by_name.keys()
            missing[name, number] = late, silent
            awaited |= late
            unknown |= silent
            if late or silent:
                wait_for_others.add(rank)
    lines: list[str] = []
    for (name, number), of_kind in kinds.items():
        waits = [f"rank {_ranks(those)} in {kind or 'an unknown one'}" for kind, those in of_kind.items()]
        late, silent = missing[name, number]
        waits.append(f"not queued by rank {_ranks(late)}" if late else "queued by all that answered")
        waits += [f"no trace of rank {_ranks(silent)}"] if silent else []
        lines.append(f"group {name}, collective {number}: {'; '.join(waits)}")
    text = ["Not completed, by NCCL's flight recorder:", *first_lines(lines, _SHOWN)] if lines else []
    return WaitingCollectives(sorted(awaited - wait_for_others), unknown, waiting, "\n  ".join(text))


def _ranks(ranks: Collection[int]) -> str:
    return first_names([*map(str, sorted(ranks))], _SHOWN)
