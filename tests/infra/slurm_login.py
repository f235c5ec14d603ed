"""The login host of the Slurm cluster of the tests: where its daemons run, and whoever submits."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.infra import warm
from tests.infra.slurm_conf import LOGIN
from tests.infra.slurm_warm import enter_login

Done = subprocess.CompletedProcess[str]
# what Slurm's commands take their options from; a Slurm job around the tests has set them
OUTER = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "SCONTROL", "SACCT")
# a process becomes one of the login host: its name, and the names of the nodes
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path | None, check: bool, timeout: float) -> Done:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return checked(done) if check else done


def checked(done: Done) -> Done:
    assert done.returncode == 0, f"{done.args} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


@dataclass(frozen=True)
class Login:
    namespace: str  # of its network
    hosts_file: Path
    env: dict[str, str]  # what a login shell has set

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
        return {**mine, **self.env, **(more or {})}

    def command(self, *argv: str) -> list[str]:
        """Return a command line that runs ``argv`` there, in the same directory; its process becomes ``argv``."""
        enter = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, LOGIN, str(self.hosts_file)]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *enter, *argv]

    def run_warm(
        self, argv: Sequence[str], python: str, env: Mapping[str, str], cwd: Path | None, check: bool, timeout: float
    ) -> Done:
        """Run `launch` there. ``python``: what the tasks of the jobs run that it submits."""
        enter = partial(enter_login, self.namespace, str(self.hosts_file), python)
        done = warm.run([*argv], timeout, cwd=cwd, env=env, stdin=subprocess.DEVNULL, preexec_fn=enter)
        return checked(done) if check else done

    def start(
        self, argv: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        return subprocess.Popen(self.command(*argv), cwd=cwd, env=self.environment(env), text=True, **options)

    def daemon(self, argv: Sequence[str], log: Path) -> Any:
        """A session of its own: a Ctrl-C is not for it."""
        with log.open("a") as out:
            return self.start(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def interactive(self, argv: Sequence[str]) -> int:
        """Run a command on this terminal; its status as a shell would say it."""
        process = self.start(argv)
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command too
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
            process.kill()
            process.wait()
        return status if status >= 0 else 128 - status
