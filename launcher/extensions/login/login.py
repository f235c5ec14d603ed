"""Login node: commands that are typed on this machine and run on a cluster's login node over ssh (cluster.login).

The project is copied to a directory there, and the same command runs in it with the same arguments. A record
of the user's (`login_shell.places`) names the places that have runs, so that later commands find them. The connection
is that of the user's own ssh configuration and keys; ssh is not allowed to ask for anything.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import launcher
from launcher.cli.elsewhere import Elsewhere
from launcher.cli.overrides import OnLoginNode, print_error, take_value
from launcher.config.schema import ClusterConfig, Config, RunConfig, check_values
from launcher.errors import EXIT_DONE, ConfigError, ConnectionLost, UserError
from launcher.extensions.login.login_shell import (
    NO_COMMAND,
    NO_CONNECTION,
    NO_DIRECTORY,
    OTHER_VERSION,
    OTHERS_FILES,
    OTHERS_PROJECT,
    OWNER,
    RemoteProject,
    ask_login_node,
    connection_error,
    places,
    project_id,
    remember,
    remote_command,
    runs_here,
    start_ssh,
)
from launcher.process import ENDS_WITH_INPUT
from launcher.quantities import count, first_names
from launcher.report.tables import near, require_place
from launcher.rundir.code_snapshot import SENT, pack, roots_of_pythonpath
from launcher.rundir.paths import find, find_sweeps, is_run, is_sweep

_KEYS = {"cluster.login": "null", "cluster.login_dir": "null", "cluster.login_setup": "[]"}
# removes files, and the directories that are empty without them
_REMOVE = """for file; do
    folder=$(dirname -- "$file")
    # files behind a symbolic link belong to others
    [ "$(realpath -m -s -- "$folder")" = "$(realpath -m -- "$folder")" ] || continue
    rm -f -- "$file"
    rmdir -p --ignore-fail-on-non-empty -- "$folder" 2>/dev/null || true
done"""
# variables that are passed on to the command there
_TERMINAL_VARIABLES = ("NO_COLOR",)


def _start(config: Config, verb: str, arguments: Sequence[str]) -> int:
    """Copy the project to the login node, and run the command that has this config there. Return its exit status."""
    cluster, here = config.cluster, Path.cwd()
    roots = {"": here}
    for number, root in enumerate(roots_of_pythonpath()):
        roots[f"{root.relative_to(here)}/" if root.is_relative_to(here) else f"{SENT}/path{number}/"] = root
    moved = _remote_arguments(verb, arguments, here)
    place, files = _send(cluster, config.run.dir, {name: root for name, root in roots.items() if _is_sent(name)})
    if "--quiet" not in arguments:
        print(f"Copied {count(files, 'file')} to {place.name}", file=sys.stderr)
    if verb in ("train", "run"):
        remember(place)
    searched = ":".join(f"{place.directory}/{name}" for name in roots if name)
    return _run(place, verb, moved, {"PYTHONPATH": searched} if searched else {})


def _is_sent(name: str) -> bool:
    """Return whether a directory is an entry of its own in the archive, and not part of the project."""
    return not name or name.startswith(f"{SENT}/")


def _remote_arguments(verb: str, arguments: Sequence[str], here: Path) -> list[str]:
    """Return the arguments of the command on the login node: without its keys, with paths relative to the project."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    words = [word for word in arguments[:cut] if word.lstrip("+").partition("=")[0] not in _KEYS]
    for at, word in enumerate(words):
        flag, joined, value = word.partition("=")
        if flag in ("--config-dir", "-cd") and (joined or at + 1 < len(words)):
            given = Path(value if joined else words[at + 1])
            inside = Path(os.path.normpath(here / given))
            if not inside.is_relative_to(here):
                raise ConfigError(
                    "--config-dir", given, "is outside of the directory that is copied to the login node.",
                    f"Move it into {here}.",
                )  # fmt: skip
            words[at if joined else at + 1] = f"{flag}={inside.relative_to(here)}" if joined else near(inside)
    script = [*arguments[cut:]]
    if len(script) > 1:
        script[1] = near(script[1])
    # a sweep of very many cells was confirmed here
    several = verb == "train" and {"-m", "--multirun"} & set(words)
    confirmed = ["--yes"] if several and "--yes" not in words else []
    return [*words, *(f"{key}={value}" for key, value in _KEYS.items()), *confirmed, *script]


