"""Commands that run on a login node, through a real sshd: what arrives there, what comes back, and how it fails."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher
from launcher.extensions.login.login_shell import RemoteProject, record_file, remote_command
from tests.helpers import launch, launch_command, patience
from tests.infra import warm
from tests.infra.made_runs import make_run
from tests.infra.runs import wait_for
from tests.infra.sshd import LoginNode, login_node, needs_sshd
from tests.infra.terminal import on_terminal

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_sshd]

THERE = ("cluster=slurm", "cluster.login=login")
# records its directory and its arguments, then does what a test says
RECORDER = """\
#!/bin/sh
[ "$1" = --version ] && echo {version} && exit
pwd > ~/directory
printf '%s\\0' "$@" > ~/arguments
{then}
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    with login_node(tmp_path_factory.mktemp("login") / "node") as there:
        yield there


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of a user who has never connected to a login node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    project = tmp_path / "my project"
    project.mkdir()
    (project / "job.py").write_text("print(1)\n")
    return project


def know(laptop: Path, *entries: dict[str, object]) -> None:
    """Write places into the user's record."""
    record_file().parent.mkdir(parents=True, exist_ok=True)
    record_file().write_text(json.dumps({"id": "a", "places": {str(laptop / "runs"): entries}}))


def record(node: LoginNode, then: str = "", version: str = launcher.__version__) -> None:
    node.install(RECORDER.format(version=version, then=then))
    (node.home / "arguments").unlink(missing_ok=True)


def arrived(node: LoginNode) -> list[str]:
    return (node.home / "arguments").read_text().split("\0")[:-1]


def directory(node: LoginNode) -> Path:
    """The project's copy."""
    return Path((node.home / "directory").read_text().rstrip("\n"))


