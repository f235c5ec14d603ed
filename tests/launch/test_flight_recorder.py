"""NCCL's flight recorder: what torch writes, which rank the others wait for, and how a process is asked."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from launcher.launch import flight_recorder
from launcher.launch.flight_recorder import GroupTrace, compare_traces, read_trace, request_traces
from launcher.launch.hang_verdict import Stacks, judge_hang
from tests.infra.runs import wait_for
from tests.launch.test_hang_verdict import STOPPED, STUCK_IN_LOSS, T, seen, waits

ALL, SHARDS = ("0", "default_pg"), ("1", "mesh_shard")


def dump(*of_group: tuple[tuple[str, str], int, int, str], ranks: str = "[]") -> dict[str, Any]:
    """Return the values of a trace of torch 2.13.

    Args:
        of_group: name, the newest collectives that were queued and completed, and the kind of the others.
    """
    entries: list[dict[str, Any]] = []
    for number, (group, queued, completed, kind) in enumerate(of_group):
        entries += [
            {
                "collective_seq_id": seq, "frames": [], "input_dtypes": ["Float"], "input_sizes": [[3, 4]],
                "is_p2p": False, "op_id": seq, "output_dtypes": ["Float"], "output_sizes": [[3, 4]], "p2p_seq_id": 0,
                "pg_id": number, "process_group": group, "profiling_name": f"nccl:{kind}", "record_id": seq,
                "retired": seq <= completed, "state": "completed" if seq <= completed else "scheduled",
                "time_created_ns": 1, "time_discovered_completed_ns": None, "time_discovered_started_ns": None,
                "timeout_ms": 600000,
            }
            for seq in range(max(1, completed - 1), queued + 1)
        ]  # fmt: skip
    groups = {str(number): group for number, group in enumerate(of_group)}
    return {
        "version": "2.10", "entries": entries, "nccl_comm_state": {},
        "pg_config": {n: {"name": name, "desc": about, "ranks": ranks} for n, ((name, about), *_) in groups.items()},
        "pg_status": {
            n: {"last_enqueued_collective": last, "last_started_collective": -1, "last_completed_collective": done}
            for n, (_, last, done, _) in groups.items()
        },
    }  # fmt: skip


def trace(*of_group: tuple[tuple[str, str], int, int, str], ranks: str = "[]") -> tuple[GroupTrace, ...]:
    return tuple(read_trace(pickle.dumps(dump(*of_group, ranks=ranks), protocol=2)))


def test_what_torch_writes_is_read() -> None:
    """Gloo has the same recorder as NCCL, and does not set the state of its collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        dist.all_reduce(torch.ones(3, 4))
    dist.destroy_process_group()
    written = _distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
    *_, newest = read_trace(written)
    assert newest.name == "0 (default_pg)"
    assert newest.queued == newest.completed > 1
    made, real = dump((ALL, 2, 1, "all_reduce")), pickle.loads(written)
    assert made.keys() - {"nccl_comm_state"} <= real.keys()
    assert made["entries"][0].keys() <= real["entries"][-1].keys()
    assert [*read_trace(_distributed_c10d._dump_fr_trace_json())][-1] == newest  # type: ignore[attr-defined]


def test_a_trace_is_no_code() -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_trace(pickle.dumps({"entries": [Path()]}, protocol=2))


def test_the_rank_that_has_not_queued_what_the_others_wait_in() -> None:
    late, other = trace((ALL, 56, 56, "all_reduce")), trace((ALL, 60, 56, "all_reduce"))
    found = compare_traces({0: other, 1: late, 2: other}, range(3))
    assert found.ranks == [1]
    assert found.text == (
        "Not completed, by NCCL's flight recorder:\n"
        "  group 0 (default_pg), collective 57: rank 0, 2 in all_reduce of 3x4; not queued by rank 1"
    )
    assert compare_traces({0: trace((ALL, 57, 56, "all_reduce")), 1: ()}, (0, 1)).ranks == [1], "it has not run any"


def test_a_rank_that_waits_itself_is_not_the_cause() -> None:
    """Rank 0 waits for rank 1 among its shards, and that one for rank 3 among all."""
    waits_for_1 = trace((ALL, 9, 9, "all_reduce"), (SHARDS, 5, 4, "all_gather"), ranks="[0, 1]")
    waits_for_3 = trace((("0", "default_pg"), 10, 9, "all_reduce"), (SHARDS, 4, 4, "all_gather"))
    found = compare_traces({0: waits_for_1, 1: waits_for_3, 3: trace((ALL, 9, 9, "all_reduce"))}, (0, 1, 3))
    assert 1 not in found.ranks
    assert 3 in found.ranks


