"""Hosts that share a key: nobody else joins them, reads their stores or disturbs them."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch
from tests.helpers import key_file, launch_command
from tests.infra.hosts import Hosts
from tests.infra.jobs_on_hosts import SMALL, finish
from tests.infra.netns import needs_root
from tests.infra.runs import records, summary, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]

LISTENS = "0A"  # in /proc/net/tcp
# 200 strangers that send something to HOST:PORT, or nothing, and what they get back
STRANGERS = """
import socket, sys
from contextlib import suppress
host, port = sys.argv[1], int(sys.argv[2])
silent = [socket.create_connection((host, port)) for _ in range(100)]
for number in range(100):
    with socket.create_connection((host, port), timeout=60) as stranger, suppress(ConnectionError):
        stranger.sendall((b"GET / HTTP/1.1\\r\\n\\r\\n", b'{"launch": "launcher 1"}\\n', b"\\0\\xff" * 99)[number % 3])
        while answer := stranger.recv(4096):
            assert answer[:2] == b"\\x15\\x03", answer  # an alert of TLS
"""


def disturb(there: Hosts, port: int, directory: Path) -> Any:
    """Strangers on host 1, at a port of host 0, as a process."""
    return there.start(1, [sys.executable, "-c", STRANGERS, there.address(0), str(port)], directory)


def listening(there: Hosts, host: int) -> set[tuple[str, int, bool]]:
    """The addresses and ports on which the processes of a host listen, and whether a worker does; "any": IPv6 too."""
    found: set[tuple[str, int, bool]] = set()
    for pid in there.pids(host):
        process = Path(f"/proc/{pid}")
        worker = b"launcher.train.worker" in (process / "cmdline").read_bytes()
        own = set[str]()
        for file in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # it is closed meanwhile
                own.add(str(file.readlink()))
        for name in ("tcp", "tcp6"):
            for line in (process / "net" / name).read_text().splitlines()[1:]:
                local, state, inode = (line.split()[column] for column in (1, 3, 9))
                if state == LISTENS and f"socket:[{inode}]" in own:
                    address, _, port = local.partition(":")
                    four = bytes.fromhex(address)[::-1]
                    found.add((socket.inet_ntoa(four) if name == "tcp" else "any", int(port, 16), worker))
    return found


def test_strangers_neither_join_nor_disturb_a_job_with_a_key(pair: Hosts, tmp_path: Path, launch: Launch) -> None:
    key, other_key = (f"cluster.key={key_file(tmp_path / name)}" for name in ("key.pem", "other.pem"))
    job = ("train.steps=300", "cluster.workers_per_node=2", "train.seed=3")
    where = f"cluster.rendezvous={pair.address(0)}:29400"
    job_of_two = (*SMALL, *job, "cluster=hosts", "cluster.nodes=2", where)
    one, two = tmp_path / "host0", tmp_path / "host1"
    for directory in (one, two):
        directory.mkdir()
    first = pair.start(0, launch_command("train", *job_of_two, key), one)
    # strangers before the other host is there; each waits for the first host to listen
    for keys, message in (((other_key,), "has another key"), ((), "needs a cluster.key")):
        (text,) = finish([pair.start(1, launch_command("train", *job_of_two, *keys), two)], 2)
        assert text.count("launch: error: ") == 1
        assert message in text
    finish([disturb(pair, 29400, two)], 0)
    second = pair.start(1, launch_command("train", *job_of_two, key), two)
    run = one / "runs/job"
    wait_for_steps(run, 2)
    store = int(json.loads((run / "plan.json").read_text())["cluster"]["place"]["store"].rpartition(":")[2])
    open_here = listening(pair, 0)
    assert {address for address, _, _ in open_here} == {"127.0.0.1", pair.address(0)}, "no socket on every interface"
    outside = {port for address, port, worker in open_here if address == pair.address(0) and not worker}
    assert outside == {29400, store}
    assert {address for address, _, worker in listening(pair, 1) if not worker} == {"127.0.0.1"}
    finish([disturb(pair, port, two) for port in outside], 0, 0)
    (late,) = finish([pair.start(1, launch_command("train", *job_of_two, other_key), tmp_path)], 2)
    assert "has another key" in late
    assert (first.poll(), second.poll()) == (None, None), "the job was over before it was disturbed"
    outputs = finish([first, second], 0, 0)
    assert outputs[0].count(": refused ") <= 3, "one line a minute"
    assert f":29400: refused a connection from {pair.address(1)}, without this job's cluster.key." in outputs[0]
    log = (run / "logs/node0.log").read_text()
    assert log.count(f":{store}: refused a connection from {pair.address(1)}, without this job's cluster.key.") == 1
    assert summary(run) == summary(two / "runs/job")

    done = launch("train", *SMALL, *job, "cluster.workers_per_node=4")
    assert done.returncode == 0, done.stderr
    for ours, local in zip(records(run), records(tmp_path / "runs/job"), strict=True):
        assert ours["train/loss"] == pytest.approx(local["train/loss"], rel=1e-4)
