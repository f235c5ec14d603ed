"""The copy of the user's code: what is in it, what is not, and that it is what a job imports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launcher.config.hydra import compose
from launcher.errors import SiteError
from launcher.launch.slurm import submit
from launcher.plan.host import Site
from launcher.plan.launch_plan import LaunchPlan, RunInfo
from launcher.plan.placement import SCRIPT_COMMAND, solve_script
from launcher.rundir import code_snapshot
from launcher.rundir.paths import RunPaths
from launcher.runs.control import _renamed


def files(copy: str) -> set[str]:
    return {str(path.relative_to(copy)) for path in Path(copy).rglob("*") if path.is_file()}


def git(root: Path, *command: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *identity, *command], check=True, capture_output=True)


def commit(root: Path, *names: str, ignored: str = "") -> None:
    """Commit files of a new work tree, and ignore others."""
    if ignored:
        (root / ".gitignore").write_text(ignored)
        names = (".gitignore", *names)
    git(root, "init")
    git(root, "add", *names)
    git(root, "commit", "-m", "first")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "tasks.py").write_text("x = 1\n")
    (root / "pkg" / "words.json").write_text("[]\n")
    (root / "runs" / "old" / "code").mkdir(parents=True)
    (root / "runs" / "old" / "code" / "tasks.py").write_text("x = 0\n")
    (root / "venv").mkdir()
    (root / "venv" / "pyvenv.cfg").write_text("")
    (root / "venv" / "module.py").write_text("")
    (root / "data.bin").write_bytes(bytes(2 * 2**20))
    return root


def test_of_a_plain_directory_what_is_small(project: Path, tmp_path: Path) -> None:
    (copy,) = code_snapshot.copy_code([project], tmp_path / "code", project / "runs")
    assert files(copy) == {"pkg/tasks.py", "pkg/words.json"}


def test_of_a_git_tree_what_git_knows_with_uncommitted_changes(project: Path, tmp_path: Path) -> None:
    commit(project, "pkg/tasks.py", "data.bin", ignored="venv/\nruns/\n")
    (project / "pkg" / "tasks.py").write_text("x = 2\n")
    (project / "pkg" / "new.py").write_text("y = 1\n")
    (copy,) = code_snapshot.copy_code([project], tmp_path / "code", project / "runs")
    assert files(copy) == {".gitignore", "pkg/tasks.py", "pkg/new.py", "pkg/words.json", "data.bin"}
    assert (Path(copy) / "pkg" / "tasks.py").read_text() == "x = 2\n"
    notes = json.loads((tmp_path / "code" / "code.json").read_text())
    assert isinstance(notes, list)
    head = subprocess.check_output(["git", "-C", str(project), "rev-parse", "HEAD"], text=True).strip()
    assert notes[0]["commit"].startswith(f"{head}-dirty.")
    assert notes[0]["from"] == str(project)
    task = project / "pkg" / "tasks.py"
    assert code_snapshot.commit_of(task, ()) == notes[0]["commit"]
    task.write_text("x = 3\n")
    assert code_snapshot.commit_of(task, ()) not in (head, notes[0]["commit"]), "another difference is another name"
    git(project, "stash")
    assert code_snapshot.commit_of(task, ()) == head
    assert code_snapshot.commit_of(Path(copy) / "pkg" / "tasks.py", (copy,)) == notes[0]["commit"]
    assert code_snapshot.commit_of(tmp_path / "tasks.py", (copy,)) is None
    assert code_snapshot.commit_of(Path(code_snapshot.__file__).parents[1] / "tasks" / "digits.py", ()) is None


@pytest.mark.parametrize("with_git", [True, False])
def test_the_code_behind_a_link_is_copied_and_no_secrets(project: Path, tmp_path: Path, *, with_git: bool) -> None:
    library, data = tmp_path / "shared" / "helper", tmp_path / "data"
    (library / "inner").mkdir(parents=True)
    data.mkdir()
    for file in (library / "__init__.py", library / "inner" / "more.py", library / "weights.bin", data / "a.json"):
        file.write_text("x = 1\n")
    (project / "helper").symlink_to("../shared/helper")
    (project / "data").symlink_to(data)
    (library / "up").symlink_to(project)  # links in a circle
    (library / "again").symlink_to(library)
    (project / "past").symlink_to(project / "runs")
    (project / "one.py").symlink_to(library / "__init__.py")
    (project / "pkg" / ".env").write_text("SECRET=1\n")
    if with_git:
        (project / ".gitignore").write_text("venv/\nruns/\ndata.bin\n.gitignore\n")
        git(project, "init")
        git(project, "add", "helper", "data", "one.py", "pkg")
    (copy,) = code_snapshot.copy_code([project], tmp_path / "code", project / "runs")
    expected = {"helper/__init__.py", "helper/inner/more.py", "one.py", "pkg/tasks.py", "pkg/words.json"}
    assert files(copy) == expected
    assert not [path for path in Path(copy).rglob("*") if path.is_symlink()]


def test_where_nobody_can_tell_no_commit_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = project / "pkg" / "tasks.py"
    assert code_snapshot.commit_of(task, ()) is None, "no work tree"
    git(project, "init")
    assert code_snapshot.commit_of(task, ()) is None, "nothing is committed"
    commit(project, "pkg")
    assert len(code_snapshot.commit_of(task, ()) or "") == 40
    (slow := tmp_path / "bin" / "git").parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(code_snapshot, "_PATIENCE_S", 0.2)
    assert code_snapshot.commit_of(task, ()) is None, "a disk that does not answer"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_snapshot.commit_of(task, ()) is None, "no git"


def test_the_roots_are_the_tasks_and_pythonpaths(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(other))
    assert code_snapshot.roots_of_task("pkg.tasks.Task", str(project)) == [project, other]
    monkeypatch.delenv("PYTHONPATH")
    assert (
        code_snapshot.roots_of_task("launcher.tasks.bytes_gpt.BytesGPT", str(tmp_path)) == []
    )  # installed, like torch


def test_a_directory_of_data_is_refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_snapshot, "_MOST_FILES", 1)
    with pytest.raises(SiteError, match="contains more than 1 files"):
        code_snapshot.copy_code([project], tmp_path / "code", project / "runs")


@pytest.mark.parametrize("with_git", [False, True])
@pytest.mark.parametrize("where", [".", ".."])
def test_runs_beside_the_code_are_left_out(project: Path, where: str, *, with_git: bool) -> None:
    """run.dir is the project itself, or holds it: neither older runs nor the new one are code."""
    (project / "runs" / "old" / "plan.json").write_text("{}")
    (project / "runs" / "old" / "config.yaml").write_text("")
    new = project / "new"
    new.mkdir()
    (new / "config.yaml").write_text("")
    if with_git:
        (project / ".gitignore").write_text("venv/\ndata.bin\n")
        git(project, "init")
    (copy,) = code_snapshot.copy_code([project], new / "code", (project / where).resolve())
    assert files(copy) - {".gitignore"} == {"pkg/tasks.py", "pkg/words.json"}


def test_a_copy_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SiteError, match=r"empty contains no code .*\n  Put the code there"):
        code_snapshot.copy_code([tmp_path / "empty"], tmp_path / "code", tmp_path / "runs")


def test_work_trees_in_the_work_tree_are_copied_too(project: Path, tmp_path: Path) -> None:
    library, nested = tmp_path / "library", project / "nested"
    library.mkdir()
    for place in (nested, project):
        place.mkdir(exist_ok=True)
        git(place, "init")
    (library / "words.py").write_text("x = 1\n")
    commit(library, ".")
    (nested / ".gitignore").write_text("*.log\n")
    (nested / "more.py").write_text("")
    (nested / "said.log").write_text("")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", str(library), "third/words")
    (project / "third" / "words" / "new.py").write_text("")
    (project / ".gitignore").write_text("venv/\nruns/\ndata.bin\n")
    (copy,) = code_snapshot.copy_code([project], tmp_path / "code", project / "runs")
    assert {"third/words/words.py", "third/words/new.py", "nested/more.py"} <= files(copy)
    assert "nested/said.log" not in files(copy)


def script_plan(project: Path, tmp_path: Path, program: list[str]) -> LaunchPlan:
    run = RunInfo(name="r", id="0", dir=str(tmp_path / "runs" / "r"), created="", version="")
    plan = solve_script(compose(["cluster=slurm"]), Site(gpus=0, cores=2, cwd=str(project)), run, program)
    plan.paths.root.mkdir(parents=True)
    return plan


def test_a_script_has_pythonpath_too_and_the_copies_take_its_places(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, script = tmp_path / "library", project / "pkg" / "main.py"
    library.mkdir()
    (library / "helper.py").write_text("")
    script.write_text("")
    missing, ours = str(tmp_path / "missing"), str(Path(code_snapshot.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{missing}:{library}:{ours}:{project / 'pkg'}")
    plan = script_plan(project, tmp_path, ["pkg/main.py", "--x"])
    roots = submit._roots(plan)
    assert roots == [project / "pkg", library]
    code = plan.paths.code
    frozen = submit._freeze(plan, roots)
    assert frozen.command[-2:] == (str(code / "pkg" / "main.py"), "--x")
    assert frozen.env.set["PYTHONPATH"] == f"{missing}:{code / 'library.1'}:{ours}:{code / 'pkg'}"
    assert frozen.env.set.items() > plan.env.set.items()
    assert files(str(code / "library.1")) == {"helper.py"}
    monkeypatch.delenv("PYTHONPATH")
    assert code_snapshot.moved_pythonpath([], []) == ""


@pytest.mark.parametrize("pythonpath", ["", "."])
@pytest.mark.parametrize(
    ("program", "place"),
    [(["-m", "pkg.tasks", "--x"], "project"), (["trainer", "--x"], None), (["env/trainer", "--x"], None)],
)
def test_the_code_of_a_module_is_copied_and_a_command_runs_as_installed(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: list[str],
    place: str | None,
    pythonpath: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", pythonpath)
    monkeypatch.chdir(project)
    (project / "env").mkdir()
    for name in ("python", "trainer"):
        (project / "env" / name).touch()
    plan = script_plan(project, tmp_path, program)
    frozen = submit._freeze(plan, submit._roots(plan))
    code = str(plan.paths.code / project.name)
    expected = tuple(program) if place is None else ("-m", code, "pkg.tasks", "--x")
    assert frozen.command[len(SCRIPT_COMMAND) :] == expected
    assert place is None or "pkg/tasks.py" in files(code)
    again = _renamed(frozen, RunPaths(plan.paths.root))
    assert again.command == tuple(word.replace("runs/r/", "runs/r.retry1/") for word in frozen.command)


def test_what_was_sent_to_another_machine_is_copied_there_with_its_commit(project: Path, tmp_path: Path) -> None:
    commit(project, "pkg/tasks.py", "data.bin", ignored="venv/\nruns/\n")
    (there := tmp_path / "there").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "words.py").write_text("")
    archive, number = code_snapshot.pack({"": project, ".launcher/path0/": shared}, project / "runs")
    subprocess.run(["tar", "-xzf", "-", "-C", str(there)], input=archive, check=True)
    (there / "dataset").mkdir()
    (there / "dataset/image.json").write_text("of the cluster")
    roots = [there, there / "pkg", there / ".launcher/path0"]
    mine, package, other = code_snapshot.copy_code(roots, tmp_path / "code", there / "runs")
    assert files(mine) == {".gitignore", "pkg/tasks.py", "pkg/words.json", "data.bin"}
    assert files(package) == {"tasks.py", "words.json"}
    assert files(other) == {"words.py"}
    assert number == 5
    known = code_snapshot.commit_of(project / "pkg/tasks.py", ())
    assert known is not None
    assert code_snapshot.commit_of(Path(mine) / "pkg/tasks.py", (mine, package, other)) == known
