"""Exports that are refused or fail: one message, and nothing is left behind."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.errors import UserError
from launcher.extensions.export.request import parse_size
from tests.conftest import Launch
from tests.helpers import launch_command
from tests.infra.checkpoints import make_checkpoint
from tests.infra.made_runs import make_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MB = 1 << 20


def own_loop(place: Path, *steps: int) -> Path:
    """A run of a script, whose model the launcher cannot build, with a checkpoint for each of ``steps``."""
    paths = make_run(place / "runs", "own")
    paths.loop_plan.write_text(json.dumps(json.loads(paths.plan.read_text()) | {"task": _no_task(paths.plan)}))
    fields = json.loads(paths.plan.read_text())
    paths.plan.write_text(json.dumps({key: fields[key] for key in _OF_SCRIPT}))
    for step in steps:
        make_checkpoint(paths.checkpoint(step), {"weight": torch.arange(4000.0), "count": torch.tensor(step)})
    return paths.root


_OF_SCRIPT = ("format", "run", "cluster", "env", "command")


def _no_task(plan: Path) -> dict[str, object]:
    return json.loads(plan.read_text())["task"] | {"target": "", "params": {}}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
def test_what_is_refused(launch: Launch, tmp_path: Path) -> None:
    run = own_loop(tmp_path, 2, 12)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()

    def refused(*words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        done = launch("export", "own", *words, status=2)
        assert done.stderr.count("launch: error: ") == 1
        assert "Traceback" not in done.stderr
        assert sorted(tmp_path.rglob("*")) == before
        return done.stderr

    assert "--to" in refused()
    assert "has no checkpoint of step 3.\n  It has those of steps 2, 12." in refused("--to", "out", "--step", "3")
    assert "has no best checkpoint" in refused("--to", "out", "--best")
    assert "has no averages" in refused("--to", "out", "--ema")
    assert "is not empty" in refused("--to", "full")
    assert "is a file" in refused("--to", "file")
    assert "there is no directory" in refused("--to", "nowhere/out")
    assert "must be a size above 0, such as 5GB" in refused("--to", "out", "--max-shard-size", "many")
    assert "invalid choice" in refused("--to", "out", "--dtype", "int8")
    data = next((run / "checkpoints" / "step_000012").glob("*.distcp"))
    flip(data)
    assert f"the content of {data.name} has changed" in refused("--to", "out")
    data.unlink()
    assert f"{data.name}: No such file" in refused("--to", "out")
    (data.parent / "manifest.json").unlink()
    assert "it has no manifest.json" in refused("--to", "out")
    assert launch("export", "own", "--to", "out", "--step", "2").returncode == 0
    (tmp_path / "runs" / "own" / "checkpoints").rename(tmp_path / "elsewhere")
    assert "has no checkpoint yet" in refused("--to", "new")


@pytest.mark.slow
def test_a_disk_that_refuses_ends_it(tmp_path: Path) -> None:
    own_loop(tmp_path, 2)
    command = shlex.join(launch_command("export", "own", "--to", "out"))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 8; exec {command}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not be written: [Errno 27] File too large" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


MEASURE = """
import json, resource, sys
from pathlib import Path
from launcher.extensions.export.exporter import export
from launcher.extensions.export.request import ExportRequest
from launcher.rundir.files import value_from_json
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
request = value_from_json(ExportRequest, json.loads(sys.argv[1]))
before = peak()
answer = export(request)
print(json.dumps({"grew": peak() - before, **answer}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", pytest.param(None, marks=pytest.mark.nightly)])
def test_one_tensor_is_held_at_a_time(dtype: str | None, tmp_path: Path) -> None:
    """In a process of its own; the checkpoint has twelve times the largest tensor, and reading it takes no more."""
    largest = 24 * MB
    model = {f"layers.{i}": torch.full((largest // 4,), float(i)) for i in range(12)}
    checkpoint = make_checkpoint(tmp_path / "step_000001", model)
    (tmp_path / "out").mkdir()
    request = {
        "checkpoint": str(checkpoint), "directory": str(tmp_path / "out"), "target": "", "params": {},
        "import_from": [], "seed": 0, "averages": None, "merge_lora": False, "dtype": dtype, "shard_bytes": 10**10,
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tensors"] == 12
    assert answer["grew"] < 2 * largest + 16 * MB


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("300", 300)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--max-shard-size", text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "5 parsecs", "I"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="--max-shard-size"):
        parse_size("--max-shard-size", text)
