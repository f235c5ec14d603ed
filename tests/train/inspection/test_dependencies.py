"""Dependencies of an inspection: `launch plan` repeats it when any of them has changed, and only then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import ROOT

SCRIPT = """
import json, os, sys
from launcher.train.inspection.dependencies import Dependencies

log = Dependencies()
sys.path.insert(0, os.getcwd())
import mine
exec(sys.argv[1])
print(json.dumps(log.found()))
"""


def found_by(code: str, place: Path, **env: str) -> dict[str, list[str]] | None:
    """Return what ``Dependencies`` finds in a process that runs ``code``, in a directory with a module of the user."""
    (place / "mine.py").write_text("import os\nFLAG = os.environ.get('FLAG')\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, code],
        cwd=place, env={"PYTHONPATH": str(ROOT), "PATH": "", **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("pass", set[str]()),
        ("open('data.txt').read()", {"data.txt"}),
        ("os.chdir('inner'); open(b'../data.txt', 'rb').read()", {"data.txt"}),
        ("os.read(os.open('data.txt', os.O_RDONLY), 9)", {"data.txt"}),
        ("open('data.txt', 'r+').read()", {"data.txt"}),
        ("import mmap; kept = mmap.mmap(os.open('data.txt', os.O_RDWR), 0)", {"data.txt"}),
        ("open('log.txt', 'a').write('x'); open('new.txt', 'w').write('x')", set[str]()),
        ("os.listdir()", {"."}),
        ("import pathlib; [*pathlib.Path('inner').glob('*.txt')]", {"inner"}),
        ("import glob; glob.glob('inner/*.txt')", {"inner"}),
        ("os.path.exists('absent.txt') or __import__('contextlib')", set[str]()),
        ("try: open('absent.txt')\nexcept OSError: pass", {"absent.txt"}),
        ("import numpy, tokenize; tokenize.open(numpy.__file__).read()", set[str]()),  # installed
    ],
)
def test_paths_that_were_read(code: str, read: set[str], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "data.txt").write_text("words")
    found = found_by(code, tmp_path)
    assert found is not None
    own = {str(Path(path).relative_to(tmp_path)) for path in found["paths"] if path.startswith(str(tmp_path))}
    assert own == read | {"mine.py"}
    others = [path for path in found["paths"] if not path.startswith(str(tmp_path))]
    assert all(path.endswith("-packages") or not Path(path).exists() for path in others), "directories of packages"


def test_variables_that_were_read(tmp_path: Path) -> None:
    found = found_by("os.environ['THERE']; 'ABSENT' in os.environ; os.getenv('OTHER')", tmp_path, THERE="1", UNREAD="2")
    assert found is not None
    assert {"FLAG", "THERE", "ABSENT", "OTHER"} <= {*found["variables"]}
    assert "UNREAD" not in found["variables"]


def test_what_a_network_said_cannot_be_followed(tmp_path: Path) -> None:
    code = (
        "import socket; server = socket.create_server(('127.0.0.1', 0)); socket.create_connection(server.getsockname())"
    )
    assert found_by(code, tmp_path) is None
    assert found_by("[open(f'{n}', 'w') and open(f'{n}') for n in range(5001)]", tmp_path) is None


TASK = """
import os
from pathlib import Path

import torch
from sizes import WIDTH
from launcher import Loss

HERE = Path(__file__).parent


class Mine:
    def __init__(self):
        with (HERE / "log").open("a") as log:  # a line for each inspection
            log.write("made\\n")

    def model(self):
        out = int(os.environ.get("OUT", "2"))
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, out))

    def train_data(self):
        return [torch.zeros(WIDTH) for _ in range(64 + len([*(HERE / "parts").iterdir()]))]

    def eval_data(self):
        return None

    def loss(self, model, batch):
        return Loss(total=model(batch).sum(), items=len(batch))
"""


@pytest.mark.slow
def test_a_plan_is_made_from_the_cache_until_something_changes(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "parts").mkdir()
    job = (
        "task._target_=mine.Mine", "strategy=fsdp", "cluster.workers_per_node=2", "batch.global_size=16",
        "batch.micro_size=2", "precision=fp32", "train.steps=3",
    )  # fmt: skip

    def inspections(*more: str, **env: str) -> int:
        (tmp_path / "log").write_text("")
        done = launch("plan", "--json", *job, *more, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        plan = json.loads(done.stdout)
        del plan["strategy"]["memory_bytes"]  # what this machine has free now
        found.append({name: value for name, value in plan.items() if name not in ("run", "notes")})
        return (tmp_path / "log").read_text().count("\n")

    found: list[dict[str, object]] = []
    assert inspections() == 1, "for the task and its windows"
    assert inspections() == 0
    assert found[0] == found[1]
    assert inspections("train.steps=4", "wandb.mode=disabled") == 0, "no trace depends on these"
    assert inspections("batch.micro_size=1") == 1, "the same task, other windows"
    for change in (
        lambda: (tmp_path / "sizes.py").write_text("WIDTH = 16\n"),
        lambda: (tmp_path / "parts" / "one").touch(),
    ):
        change()
        assert inspections() == 1
        assert found[-1] != found[-2]
    assert inspections(OUT="3") == 1
    (tmp_path / "runs").mkdir()
    assert inspections(OUT="3") == 0, "another entry of the directory, which only the import system lists"
