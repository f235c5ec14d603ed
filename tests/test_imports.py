"""The rooms: who may import whom, what the command line must not import, and who reads torchrun's variables."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher

PACKAGE = Path(launcher.__file__).parent
# what a person types: it asks the other rooms, and none of them asks it
ON_TOP = ("launcher.doctor", "launcher.commands", "launcher.cli")
HEAVY = {"torch", "wandb", "submitit", "sklearn", "numpy"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def room(name: str) -> list[Path]:
    found = sorted((PACKAGE / name).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize(
    ("of", "never"),
    [
        ("cluster", ("launcher.train", "launcher.report", *ON_TOP)),
        ("train", ("launcher.cluster", "launcher.report", "launcher.api", *ON_TOP)),
        ("drill", ("launcher.train", "launcher.report", "launcher.commands", "launcher.cli")),
        ("doctor", ("launcher.train", "launcher.report", "launcher.commands", "launcher.cli")),
        ("commands", ("launcher.train", "launcher.tasks", "launcher.cli")),
        ("report", ("launcher.train", "launcher.cluster", "launcher.sweeps", *ON_TOP)),
        ("sweeps", ("launcher.train", "launcher.report", *ON_TOP)),
        ("tasks", ("launcher.cluster", "launcher.report", *ON_TOP)),
    ],
)
def test_rooms_do_not_import_each_other(of: str, never: tuple[str, ...]) -> None:
    for path in room(of):
        wrong = [name for name in imports(path) if name.startswith(never)]
        assert not wrong, f"{path.name} imports {wrong}"


def test_nothing_imports_jobs() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "jobs"]


def test_only_world_reads_torchruns_variables() -> None:
    """In the workers; the agent is the one who hands them out."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() in ("train/world.py", "cluster/agent.py"):
            continue
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        docs = {"WORLD_SIZE"} if path.name == "engine.py" else set[str]()  # it names the variable in an error
        assert not strings & names - docs, path


@pytest.mark.parametrize(
    "code",
    [
        "import launcher",
        "import launcher.api, launcher.cluster.local, launcher.cluster.agent, launcher.report.terminal",
        "import launcher; launcher.Loss, launcher.Config, launcher.compose",
        "from launcher.cli import run; assert run(['--help']) == 0",
        "import launcher.commands.doctor, launcher.doctor.examine, launcher.doctor.bandwidth, launcher.report.checks",
        "from launcher.cli import run; assert run(['runs', '--dir', '.']) == 0",
        "import launcher.commands.drill, launcher.drill.conduct, launcher.drill.queued, launcher.report.drill",
        "import launcher.commands.report, launcher.report.page, launcher.report.page.plots",
        "from launcher.cli import run; assert run(['plan']) == 0",
        "from launcher.cli import run; assert run(['plan', '--json', 'strategy.sync=every']) == 0",
        "from launcher.cli import run; assert run(['plan', 'batch.globl_size=3']) == 2",
    ],
)
def test_the_control_side_imports_nothing_heavy(code: str, tmp_path: Path) -> None:
    check = f"{code}\nimport sys\nprint('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_only_the_report_needs_what_the_report_is_made_of(tmp_path: Path) -> None:
    """Not even its modules, until there is something to report: `launch runs` answers without them."""
    modules = "{'plotly', 'orjson', 'jinja2'}"
    code = "from launcher.cli import run; import sys; run(['--help']); run(['runs']); import launcher.commands.report"
    check = f"{code}; assert not {modules} & set(sys.modules), 'imported too early'"
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, check=True)


def test_a_look_at_a_task_needs_no_compiler(tmp_path: Path) -> None:
    """Every `launch train` and `launch plan` waits for it, and torch's compiler takes as long to import as torch."""
    look = "probe('launcher.tasks.bytes_gpt.BytesGPT', {}, ['.'], shards=True, seed=0)"
    code = f"import sys; from launcher.train.probe import probe; print({look})"
    check = f"{code}; print(sorted({{'torch._dynamo', 'torch.distributed.tensor'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_exist() -> None:
    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        launcher.Engin  # noqa: B018  # pyright: ignore