def typed(node: LoginNode, laptop: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = launch(*arguments, cwd=laptop, env=node.env)
    assert done.returncode == status, done.stdout + done.stderr
    return done


STRANGE = (
    "a b",
    "it's",
    "a\\\\b",
    "end\\",
    "x\ny",
    "!x",
    'say "x"',
    "$HOME `id` $(id)",
    "back\\slash",
    "*",
    "",
    "a;b&c|d>e",
    "#no",
    "-n",
    "é",
)


def test_arguments_and_paths_arrive_as_they_were_typed(node: LoginNode, laptop: Path) -> None:
    record(node)
    name = 'run.name="it\'s $HOME"'
    typed(node, laptop, "run", *THERE, "cluster.login_dir='~/the \"scratch\" $HOME'", name, "--", "job.py", *STRANGE)
    ours = [name, "cluster.login=null", "cluster.login_dir=null", "cluster.login_setup=[]"]
    assert arrived(node) == ["run", "cluster=slurm", *ours, "--", "job.py", *STRANGE]
    assert directory(node) == node.home / 'the "scratch" $HOME'
    assert (directory(node) / "job.py").read_text() == "print(1)\n"


def test_the_copy_follows_the_project(node: LoginNode, laptop: Path) -> None:
    record(node)
    (laptop / "package").mkdir()
    (laptop / "package/old module.py").write_text("")
    (laptop / "library").mkdir()
    (laptop / "library/mine.py").write_text("")
    (laptop / "runs/earlier").mkdir(parents=True)
    (laptop / "runs/earlier/code.py").write_text("")
    typed(node, laptop, "train", *THERE)
    copy = directory(node)
    assert copy.parent == node.home / "launcher"
    assert copy.name.startswith("my project.")
    (copy / "data").mkdir()
    (copy / "data/words.txt").write_text("of the cluster")
    (laptop / "package/old module.py").rename(laptop / "package/new module.py")
    (laptop / "library/mine.py").unlink()
    (laptop / "library").rmdir()
    (laptop / "library").write_text("a file now")
    (laptop / "job.py").write_text("print(2)\n")
    typed(node, laptop, "train", *THERE)
    assert directory(node) == copy
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    files -= {".launcher/commit", ".launcher/files", ".launcher/lock", ".launcher/owner"}
    assert files == {"job.py", "package/new module.py", "library", "data/words.txt"}
    assert (copy / "job.py").read_text() == "print(2)\n"


def test_a_login_shell_may_be_fish() -> None:
    inner = shlex.join(["printf", "%s\\0", *STRANGE])
    command = remote_command(RemoteProject("login", (), "", ""), [inner])
    shown = subprocess.run(["fish", "-c", command[-1]], capture_output=True, check=True).stdout
    assert shown.decode().split("\0")[:-1] == [*STRANGE]


def test_files_behind_a_symbolic_link_stay(node: LoginNode, laptop: Path) -> None:
    record(node)
    (laptop / "data").mkdir()
    (laptop / "data/readme.md").write_text("of the project")
    (laptop / ".env").write_text("SECRET=1")
    scratch = node.home / "scratch"
    scratch.mkdir()
    typed(node, laptop, "train", *THERE, "cluster.login_dir=linked")
    copy = directory(node)
    assert not (copy / ".env").exists(), "secrets stay on the laptop"
    (copy / "data/readme.md").rename(scratch / "readme.md")
    (copy / "data").rmdir()
    (copy / "data").symlink_to(scratch)
    (laptop / "data/readme.md").unlink()
    typed(node, laptop, "train", *THERE, "cluster.login_dir=linked")
    assert (scratch / "readme.md").exists()


def test_what_start_up_files_print_is_no_answer(node: LoginNode, laptop: Path, submitted: Path) -> None:
    assert submitted.is_dir()
    (node.home / ".bashrc").write_text("echo hello from bashrc\n")
    try:
        assert len(json.loads(typed(node, laptop, "runs", "--json").stdout)) == 2
        typed(node, laptop, "report", "own")
        assert "<html" in (laptop / "runs/report.html").read_text()
    finally:
        (node.home / ".bashrc").unlink()


def test_a_silent_login_node_hides_no_other(node: LoginNode, laptop: Path, submitted: Path) -> None:
    (entry,) = json.loads(record_file().read_text())["places"][str(laptop / "runs")]
    silent = {"login": "nowhere", "setup": [], "directory": "x", "runs": "runs"}
    know(laptop, silent, entry)
    assert json.loads(typed(node, laptop, "status", "own", "--json").stdout)["dir"] == str(submitted / "own")
    assert "nowhere: ssh cannot connect" in typed(node, laptop, "status", "nope", status=2).stderr
    know(laptop, {**entry, "runs": str(submitted)})
    make_run(laptop / "runs", "here")
    assert json.loads(typed(node, laptop, "status", str(submitted / "own"), "--json").stdout)["name"] == "own"


def test_a_local_run_needs_no_connection(laptop: Path) -> None:
    make_run(laptop / "runs", "mine")
    place = {"login": "nowhere.invalid", "setup": [], "directory": "x", "runs": "runs"}
    know(laptop, place)
    assert launch("status", "mi", cwd=laptop).returncode == 0
    listed = launch("runs", "--json", cwd=laptop)
    assert [run["name"] for run in json.loads(listed.stdout)] == ["mine"]
    assert "ssh cannot connect" in listed.stderr
    assert "there is no such run" in launch("status", str(laptop / "typo"), cwd=laptop).stderr
    record_file().write_text("{")
    damaged = launch("runs", cwd=laptop)
    assert (damaged.returncode, "is damaged" in damaged.stderr) == (2, True)


def test_directories_of_pythonpath_are_copied(node: LoginNode, laptop: Path, tmp_path: Path) -> None:
    record(node, "echo $PYTHONPATH")
    for place in (laptop / "src", tmp_path / "shared"):
        place.mkdir()
        (place / f"{place.name}_module.py").write_text("")
    done = launch("train", *THERE, cwd=laptop, env={**node.env, "PYTHONPATH": f"src:{tmp_path}/shared"})
    first, second = done.stdout.strip().split(":")
    assert Path(first) == directory(node) / "src"
    assert (Path(second) / "shared_module.py").is_file()


def test_output_and_status_come_back(node: LoginNode, laptop: Path) -> None:
    record(node, "echo out; echo err >&2; exit 75")
    done = typed(node, laptop, "train", *THERE, "--quiet", status=75)
    assert done.stdout == "out\n", "what .bash_profile prints is not the command's"
    assert done.stderr == "err\n"


def test_setup_lines_find_launch(node: LoginNode, laptop: Path) -> None:
    record(node, 'echo "$GREETING"')
    (node.home / "bin/launch").rename(node.home / "elsewhere")
    (node.home / "my tools").mkdir()
    (node.home / "elsewhere").rename(node.home / "my tools/launch")
    lines = """cluster.login_setup=['export PATH="$HOME/my tools:$PATH"  # tools','export GREETING="it is here"']"""
    assert typed(node, laptop, "plan", *THERE, lines).stdout == "it is here\n"
    (node.home / "my tools/launch").unlink()


def test_a_config_file_names_the_login_node(node: LoginNode, laptop: Path) -> None:
    record(node)
    (laptop / "conf/cluster").mkdir(parents=True)
    (laptop / "conf/cluster/ours.yaml").write_text("kind: slurm\nlogin: login\npartition: gpu\n")
    typed(node, laptop, "train", "--config-dir", f"{laptop}/conf", "cluster=ours")
    assert arrived(node)[:4] == ["train", "--config-dir", "conf", "cluster=ours"]
    assert (directory(node) / "conf/cluster/ours.yaml").is_file()
    other = laptop.parent / "conf/cluster"
    other.mkdir(parents=True)
    (other / "ours.yaml").write_text("kind: slurm\nlogin: login\n")
    refused = typed(node, laptop, "train", "--config-dir=../conf", "cluster=ours", status=2)
    assert "--config-dir=../conf: is outside of the directory that is copied" in refused.stderr


def test_a_sweep_is_one_command_there(node: LoginNode, laptop: Path) -> None:
    record(node, "echo once >> ~/times")
    typed(node, laptop, "train", "-m", *THERE, "train.seed=1,2,3")
    assert (node.home / "times").read_text() == "once\n"
    assert arrived(node)[:4] == ["train", "-m", "cluster=slurm", "train.seed=1,2,3"]
    assert "--yes" in arrived(node)
    typed(node, laptop, "plan", "-m", *THERE, "train.seed=1,2,3")
    assert "--yes" not in arrived(node), "which is a flag of launch train"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "cluster.login=login"], "cluster.login=login: has no effect with cluster=local."),
        (["doctor", "cluster=hosts", "cluster.login=login"], "cluster.login=login: has no effect with cluster=hosts."),
        (["train", "cluster=slurm", "cluster.login=nowhere"], "cluster.login=nowhere: ssh cannot connect: "),
        (["train", "cluster=slurm", "cluster.login=stranger"], "ssh cannot connect: "),
        (["train", "cluster=slurm", "cluster.login=-oProxyCommand\\=x"], "must be a destination of ssh"),
        (["train", "cluster=slurm", "cluster.login='a b'"], "must be a destination of ssh"),
        (["train", *THERE, "cluster.login_dir=full"], "full there has files that the launcher did not copy"),
        (["train", *THERE, "cluster.login_dir=."], "cluster.login_dir=.: must be a directory for this project alone"),
        (["train", *THERE, "train.stepz=3"], "train.stepz=3: there is no such key"),
        (["verify", *THERE], "`launch verify` runs its ranks on this machine"),
    ],
)
def test_mistakes_are_one_message(node: LoginNode, laptop: Path, arguments: list[str], words: str) -> None:
    record(node)
    (node.home / "full").mkdir(exist_ok=True)
    (node.home / "full/precious.py").touch()
    done = typed(node, laptop, *arguments, status=2)
    assert words in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not (node.home / "arguments").exists()
    assert not (laptop / "runs").exists()
    if "stranger" in str(arguments):
        assert "Permission denied" in done.stderr
        assert "ssh-add" in done.stderr