def _send(cluster: ClusterConfig, run_dir: str, roots: Mapping[str, Path]) -> tuple[RemoteProject, int]:
    """Copy the project to the login node. Return where it is now, and its number of files.

    Files that an earlier command has copied and that are no longer in the project are deleted there.

    Raises:
        ConfigError: ssh cannot connect, or there is no `launch` of the same version there.
    """
    here, version = Path.cwd(), launcher.__version__
    assert cluster.login is not None
    check_values(Config(cluster=cluster, run=RunConfig(dir=run_dir)), "cluster", "run")
    owner = project_id(here)
    before = next((each.directory for each in places(runs_here(run_dir)) if each.login == cluster.login), None)
    directory = (cluster.login_dir or before or f"launcher/{here.name}.{owner[:6]}").removeprefix("~/")
    place = RemoteProject(cluster.login, tuple(cluster.login_setup), directory, run_dir)
    if os.path.normpath(directory) in (".", "~", "/"):
        raise ConfigError("cluster.login_dir", directory, "must be a directory for this project alone.")
    archive, files = pack(roots, here / run_dir)
    entries, incoming = f"{SENT}/files", f"{SENT}/incoming"
    lines = (
        "version=$(launch --version </dev/null) || exit",
        f'[ "$version" = {shlex.quote(version)} ] || {{ echo "$version" >&2; exit {OTHER_VERSION}; }}',
        "set -e; cd",
        f"mkdir -p -- {shlex.quote(directory)}; cd -- {shlex.quote(directory)}",
        f'[ -e {SENT} ] || [ -z "$(ls -A)" ] || exit {OTHERS_FILES}',
        f"mkdir -p {SENT}; rm -rf {SENT}/page.*",
        f"exec 9>{SENT}/lock; flock 9 || true",  # some file systems have no locks
        f'[ ! -e {OWNER} ] || [ "$(head -n 1 {OWNER})" = {owner} ] '
        f"|| {{ tail -n 1 {OWNER} >&2; exit {OTHERS_PROJECT}; }}",
        shlex.join(["printf", "%s\\n", owner, f"{os.uname().nodename}:{here}"]) + f" > {OWNER}",
        f"rm -rf {incoming}; mkdir {incoming}; tar -xzf - --no-same-owner -C {incoming}",
        f"[ ! -f {entries} ] || LC_ALL=C comm -z -23 {entries} {incoming}/{entries} "
        f"| xargs -0 -r sh -c {shlex.quote(_REMOVE)} sh",
        # the list of files last: if something fails, the old one still tells what may be deleted
        f"mv {incoming}/{entries} {SENT}/files.new; cp -R -p --remove-destination {incoming}/. .",
        f"mv {SENT}/files.new {entries}; rm -rf {incoming}; pwd",
    )
    directory = ask_login_node(place, *lines, send=archive).decode().splitlines()[-1]
    return dataclasses.replace(place, directory=directory), files


