"""Stand-in for `apptainer exec [OPTIONS] IMAGE COMMAND ...` as root, without a container image format of its own.

The image is a tar archive. Options other than those in ``parse`` are refused, as are mounts of what does not exist.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# sources the image's environment, as apptainer's /.singularity.d/actions/exec does
ACTION = 'for file in /.singularity.d/env/*.sh; do . "$file"; done; exec "$@"'
BY_DEFAULT = ("/dev", "/proc", "/sys", "/tmp", "/var/tmp")


def fatal(message: str) -> NoReturn:
    print(f"FATAL:   {message}", file=sys.stderr)
    sys.exit(255)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False, exit_on_error=True)
    parser.add_argument("verb", choices=["exec"])
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--pwd")
    parser.add_argument("--no-home", action="store_true")
    parser.add_argument("--nv", action="store_true")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        fatal(f"container creation failed: {done.stderr.strip()}")


def bind(root: Path, spec: str) -> None:
    source, *rest = spec.split(":")
    target = rest[0] if rest else source
    if len(rest) > 1 and rest[1] not in ("ro", "rw"):
        fatal(f"invalid bind option {rest[1]}")
    if not Path(source).exists():
        fatal(f"container creation failed: mount source {source} doesn't exist")
    inside = root / target.lstrip("/")
    if not inside.exists():
        inside.mkdir(parents=True)
    mount("--rbind", source, str(inside))
    if rest[1:] == ["ro"]:
        mount("-o", "remount,bind,ro", str(inside))


def enter(options: argparse.Namespace) -> None:
    """Make this process one of the container."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        fatal("no mount namespace")
    mount("--make-rslave", "/")
    root = Path(tempfile.mkdtemp(prefix="apptainer-session-"))
    mount("-t", "tmpfs", "tmpfs", str(root))
    extract = ["tar", "--extract", f"--file={options.image}", f"--directory={root}"]
    if subprocess.run(extract, capture_output=True, check=False).returncode:
        fatal(f"could not open image {options.image}: image format not recognized")
    home = [] if options.no_home else [os.environ.get("HOME", "/root")]
    for spec in (*BY_DEFAULT, *home, *(part for value in options.bind for part in value.split(","))):
        bind(root, spec)
    mount("-o", "remount,bind,ro", str(root))
    os.chroot(root)
    os.chdir(options.pwd)


def main() -> None:
    options = parse(sys.argv[1:])
    if not Path(options.image).is_file():
        fatal(f"could not open image {options.image}: no such file or directory")
    for number in (signal.SIGTERM, signal.SIGUSR2):  # programs in Go do not inherit that a signal is ignored
        signal.signal(number, signal.SIG_DFL)
    if not (task := os.fork()):
        enter(options)
        os.environ |= {"PATH": DEFAULT_PATH, "APPTAINER_CONTAINER": options.image}
        os.environ |= dict(each.split("=", 1) for each in options.env)
        os.execv("/bin/sh", ["/bin/sh", "-c", ACTION, "sh", *options.command])
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda number, _: os.kill(task, number))
    status = os.waitpid(task, 0)[1]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


main()
