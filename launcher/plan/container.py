"""Containers of Slurm jobs: LaunchPlan -> srun options (pyxis), or the command that starts a task (apptainer). Pure.

The batch script, cluster.setup included, and the submitter run outside the container. Plans hold absolute paths, so
everything that the tasks read or write is mounted at the path that it has outside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

from launcher.config.schema import ClusterConfig, ContainerRuntime, Device
from launcher.errors import ConfigError
from launcher.plan.launch_plan import LaunchPlan

# the submitter's interpreter does not exist in the image; use the first one on the image's PATH
_PYTHON = "python3"
SLURM_CONF = "/etc/slurm/slurm.conf"
# directory of munge's socket, which Slurm's commands need
_MUNGE = "/run/munge"
_MOUNTS = "container-mounts"
_NO_HOME = "no-container-mount-home"
# a signal that comes before the agent has handlers must not kill the task, which asks Slurm later what it missed
_IGNORE_SIGNALS = 'trap "" TERM USR2; exec "$0" "$@"'
# under apptainer it also tells the script that started the container
_REPORT_START = 'trap "" TERM USR2; kill -s USR1 "$LAUNCHER_STARTER_PID"; exec "$0" "$@"'


def solve_runtime(config: ClusterConfig, options: Mapping[str, object]) -> ContainerRuntime:
    """Return the runtime that starts the container, and check the image and the container's options.

    Args:
        options: the user's own sbatch options.

    Raises:
        ConfigError: not an image, not an image of this runtime, or an option that has no effect or is reserved.
    """
    image, runtime = config.container, config.container_runtime
    for name, value in options.items():
        if name in ("container-workdir", "no-container-workdir"):
            raise ConfigError(f"cluster.sbatch.{name}", value, "is set by the launcher.", "Leave it out.")
        if image is None and is_option(name):
            raise ConfigError(
                f"cluster.sbatch.{name}", value, "has no effect without a container.", "Set cluster.container=IMAGE."
            )
    if image is None:
        return ContainerRuntime.pyxis
    if not re.fullmatch(r"[^\s\x00-][^\s\x00]*", image):
        raise ConfigError(
            "cluster.container", repr(image), "must be an image.",
            "Write the path of a .sif file or an address such as oras://HOST/IMAGE:TAG (apptainer), or IMAGE:TAG or "
            "the path of a .sqsh file (pyxis).",
        )  # fmt: skip
    if runtime is None:
        runtime = ContainerRuntime.apptainer if image.endswith(".sif") or "://" in image else ContainerRuntime.pyxis
    if runtime is ContainerRuntime.apptainer:
        _require_apptainer_options(options)
    elif image.endswith(".sif"):
        raise ConfigError(
            "cluster.container", image, "is an image of apptainer, which pyxis cannot start.",
            "Use cluster.container_runtime=apptainer.",
        )  # fmt: skip
    return runtime


def _require_apptainer_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if is_option(name) and name not in (_MOUNTS, _NO_HOME):
            raise ConfigError(
                f"cluster.sbatch.{name}", value, "is an option of pyxis, and the container is started by apptainer.",
                f"cluster.sbatch.{_MOUNTS} and cluster.sbatch.{_NO_HOME} work with both; apptainer reads its other "
                'options from the environment: cluster.setup=["export APPTAINER_WRITABLE_TMPFS=1"].',
            )  # fmt: skip
    for mount in str(options.get(_MOUNTS) or "").split(","):
        if not re.fullmatch(r"(/[^:\s]*(:/[^:\s]*(:(ro|rw))?)?)?", mount):
            raise ConfigError(
                f"cluster.sbatch.{_MOUNTS}", mount, "is not a mount that apptainer knows.",
                "Write SRC:DST or SRC:DST:ro with absolute paths, several with commas between them.",
            )  # fmt: skip


def is_option(name: str) -> bool:
    """Return whether an option is pyxis's and belongs to srun: sbatch would put the batch script into the container.

    --container-id is Slurm's own.
    """
    return name.startswith(("container-", "no-container-")) and name != "container-id"


def srun_options(plan: LaunchPlan, environment: Mapping[str, str]) -> list[str]:
    """Return the srun options with which pyxis runs the tasks of ``plan`` in its container; none if it does not.

    Args:
        environment: the submitter's; SLURM_CONF is read from it.

    Raises:
        ConfigError: a path cannot be written as a mount.
    """
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None or slurm.container_runtime is not ContainerRuntime.pyxis:
        return []
    more = _options(plan)
    mounts = [f"{path}:{path}" for path in _needed(plan)]
    mounts += [f"{path}:{path}:nofail" for path in _of_slurm(environment)]
    if own_mounts := more.pop(_MOUNTS, None):
        mounts.append(str(own_mounts))
    options = [
        f"--container-image={slurm.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.cluster.cwd}",
    ]
    # packages installed in the home directory for another Python must not be imported
    if "container-mount-home" not in more:
        more[_NO_HOME] = True
    return options + [f"--{name}" if value is True else f"--{name}={value}" for name, value in more.items()]


def task_command(plan: LaunchPlan, environment: Mapping[str, str], python: str) -> list[str]:
    """Return the command of a task up to its Python, to which the arguments of Python are added.

    Args:
        environment: the submitter's; SLURM_CONF is read from it.
        python: the submitter's interpreter, for tasks outside of containers.

    Raises:
        ConfigError: a path cannot be written as a mount.
    """
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None:
        return ["/bin/sh", "-c", _IGNORE_SIGNALS, python, "-P"]
    if slurm.container_runtime is ContainerRuntime.pyxis:
        return ["/bin/sh", "-c", _IGNORE_SIGNALS, _PYTHON, "-P"]
    inside = ["/bin/sh", "-c", _REPORT_START, _PYTHON, "-P"]
    options = _apptainer_options(plan)
    script = _START_SCRIPT % shlex.join(_of_slurm(environment))  # these are mounted if the node has them
    return ["/bin/sh", "-c", script, "sh", *options, image_of(plan), *inside]


def image_of(plan: LaunchPlan) -> str:
    """Return the image for apptainer: an address, or an absolute path."""
    slurm = plan.cluster.slurm
    assert slurm is not None
    assert slurm.container is not None
    return slurm.container if "://" in slurm.container else str(PurePosixPath(plan.cluster.cwd, slurm.container))


def _apptainer_options(plan: LaunchPlan) -> list[str]:
    """Return the options of `apptainer exec`, which singularity has under the same names.

    The home directory is mounted, as apptainer's users expect: the image is read-only, and caches are written there.
    """
    more = _options(plan)
    mounts = [*_needed(plan), *filter(None, str(more.get(_MOUNTS) or "").split(","))]
    options = [word for mount in mounts for word in ("--bind", mount)]
    # packages installed in the home directory for another Python must not be imported
    options += ["--pwd", plan.cluster.cwd, "--env", "PYTHONNOUSERSITE=1"]
    if more.get(_NO_HOME):
        options.append("--no-home")
    if plan.cluster.device is Device.cuda:
        options.append("--nv")
    return options


# Keeps the task while apptainer starts, which takes minutes if it fetches an image, and forwards the stop signals. A
# stop signal ends apptainer (status 128 + 12 or 15) until the task inside has started, which is reported by USR1.
# Before that it is started again: the task asks Slurm for the reason of a signal that it missed. A signal that comes
# before `task=$!` is forwarded after it. `wait` returns early after a signal, and 127 if the status was already
# reported.
_START_SCRIPT = """\
task= started= missed=
forward() {
    signalled=1 missed=$1
    if [ -n "$task" ] && kill -s "$1" "$task" 2>/dev/null; then missed=; fi
}
trap "forward TERM" TERM
trap "forward USR2" USR2
trap "signalled=1 started=1" USR1
export LAUNCHER_STARTER_PID=$$
run=$(command -v apptainer || command -v singularity) || {
    echo "cluster.container: neither apptainer nor singularity is on the PATH of $SLURMD_NODENAME" >&2
    exit 127
}
for path in %s; do [ ! -e "$path" ] || set -- --bind "$path" "$@"; done
while :; do
    "$run" exec "$@" &
    task=$! status=127 signalled=1
    [ -z "$missed" ] || forward "$missed"
    while [ "$signalled" ]; do
        signalled=
        wait "$task"
        ended=$?
        [ $ended = 127 ] || status=$ended
    done
    [ -z "$started" ] && { [ $status = 140 ] || [ $status = 143 ]; } || exit $status
