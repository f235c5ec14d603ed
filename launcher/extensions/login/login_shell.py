"""Shell of a login node: commands in a copy of the project there, over the user's own ssh."""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import hashlib
import os
import secrets
import shlex
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher
from launcher.errors import ConfigError, SiteError, UserError
from launcher.rundir.code_snapshot import SENT
from launcher.rundir.files import read_json, value_from_json, write_json

# LogLevel: no "Connection closed" after a command with a terminal
_SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=10",
)  # fmt: skip
_MARK = "launcher-answers"
# file in the copy of a project: its number, and where it is
OWNER = f"{SENT}/owner"
NO_CONNECTION, NO_COMMAND = 255, 127  # exit statuses of ssh and of a shell
# exit statuses of the script in `_send`, and of `enter`
OTHER_VERSION, NO_DIRECTORY, OTHERS_FILES, OTHERS_PROJECT = 91, 92, 93, 94


@dataclass(frozen=True)
class RemoteProject:
    """Project on a login node.

    Attributes:
        login: destination of ssh.
        setup: shell lines before each command.
        directory: copy of the project; relative to the home directory until it exists.
        runs: directory of its runs, seen from there.
    """

    login: str
    setup: tuple[str, ...]
    directory: str
    runs: str

    def __post_init__(self) -> None:
        if self.login.startswith("-") or self.login.split() != [self.login]:
            raise self.error(
                "must be a destination of ssh.", "Write cluster.login=USER@HOST, or a Host of ~/.ssh/config."
            )

    @property
    def name(self) -> str:
        return f"{self.login}:{self.directory}"

    @property
    def enter(self) -> str:
        """Shell line that changes to the project."""
        return f"cd -- {shlex.quote(self.directory)} || exit {NO_DIRECTORY}"

    def error(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError("cluster.login", self.login, problem, remedy)


def remote_command(place: RemoteProject, lines: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the command line that runs shell lines on the login node, in a login shell.

    What the shell's start-up files and ``setup`` print is discarded, except errors, because a program may read the
    output; they read nothing, because the input may be an archive. The user's own shell may be any, fish for example:
    it sees only letters and digits between its quotes.
    """
    script = "; ".join([*(f"eval {shlex.quote(line)}" for line in place.setup), "exec >&3 3>&- <&4 4<&-", *lines])
    inner = f"exec bash -lc {shlex.quote(script)} 3>&1 >/dev/null 4<&0 </dev/null"
    code = base64.b64encode(os.fsencode(inner)).decode()
    line = f"exec bash -c 'eval \"$(echo {code} | base64 -d)\"'"
    return [*_SSH, "-tt" if terminal else "-T", "--", place.login, line]


def start_ssh(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen[bytes](command, **options)
    except FileNotFoundError:
        raise SiteError("cluster.login: there is no `ssh` on this machine.\n  Install the client of OpenSSH.") from None


def ask_login_node(place: RemoteProject, *lines: str, send: bytes = b"") -> bytes:
    """Return what shell lines print on the login node. ``send``: their input.

    Raises:
        ConfigError: ssh cannot connect, or they fail.
    """
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # some .bashrc print: what precedes the mark is not an answer
    with start_ssh(remote_command(place, [f"echo {_MARK}", *lines]), **pipes) as process:
        out, err = process.communicate(send)
    if process.returncode:
        raise connection_error(place, process.returncode, err.decode(errors="replace").strip())
    return out.partition(f"{_MARK}\n".encode())[2]


def connection_error(place: RemoteProject, status: int, text: str) -> ConfigError:
    """Return the error for an exit status. ``text``: what was printed on standard error."""
    last = (text.splitlines() or ["no message"])[-1].rstrip(".")
    if status == NO_CONNECTION:
        return place.error(
            f"ssh cannot connect: {last}.",
            f"ssh must not ask for anything: `ssh -o BatchMode=yes {place.login} true` has to work. Use a key and an "
            "agent (ssh-add), or open a shared connection first (ControlMaster in ~/.ssh/config).",
        )
    version = launcher.__version__
    if status == NO_COMMAND:
        return place.error(
            "a login shell there finds no `launch`.",
            f"Install launcher {version} there, and set cluster.login_setup to the shell lines that activate it, such "
            "as cluster.login_setup=['source venv/bin/activate'].",
        )
    if status == OTHER_VERSION:
        return place.error(f"launcher {last} is there, and {version} here.", "Install the same version on both.")
    if status == OTHERS_FILES:
        return place.error(
            f"the directory {place.directory} there has files that the launcher did not copy.",
            "Set cluster.login_dir to a directory for this project alone.",
        )
    if status == NO_DIRECTORY:
        return place.error(
            f"the directory {place.directory} is no longer there.",
            f"The next submission makes it. {record_file()}, which names all such places, may be deleted.",
        )
    if status == OTHERS_PROJECT:
        return ConfigError(
            "cluster.login_dir", place.directory, f"on {place.login} is the copy of another project, {last}.",
            "Choose a directory for each project. If that project has moved or is gone: "
            f"ssh {place.login} rm {shlex.quote(f'{place.directory}/{OWNER}')}",
        )  # fmt: skip
    return place.error(f"the command there ended with status {status}.", text.replace("\n", "\n  ") or "No message.")


def record_file() -> Path:
    """Return the file that stores the places."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not Path(base).is_absolute():  # the XDG Base Directory Specification ignores relative paths
        base = Path.home() / ".local" / "state"
    return Path(base) / "launcher" / "logins.json"


def runs_here(runs: str) -> Path:
    """Return the directory on this machine that stands for the directory of runs there."""
    return Path("runs") if Path(runs).is_absolute() else Path(runs)


# The record of the places is in the user's own state directory, not in the project: one that comes along with a cloned
# project must not decide where a command runs.


def places(runs: Path) -> list[RemoteProject]:
    """Return the projects on login nodes that have runs of this directory of runs.

    Raises:
        UserError: the record is damaged.
    """
    return _places(_read(), runs)


def remember(place: RemoteProject) -> None:
    """Add a place, or replace the one that differs in its shell lines only."""
    runs = runs_here(place.runs)
    with _changed() as record:
        others = [each for each in _places(record, runs) if dataclasses.replace(each, setup=place.setup) != place]
        record["places"][str(runs.resolve())] = [dataclasses.asdict(each) for each in [*others, place]]


def project_id(directory: Path) -> str:
    """Return a number for a project in this directory of this user, which no other one has."""
    record = _read()
    if not record["id"]:
        with _changed() as record:
            record["id"] = record["id"] or secrets.token_hex(8)
    return hashlib.sha256(f"{record['id']}:{directory}".encode()).hexdigest()[:16]


def _read() -> dict[str, Any]:
    try:
        record: dict[str, Any] = {"id": "", "places": {}}
        record |= read_json(record_file()) or {}
        for runs in record["places"]:
            _places(record, Path(runs))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{record_file()}: is damaged: {error}.\n  Delete it; the next submission writes it.") from None
    return record


def _places(record: dict[str, Any], runs: Path) -> list[RemoteProject]:
    return [value_from_json(RemoteProject, entry) for entry in record["places"].get(str(runs.resolve()), [])]


@contextmanager
def _changed() -> Generator[dict[str, Any]]:
    """Context that yields the record and writes it at the end, while no other command does."""
    file = record_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o700)  # the shell lines may contain a secret
    with file.with_suffix(".lock").open("a") as lock:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        record = _read()
        yield record
        write_json(file, record)
