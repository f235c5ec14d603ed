"""Durable writes and reads on disks that hosts share."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.launch.agent import open_attempt
from launcher.rundir import files
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import last_lines, read_json, write_json, write_text
from launcher.rundir.paths import RunPaths


def test_no_two_writers_share_a_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes on several nodes may have one number, and in containers one host name."""
    partials: list[str] = []
    replace = Path.replace

    def noted(self: Path, target: Path) -> Path:
        partials.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    for text in ("one", "two"):
        write_text(tmp_path / "summary.json", text)
    assert (tmp_path / "summary.json").read_text() == "two"
    first, second = partials
    assert first != second
    assert first.startswith(f".summary.json.{os.uname().nodename}.{os.getpid()}.")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "file", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("stale", [1, 3, 1000])
def test_a_file_that_another_host_replaces_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: int
) -> None:
    path = tmp_path / "incarnation.json"
    write_json(path, {"incarnation": "0.1"})
    asked = 0

    def read(path: Path) -> bytes:
        nonlocal asked
        asked += 1
        if asked <= stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return path.read_bytes()

    monkeypatch.setattr(files, "read_bytes", read)
    if stale < 1000:
        assert read_json(path) == {"incarnation": "0.1"}
        return
    with pytest.raises(OSError, match="Stale"):
        read_json(path)
    assert asked < 20


def test_what_a_killed_process_was_writing_goes_when_the_run_begins_again(tmp_path: Path) -> None:
    torn = (
        "import os, signal, sys; from pathlib import Path; from launcher.rundir.files import write_text\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_text(Path(sys.argv[1]), 'half')"
    )
    file = tmp_path / "summary.json"
    assert subprocess.run([sys.executable, "-c", torn, str(file)], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    of_the_living = tmp_path / f".summary.json.{os.uname().nodename}.{os.getpid()}.0123abcd"
    of_another_host = tmp_path / ".summary.json.elsewhere.1.0123abcd"
    of_a_number_used_again = tmp_path / f".summary.json.{os.uname().nodename}.{os.getpid()}.4567cdef"
    of_a_checkpoint = tmp_path / "checkpoints" / left.name.replace("summary.json", "latest")
    of_a_checkpoint.parent.mkdir()
    for place in (left, of_a_number_used_again, of_a_checkpoint, of_another_host, tmp_path / ".submission.0"):
        place.touch()
        os.utime(place, (0, 0))
    of_the_living.touch()
    start = psutil.Process().create_time() + 0.01
    os.utime(of_the_living, (start, start))
    open_attempt(Fence(RunPaths(tmp_path), Incarnation()))
    assert not left.exists()
    assert not of_a_checkpoint.exists()
    assert {path.name for path in tmp_path.glob(".*")} == {of_the_living.name, of_another_host.name, ".submission.0"}


def test_the_end_of_a_log_that_is_larger_than_memory(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    with log.open("wb") as file:
        file.seek(2**40)  # a hole, which takes no space
        file.write(b"\nlast\nwords\n")
    assert last_lines(log, 2) == ["last", "words"]


def test_the_last_lines_are_whole_whatever_their_length(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    for length in (10, 4095, 4096, 5000, 8190, 8191, 8192, 8193, 20_000):
        lines = [letter * length for letter in "abc"]
        log.write_text("\n".join(lines) + "\n")
        assert last_lines(log, 2) == lines[1:]
        assert last_lines(log, 1) == lines[2:]