done"""


def _options(plan: LaunchPlan) -> dict[str, object]:
    assert plan.cluster.slurm is not None
    return {name: value for name, value in plan.cluster.slurm.options.items() if is_option(name)}


def _of_slurm(environment: Mapping[str, str]) -> list[str]:
    """Return the directories that Slurm's commands need; some sites' nodes have no slurm.conf or no munge."""
    paths = [str(PurePosixPath(environment.get("SLURM_CONF") or SLURM_CONF).parent), _MUNGE]
    for path in paths:
        _require_mountable("SLURM_CONF", path)
    return paths


def _needed(plan: LaunchPlan) -> list[str]:
    """Return the directories to mount: the parent of all runs and the working directory, or the outer one if nested.

    The run's directory, with its copy of the code, is inside the former.
    """
    runs, cwd = PurePosixPath(plan.run.dir).parent, PurePosixPath(plan.cluster.cwd)
    _require_mountable("run.dir", str(runs))
    _require_mountable("cluster.container (the working directory)", str(cwd))
    if cwd.is_relative_to(runs):
        return [str(runs)]
    return [str(cwd)] if runs.is_relative_to(cwd) else [str(runs), str(cwd)]


def _require_mountable(key: str, path: str) -> None:
    if re.search(r"[,:\s\\]", path) or path == "/":
        raise ConfigError(
            key, path, "cannot be mounted into a container: mounts are written SRC:DST,SRC:DST.",
            "With cluster.container use a directory below / without comma, colon, backslash or space in its path.",
        )  # fmt: skip
