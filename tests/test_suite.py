"""The suite itself: names of files; a test that is ended leaves no process; warm starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.config.hydra import compose_with_yaml
from tests import helpers
from tests.conftest import WAITING
from tests.helpers import ROOT, launch_command, patience, torchrun
from tests.infra import composition, warm
from tests.infra.runs import processes_of, wait_for

TESTS = Path(__file__).parent


# tests of whole jobs, of what several packages do together, and of what is beside the package
BESIDE = ("system", "equivalence", "gpu", "infra", "user_project")


def test_each_file_of_tests_is_named_after_a_module() -> None:
    """tests/a/test_b.py, or test_b_WORDS.py for a part of its tests, tests launcher/a/b.py; test_a.py the package."""
    strange: list[str] = []
    for file in TESTS.rglob("test_*.py"):
        packages = file.relative_to(TESTS).parts[:-1]
        if packages and packages[0] not in BESIDE:
            package = ROOT.joinpath("launcher", *packages)
            stem = file.stem.removeprefix("test_") + "_"
            names = [packages[-1], *(module.stem for module in package.glob("*.py"))]
            if not any(stem.startswith(f"{module}_") for module in names):
                strange.append(str(file.relative_to(TESTS)))
    assert strange == []


@pytest.mark.parametrize("stem", WAITING)
def test_the_files_that_come_first_exist(stem: str) -> None:
    assert (TESTS / f"system/{stem}.py").is_file()


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


# Written by a script under torchrun, whose ranks are started by a warm process: each rank to a file of its own, because
# lines that are longer than a pipe's buffer are mixed up.
SHOW = """
import json, os, random, signal, sys
from pathlib import Path
text = json.dumps({
    "rank": os.environ["RANK"], "argv": sys.argv, "cwd": os.getcwd(), "beside": sys.path[0],
    "cmdline": Path("/proc/self/cmdline").read_text(), "environ": Path("/proc/self/environ").read_text(),
    "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text(), "session": os.getsid(0) == os.getpid(),
    "files": sorted(os.listdir("/proc/self/fd")), "numbers": random.random(),
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "name": __name__,
})
Path(f"rank{os.environ['RANK']}.json").write_text(text)
"""


def ranks_shown(script: Path) -> list[dict[str, Any]]:
    torchrun(script, ["one", "two words"], 2, script.parent)
    return [json.loads((script.parent / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_warm_process_is_as_one_that_was_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    warm_ranks = ranks_shown(script)
    monkeypatch.setenv(warm.COLD, "1")
    cold_ranks = ranks_shown(script)
    assert warm_ranks[0]["numbers"] != warm_ranks[1]["numbers"]
    varying = re.compile(r"(COLUMNS|LINES|MASTER_PORT|TORCHELASTIC_\w+|LAUNCHER_TEST_COLD)=")
    for ours, executed in zip(warm_ranks, cold_ranks, strict=True):
        for one in (ours, executed):
            del one["numbers"]
            one["environ"] = sorted(word for word in one["environ"].split("\0") if word and not varying.match(word))
            one["cmdline"], one["parent"] = one["cmdline"].rstrip("\0"), one["parent"].rstrip("\0")
        assert set(ours.pop("environ")) ^ set(executed.pop("environ")) == set()
        assert ours == executed


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["nonsense"], 2)])
def test_a_warm_process_has_the_status_and_output_of_its_program(arguments: list[str], status: int) -> None:
    command = launch_command(*arguments)
    ours = warm.run(command, patience(60))
    cold = {**os.environ, warm.COLD: "1"}
    executed = subprocess.run(command, capture_output=True, text=True, check=False, env=cold)
    assert ours.returncode == executed.returncode == status
    assert (ours.stdout, ours.stderr) == (executed.stdout, executed.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=hsdp", "optimizer=sgd", "schedule=constant", "precision=fp16", "train.steps=3"],
        ["cluster=slurm", "strategy=fsdp", "task.width=32"],
    ],
)
def test_a_config_from_the_cache_is_hydras(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cached = compose_with_yaml(words)
    monkeypatch.setattr("hydra.compose", composition.by_hydra)
    assert cached == compose_with_yaml(words)


HANG = """
import os, time
print("output", flush=True)

def wait():
    open(f"hangs{os.environ['RANK']}", "w").close(), time.sleep(9999)

wait()
"""


@pytest.mark.slow
def test_a_run_that_hangs_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)

    def communicate(process: warm.Popen, timeout: float | None = None) -> tuple[str, str]:
        if timeout is not None:
            wait_for(lambda: len([*tmp_path.glob("hangs?")]) == 2, "both ranks to hang")
            raise subprocess.TimeoutExpired(process.args, timeout)
        return subprocess.Popen.communicate(process)

    monkeypatch.setattr(warm.Popen, "communicate", communicate)
    monkeypatch.setattr(helpers, "patience", lambda seconds: seconds)
    with pytest.raises(AssertionError, match=r"No end within 15 s(.|\n)*output(.|\n)*line 6 in wait"):
        torchrun(script, [], 2, tmp_path, timeout=15)
    assert processes_of(tmp_path) == []
