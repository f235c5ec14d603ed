"""`launch run`: any torchrun script, on the same cluster options, without the engine; and the jobs that come along."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import ROOT
from tests.infra.runs import CANARY, files_with_canary

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
import helper_beside_the_script
import torch.distributed as dist
dist.init_process_group("gloo")
mine = sorted(name for name in os.environ if name.startswith(("MY_", "SLURM_PROCID")))
print("rank", dist.get_rank(), "of", dist.get_world_size(), sys.argv[1:], mine)
print("to stderr", file=sys.stderr)
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise KeyError("no such luck")
if "--leave" in sys.argv and dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "scripts"
    place.mkdir()
    (place / "helper_beside_the_script.py").write_text("")
    (place / "script.py").write_text(SCRIPT)
    return place / "script.py"


def test_a_script_runs_as_under_torchrun(launch: Launch, script: Path, tmp_path: Path) -> None:
    done = launch(
        "run", "cluster.workers_per_node=3", "run.name=r", "--", str(script), "--flag", "a=b",
        env={"MY_SECRET": CANARY, "RANK": "0", "WORLD_SIZE": "1", "ROLE_NAME": "MY_", "SLURM_PROCID": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "of 3 ['--flag', 'a=b'] ['MY_SECRET']"
    assert done.stdout.splitlines() == [f"rank 0 {expected}", "to stderr"], "rank 0 is echoed, in order"
    for rank in (1, 2):
        assert f"rank {rank} {expected}" in (tmp_path / "runs" / "r" / "logs" / f"rank{rank}.log").read_text()
    assert files_with_canary(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("how", "words"),
    [("--fail", "rank 1 failed: KeyError: 'no such luck'"), ("--leave", "rank 1 failed: exited with status 3")],
)
def test_a_failing_script(launch: Launch, script: Path, how: str, words: str) -> None:
    done = launch("run", "run.name=r", "--", str(script), how)
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.startswith("Traceback") == (how == "--fail")


def test_a_module_and_an_installed_command(launch: Launch, tmp_path: Path) -> None:
    package, command = tmp_path / "trainer" / "deep", tmp_path / "bin" / "train-it"
    for place in (package, command.parent):
        place.mkdir(parents=True)
    (package / "beside.py").write_text("")
    (package / "loop.py").write_text(
        "import os, sys\nfrom . import beside\nimport in_the_directory\n"
        "def main():\n    print(sys.argv[1:], os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
        "    return 0 if os.path.exists('repaired') else 3\n"
        "if __name__ == '__main__':\n    print(__spec__.name)\n    sys.exit(main())\n"
    )
    (tmp_path / "in_the_directory.py").write_text("")
    done = launch("run", "cluster.workers_per_node=1", "run.name=module", "--", "-m", "trainer.deep.loop", "--x", "a=b")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["trainer.deep.loop", "['--x', 'a=b'] 0 of 1"]
    assert "failed: exited with status 3" in done.stderr
    (tmp_path / "repaired").touch()
    again = launch("resume", "module")
    assert (again.returncode, again.stdout.partition("\n")[2]) == (0, done.stdout), again.stderr

    command.write_text(f"#!{sys.executable}\nimport sys\nfrom trainer.deep.loop import main\nsys.exit(main())\n")
    command.chmod(0o755)
    env = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    done = launch("run", "cluster.workers_per_node=1", "--", "train-it", "--y", env=env)
    assert (done.returncode, done.stdout) == (0, "['--y'] 0 of 1\n"), done.stderr
    assert len([*(tmp_path / "runs").glob("train-it-*")]) == 1


TORN = """
import os, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("torn"):
        time.sleep(0.01)
    sys.exit(3)
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").close()
open("torn", "w").close()
time.sleep(600)
"""


def test_an_error_file_that_its_writer_did_not_finish(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(TORN)
    done = launch("run", "run.name=r", "--", "torn.py")
    assert done.returncode == 1
    assert "rank 1 failed: exited with status 3" in done.stderr


def test_a_users_own_error_class_is_the_users(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class ConfigError(Exception):\n    pass\nraise ConfigError('mine')\n")
    done = launch("run", "--", "own.py")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def test_a_script_with_idle_threads_ends(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(
        "import atexit\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor()\npool.submit(print, 'worked').result()\natexit.register(print, 'at exit')\n"
    )
    done = launch("run", "cluster.workers_per_node=1", "--", "idle.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["worked", "at exit", ""]


def test_a_folder_called_launcher_does_not_get_in_the_way(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").write_text("raise SystemExit('the wrong launcher')")
    (tmp_path / "script.py").write_text("print('right')")
    done = launch("run", "cluster.workers_per_node=1", "--", "script.py")
    assert (done.returncode, done.stdout) == (0, "right\n")


def test_restarts(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(
        "import os, time\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt)\ndist.barrier()\n"
        "if attempt == '0':\n    os.kill(os.getpid(), 9) if dist.get_rank() else time.sleep(600)\n"
    )
    job = ("cluster.workers_per_node=2", "cluster.max_restarts=1", "cluster.grace_s=1")
    done = launch("run", *job, "run.name=r", "--", "flaky.py")
    assert done.returncode == 0, done.stderr
    logs = tmp_path / "runs" / "r" / "logs"
    assert "attempt 0" in (logs / "rank0.log").read_text()
    assert "attempt 1" in (logs / "rank0.attempt1.log").read_text()
    assert "restarted: attempt 1 (rank 1: killed by SIGKILL)" in " ".join(launch("status", "r").stdout.split())


def test_your_own_loop(launch: Launch) -> None:
    job = ROOT / "jobs" / "own_loop.py"
    assert len(job.read_text().splitlines()) <= 45
    done = launch("run", "--", str(job))
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if "of the wire saved" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert done.stdout.count("75.0% of the wire saved") == 4


def test_windows_of_a_finished_run_are_none(launch: Launch, tmp_path: Path) -> None:
    text = (ROOT / "jobs" / "own_loop.py").read_text().replace("train.steps=40", "train.steps=3")
    (tmp_path / "twice.py").write_text(f"{text}\nprint('again', len(list(engine.windows(data))), engine.steps)\n")
    done = launch("run", "--", "twice.py")
    assert done.returncode == 0, done.stderr
    assert "again 0 3" in done.stdout.splitlines()


def test_an_optimizer_without_some_parameters_is_refused(launch: Launch, tmp_path: Path) -> None:
    text = (
        (ROOT / "jobs" / "own_loop.py").read_text().replace("AdamW(model.parameters()", "AdamW(model.norm.parameters()")
    )
    (tmp_path / "part.py").write_text(text)
    done = launch("run", "--", "part.py")
    assert done.returncode == 2
    assert "of the model's trained parameters: bytes.weight" in done.stderr


def test_your_own_loop_may_fail_in_the_middle_of_a_window(launch: Launch, tmp_path: Path) -> None:
    """Its loader processes once outlived it: they ignored the signal that the rank ends them with."""
    text = (ROOT / "jobs" / "own_loop.py").read_text()
    broken = text.replace("    result = engine.step()", "    raise RuntimeError('in the middle')", 1)
    assert broken != text
    (tmp_path / "broken.py").write_text(broken)
    done = launch("run", "--", "broken.py")
    assert done.returncode == 1
    assert "RuntimeError: in the middle" in done.stderr


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("engine.backward(*loss(engine.model, batch))", "engine.backward(loss_sum, items) was not called"),
        ("result = engine.step()", "A window was left without engine.step(), after 4 of its 4 micro-batches"),
    ],
)
def test_a_loop_that_leaves_out_a_call_is_told(launch: Launch, tmp_path: Path, call: str, words: str) -> None:
    text = (ROOT / "jobs" / "own_loop.py").read_text()
    assert text.count(call) == 1
    loop, _, _ = text.partition("    engine.finish_step(result)")
    (tmp_path / "loop.py").write_text(loop.replace(call, "pass"))
    done = launch("run", "run.name=r", "cluster.max_restarts=1", "--", "loop.py")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs/r/logs").glob("*.attempt1*")), "it would fail again"


def test_the_benchmark_compares_within_one_run(launch: Launch) -> None:
    done = launch("run", "--", str(ROOT / "jobs" / "bench.py"), "--case", "mlp", "--steps", "20")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == "mlp"
    assert float(words[words.index("ratio") + 1]) > 0


def test_summary_of_a_script_that_was_killed(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os\nprint('last words')\nos.kill(os.getpid(), 9)\n")
    done = launch("run", "cluster.workers_per_node=1", "run.name=r", "--", "killed.py")
    assert done.returncode == 1
    assert "rank 0 failed: killed by SIGKILL" in done.stderr
    assert "last words" in done.stderr
    assert json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["verdict"] == "failed"
