"""The suite itself: its lists name files that are there, and a test that is ended leaves no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEALT_OUT, LONG, WAITING
from tests.helpers import ROOT
from tests.infra.runs import processes_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", [*WAITING, *LONG, *DEALT_OUT])
def test_the_files_that_are_named_are_there(file: str) -> None:
    assert (TESTS / f"{file}.py").is_file()


@pytest.mark.parametrize("file", DEALT_OUT)
def test_what_is_dealt_out_shares_nothing_long_in_the_making(file: str) -> None:
    shared = ('scope="module"', ": Hosts", ": Cluster")  # whose fixtures are a module's
    text = (TESTS / f"{file}.py").read_text()
    assert not [words for words in shared if words in text]


HANGS = """
import subprocess, sys
from pathlib import Path

# a worker is in a session of its own, and its agent is killed before it
AGENT = "import subprocess as s, time; s.Popen(['sleep', '{seconds}'], start_new_session=True); time.sleep(1000)"

def test_hangs():
    subprocess.run([sys.executable, "-c", AGENT], check=False)
"""


def test_a_test_that_is_ended_by_its_limit_takes_its_processes_with_it(tmp_path: Path) -> None:
    seconds = "98765.4321"  # a command line that nothing else has
    (tmp_path / "test_hangs.py").write_text(HANGS.replace("{seconds}", seconds))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--timeout=5", "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout" in done.stdout
    assert processes_of(Path(seconds)) == []