def test_launch_must_be_there_in_the_same_version(node: LoginNode, laptop: Path) -> None:
    record(node, version="0.0.9")
    old = typed(node, laptop, "train", *THERE, status=2)
    assert f"launcher 0.0.9 is there, and {launcher.__version__} here" in old.stderr
    (node.home / "bin/launch").unlink()
    (node.home / "bin/launch").symlink_to("nothing")
    hidden = ["cluster.login_setup=['export PATH=/usr/bin:/bin']"]
    assert "a login shell there finds no `launch`" in typed(node, laptop, "train", *THERE, *hidden, status=2).stderr
    (node.home / "bin/launch").unlink()


def test_without_ssh_nothing_is_tried(laptop: Path) -> None:
    done = launch("train", *THERE, cwd=laptop, env={"PATH": "/nowhere"})
    assert done.returncode == 2
    assert "there is no `ssh` on this machine" in done.stderr


def test_a_lost_connection_is_said(node: LoginNode, laptop: Path) -> None:
    record(node, "echo started; cat; echo the input has ended > ~/ended")
    with warm.Popen(
        launch_command("train", *THERE, "--wait"), cwd=laptop, env={**os.environ, **node.env},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "started\n"
        node.cut()
        _, errors = process.communicate(timeout=patience(60))
    wait_for((node.home / "ended").exists, "the command there notices")
    assert process.returncode == 1
    assert "the connection to login failed or was lost. Jobs that were submitted there continue; a submission" in errors
    assert "launch logs RUN --follow" in errors


def test_ctrl_c_without_a_terminal_reaches_the_command_there(node: LoginNode, laptop: Path) -> None:
    code = "import time; from launcher.process import *; interrupt_at_end_of_input(); print('started', flush=True); "
    code += "time.sleep(1000)"
    record(node, f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} || echo it was interrupted")
    with warm.Popen(
        launch_command("train", *THERE), cwd=laptop, env={**os.environ, **node.env},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=patience(60))
    assert process.returncode == 130
    assert "it was interrupted" in shown, "its last output is shown"
    assert "KeyboardInterrupt" in errors


def test_two_projects_do_not_share_a_copy(node: LoginNode, laptop: Path, tmp_path: Path) -> None:
    record(node)
    typed(node, laptop, "train", *THERE, "cluster.login_dir=shared")
    other = tmp_path / "clone"
    shutil.copytree(laptop, other)
    refused = typed(node, other, "train", *THERE, "cluster.login_dir=shared", status=2).stderr
    assert (
        f"cluster.login_dir=shared: on login is the copy of another project, {os.uname().nodename}:{laptop}" in refused
    )
    remove = refused.rpartition("ssh login ")[2].strip()
    subprocess.run([f"{node.root}/bin/ssh", "login", f"cd; {remove}"], check=True)  # HOME is not that of the account
    typed(node, other, "train", *THERE, "cluster.login_dir=shared")
    assert "is the copy of another project" in typed(node, laptop, "plan", *THERE, status=2).stderr


def test_ctrl_c_on_a_terminal_reaches_the_command_there(node: LoginNode, laptop: Path) -> None:
    record(node, "trap 'echo stopped; exit 130' INT; test -t 1 && echo started; while :; do sleep 0.1; done")
    status, shown = on_terminal("train", *THERE, cwd=laptop, env=node.env, until="started", then=b"\x03")
    assert status == 130
    assert "stopped" in shown


def test_top_runs_where_the_runs_are(node: LoginNode, laptop: Path) -> None:
    record(node, "if test -t 0 && test -t 1; then echo on a terminal; fi")
    typed(node, laptop, "train", *THERE)
    status, shown = on_terminal("top", cwd=laptop, env=node.env)
    assert (status, arrived(node)) == (0, ["top", "--dir", "runs"])
    assert "on a terminal" in shown


@pytest.fixture
def submitted(node: LoginNode, laptop: Path) -> Path:
    """The directory of runs on the login node, with two runs; the laptop has submitted there."""
    record(node)
    typed(node, laptop, "train", *THERE)
    node.install_launcher()
    runs = directory(node) / "runs"
    for name in ("own", "other one"):
        paths = make_run(runs, name)
        paths.logs.mkdir()
        paths.rank_log(0).write_text("printed there\n")
    return runs


def test_commands_on_runs_find_them_there(node: LoginNode, laptop: Path, submitted: Path) -> None:
    assert not list((laptop / "runs").glob(".*")), "a clone of the project must not bring a place along"
    assert record_file().parent.stat().st_mode & 0o077 == 0, "shell lines may contain a secret"
    assert json.loads(typed(node, laptop, "status", "own", "--json").stdout)["dir"] == str(submitted / "own")
    assert "other one" in typed(node, laptop, "status", "oth").stdout, "a prefix"
    assert typed(node, laptop, "logs", "runs/other one", "--follow").stdout == "printed there\n"
    assert "there is no such run" in typed(node, laptop, "status", "nope", status=2).stderr
    listed = json.loads(typed(node, laptop, "runs", "--json").stdout)
    assert {(run["name"], run["login"]) for run in listed} == {("own", "login"), ("other one", "login")}


def test_runs_here_are_listed_beside_those_there(node: LoginNode, laptop: Path, submitted: Path) -> None:
    make_run(laptop / "runs", "own-here")
    shown = typed(node, laptop, "runs").stdout
    assert shown.index("own-here") < shown.index(f"login:{submitted.parent}") < shown.index("other one")
    assert json.loads(typed(node, laptop, "status", "own", "--json").stdout)["name"] == "own", "a whole name"
    assert json.loads(typed(node, laptop, "status", "own-", "--json").stdout)["name"] == "own-here"
    assert "matches own-here here, and runs on login" in typed(node, laptop, "status", "ow", status=2).stderr
    mixed = typed(node, laptop, "report", "own-here", "own", status=2).stderr
    assert "`launch report` compares runs of one place" in mixed


def test_the_page_of_a_report_comes_back(node: LoginNode, laptop: Path, submitted: Path) -> None:
    shown = typed(node, laptop, "report", "own", "other one").stdout
    assert "The page: runs/report.html" in shown
    assert "<html" in (laptop / "runs/report.html").read_text()
    typed(node, laptop, "report", "runs", "--html", "out.html", "--csv")
    assert "<html" in (laptop / "out.html").read_text()
    assert not list((submitted.parent / ".launcher").glob("page.*"))


def test_a_changed_command_is_sent_as_typed(node: LoginNode, laptop: Path, submitted: Path) -> None:
    assert submitted.is_dir()
    record(node)
    typed(node, laptop, "resume", "own", "train.steps=7", "--wait")
    assert arrived(node) == ["resume", "own", "train.steps=7", "--wait", "--dir", "runs"]


def test_ssh_is_called_without_a_shell(node: LoginNode, laptop: Path, tmp_path: Path) -> None:
    """A user's options of ssh are those of its own configuration: the command line has only what must not be asked."""
    record(node)
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    client = shlex.quote(f"{node.root}/bin/ssh")
    (tmp_path / "bin/ssh").write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {client} "$@"\n')
    (tmp_path / "bin/ssh").chmod(0o755)
    launch("plan", *THERE, cwd=laptop, env={"PATH": f"{tmp_path}/bin:{node.env['PATH']}"}, status=0)
    assert all("BatchMode=yes" in line and " -- login exec bash" in line for line in calls.read_text().splitlines())
    wait_for(lambda: len(calls.read_text().splitlines()) == 2, "two calls")