def _run(place: RemoteProject, verb: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    """Run a command in the project on the login node, on this terminal. Return its exit status.

    Raises:
        ConnectionLost: the connection was lost.
        KeyboardInterrupt: Ctrl-C; the command there has been interrupted, too.
    """
    arguments = list(arguments)
    html = take_value("--html", arguments, "FILE") if verb == "report" else None
    if html is None and verb == "report" and not {"--csv", "--json", "--help", "-h"} & set(arguments):
        here = runs_here(place.runs)
        here.mkdir(parents=True, exist_ok=True)
        html = str(here / "report.html")
    page = None if html is None else Path(html)
    if page is not None:
        require_place(page)
    folder = f"{SENT}/page.{os.urandom(4).hex()}"
    lines = [place.enter]
    if page is not None:
        arguments += ["--html", f"{folder}/{page.name}"]
        lines.append(f"mkdir {folder}")
    for name, value in (variables or {}).items():
        lines.append(f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"')
    for name in _TERMINAL_VARIABLES:
        lines += [f"export {name}={shlex.quote(os.environ[name])}"] if name in os.environ else []
    has_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not has_terminal:  # otherwise the terminal there interrupts the command
        lines.append(f"export {ENDS_WITH_INPUT}=1")
    lines.append(shlex.join(["exec", "launch", verb, *arguments]))
    command = remote_command(place, lines, terminal=has_terminal)
    sys.stdout.flush()
    process = start_ssh(
        command, stdin=None if has_terminal else subprocess.PIPE, stdout=None if page is None else subprocess.PIPE,
        start_new_session=not has_terminal,
    )  # fmt: skip
    with process:
        try:
            if page is not None:
                assert process.stdout is not None
                there, shown = f"{folder}/{page.name}".encode(), near(page.absolute()).encode()
                for line in process.stdout:
                    sys.stdout.buffer.write(line.replace(there, shown))
                    sys.stdout.buffer.flush()
            status = process.wait()
        except KeyboardInterrupt:
            if not has_terminal:
                process.communicate()  # closes its input, which interrupts the command there
            raise
    if status == NO_CONNECTION:
        raise ConnectionLost(
            f"the connection to {place.login} failed or was lost. Jobs that were submitted there continue; a "
            "submission that was under way is withdrawn as soon as the login node notices.\n"
            "  `launch runs` lists them, and `launch logs RUN --follow` follows one."
        )
    if status in (NO_COMMAND, NO_DIRECTORY):
        raise connection_error(place, status, "")
    if page is not None:
        _fetch(place, folder, page.absolute())
    return status if status >= 0 else 128 - status


def _fetch(place: RemoteProject, folder: str, page: Path) -> None:
    """Move a page, and the plot library beside it, from a directory on the login node to ``page``."""
    lines = (place.enter, f"tar -cf - -C {folder} .", f"rm -rf {folder}")
    with tarfile.open(fileobj=io.BytesIO(ask_login_node(place, *lines))) as archive:
        for entry in archive:
            name = entry.name.removeprefix("./")
            if entry.isfile() and (name == page.name or re.fullmatch(r"plotly-[\d.]+\.min\.js", name)):
                page.parent.mkdir(parents=True, exist_ok=True)
                archive.extract(entry, page.parent, filter="data")


def _names(place: RemoteProject) -> list[str]:
    listing = f"ls -- {shlex.quote(place.runs)} 2>/dev/null || true"  # no run may have been submitted yet
    return ask_login_node(place, place.enter, listing).decode(errors="surrogateescape").splitlines()


def _name(word: str, runs: Path) -> str:
    """Return a word without the directory of runs here, which a shell's completion may have put before it."""
    path = Path(word)
    return str(path.relative_to(runs)) if path.is_relative_to(runs) else word


def _run_on(place: RemoteProject, runs: Path, verb: str, arguments: Sequence[str]) -> int:
    """Run a command on runs of the directory ``runs`` where they are."""
    words = list(arguments)
    take_value("--dir", words, "DIR")
    if verb == "report" and (local := [word for word in words if is_run(runs / word) or is_sweep(runs / word)]):
        raise UserError(
            f"{local[0]}: is here, and other runs are on {place.login}.\n  `launch report` compares runs of one place."
        )
    for at, word in enumerate(words):
        if not word.startswith("-") and (at == 0 or words[at - 1] not in ("--to", "--html")):
            words[at] = place.runs if Path(word) == runs else _name(word, runs)
    return _run(place, verb, [*words, "--dir", place.runs])


class LoginNodes(Elsewhere):
    """Runs on the login nodes that the user's record names."""

    def run_there(self, there: OnLoginNode, verb: str, arguments: Sequence[str]) -> int:
        if isinstance(there.target, Config):
            return _start(there.target, verb, arguments)
        return there.target(verb, arguments)

    def require_local(self, word: str, runs: Path) -> None:
        known = places(runs)
        for place in known:
            if Path(word).is_absolute() and Path(word).is_relative_to(place.runs) and not Path(word).exists():
                raise OnLoginNode(partial(_run_on, place, runs))
        head = _name(word, runs).partition("/")[0]
        if not known or not head or Path(word).is_absolute():
            return
        here = {paths.root.name for paths in (*find(runs), *find_sweeps(runs))}
        if head in here:
            return
        names: dict[RemoteProject, list[str]] = {}
        silent: list[UserError] = []
        for place in known:
            try:
                names[place] = _names(place)
            except UserError as error:
                silent.append(error)
        if silent and any(name.startswith(head) for name in here):
            return  # without a connection it is the one here
        known = list(names)
        found = [place for place in known if head in names[place]]
        if not found:
            found = [place for place in known if any(name.startswith(head) for name in names[place])]
            if found and (local := sorted(name for name in here if name.startswith(head))):
                raise UserError(
                    f"{word}: matches {first_names(local)} here, and runs on {found[0].login}.\n"
                    "  Write more of the name."
                )
        if not found and silent:
            raise silent[0]
        if len(found) > 1:
            raise UserError(
                f"{word}: several login nodes have such a run: {', '.join(place.name for place in found)}.\n"
                "  Write more of the name, or use the commands there."
            )
        if not found and len(known) == 1 and not here:
            found = known  # whose message lists what is there
        if found:
            raise OnLoginNode(partial(_run_on, found[0], runs))

    def require_local_runs(self, runs: Path) -> None:
        known = places(runs)
        if len(known) == 1 and not find(runs) and not find_sweeps(runs):
            raise OnLoginNode(partial(_run_on, known[0], runs))

    def has_runs(self, runs: Path) -> bool:
        return bool(places(runs))

    def to_json(self, runs: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for place in places(runs):
            line = shlex.join(["launch", "runs", "--json", "--dir", place.runs])
            try:
                each = json.loads(ask_login_node(place, place.enter, line))
            except UserError as error:  # the runs of other places are listed all the same
                print_error(error)
                continue
            found += [{**run, "login": place.login} for run in each]
        return found

    def show(self, runs: Path, arguments: Sequence[str]) -> int:
        status = EXIT_DONE
        for place in places(runs):
            print(f"\n{place.name}")
            try:
                status = max(status, _run(place, "runs", [*arguments, "--dir", place.runs]))
            except (UserError, ConnectionLost) as error:
                status = max(status, print_error(error))
        return status