def test_collectives_that_all_have_queued() -> None:
    stuck = trace((ALL, 57, 56, "all_reduce"))
    by_all = "rank 0, 1 in all_reduce of 3x4; queued by all that answered"
    assert compare_traces({0: stuck, 1: stuck}, (0, 1)).text.endswith(by_all)
    found = compare_traces({0: stuck, 1: trace((ALL, 57, 56, "all_gather"))}, (0, 1))
    assert found.ranks == []
    assert "rank 0 in all_reduce of 3x4; rank 1 in all_gather of 3x4; queued by all that answered" in found.text
    nothing = compare_traces({0: trace((ALL, 57, 57, "all_reduce"))}, (0, 1))
    assert not nothing.text
    assert not any((nothing.ranks, nothing.unknown, nothing.waiting))


def test_a_rank_whose_queue_is_full_is_not_named_for_where_it_stands() -> None:
    waiting, late = trace((ALL, 60, 56, "all_reduce")), trace((ALL, 56, 56, "all_reduce"))
    behind, ahead = [seen(0, 3, 7), seen(1, 3, 7)], [seen(2, 3, 8)]
    answers = {0: STUCK_IN_LOSS, 1: STUCK_IN_LOSS, 2: waits(2)}
    assert judge_hang(behind, answers, T, ahead).rank == 0
    verdict = judge_hang(behind, answers, T, ahead, compare_traces({0: waiting, 1: waiting, 2: late}, range(3)))
    assert (verdict.rank, verdict.host) == (2, "host1")
    assert verdict.text.endswith("collective 57: rank 0, 1 in all_reduce of 3x4; not queued by rank 2")
    found = compare_traces({0: waiting, 1: waiting}, (0, 1))
    nobody = judge_hang(behind, answers, T, found=found)
    assert nobody.rank is None, "all wait for the GPU"
    assert "2 ranks wait for each other" in nobody.text
    assert "queued by all that answered" in nobody.text
    one_unknown = compare_traces({0: waiting}, (0, 1))
    assert judge_hang(behind, answers, T, found=one_unknown).rank == 1, "nothing is known of its GPU"
    other_group = compare_traces({0: waiting, 1: (), 2: waiting}, range(3))
    assert judge_hang(behind, answers, T, found=other_group).rank == 1


@pytest.mark.parametrize("silent", [STOPPED, STUCK_IN_LOSS])
@pytest.mark.parametrize("is_behind", [True, False])
def test_a_rank_without_a_trace_is_named_and_not_one_that_waits_for_it(silent: Stacks, is_behind: bool) -> None:
    """HSDP on two by two: rank 2 waits for rank 3 among its shards, and rank 0 for rank 2 among its replicas."""
    replicas = ("2", "mesh_replicate")
    found = compare_traces(
        {
            0: trace((SHARDS, 5, 5, "all_gather"), ranks="[0, 1]")
            + trace((replicas, 3, 2, "all_reduce"), ranks="[0, 2]"),
            1: trace((replicas, 3, 2, "all_reduce"), ranks="[1, 3]"),
            2: trace((SHARDS, 5, 4, "all_gather"), ranks="[2, 3]"),
        },
        range(4),
    )
    assert found.ranks == []
    assert "no trace of rank 3" in found.text
    answers = {2: STUCK_IN_LOSS, 3: silent}
    last = seen(3, 3, 7 if is_behind else 8)
    behind, others = ([seen(2, 3, 7), last], []) if is_behind else ([seen(2, 3, 7)], [last])
    verdict = judge_hang(behind, answers, T, others, found)
    assert verdict.rank == 3
    assert (silent.missing_reason or silent.location) in verdict.text


def test_a_process_is_asked_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in flight_recorder.variables(str(tmp_path), tmp_path).items():
        monkeypatch.setenv(name, value)
    pipe, file = tmp_path / "rank1.pipe", tmp_path / "nccl_trace_rank1"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # as torch does
    file.write_text("of an earlier hang")
    content = json.dumps(dump((ALL, 2, 1, "all_reduce"))).encode()

    def asked() -> bool:
        try:
            return bool(os.read(reader, 100))
        except BlockingIOError:
            return False

    def answer() -> None:
        wait_for(asked, "the request")
        file.write_bytes(content[:100])
        file.write_bytes(content)

    monkeypatch.setattr(flight_recorder, "_WITHIN_S", 60.0)
    torchs_thread = threading.Thread(target=answer)
    torchs_thread.start()
    found = request_traces([0, 1])
    torchs_thread.join()
    os.close(reader)
    assert found == {1: [GroupTrace("0 (default_pg)", [], 2, 1, "all_reduce of 3x4")]}, "rank 0 has no pipe"
    for name in flight_recorder.variables(str(tmp_path), tmp_path):
        monkeypatch.delenv(name)
    assert request_traces([1]) == {}
