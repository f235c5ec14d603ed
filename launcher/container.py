"""A container around the tasks of a job, where the site has pyxis: what srun is given for it. Pure.

The batch script itself, and with it cluster.setup, runs outside; so does whoever submits. What the tasks read and write
is mounted where it is outside: a plan holds absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from launcher.errors import ConfigError
from launcher.plan import LaunchPlan

# the submitter's interpreter is not in there; the image's own is the first on its PATH
PYTHON = "python3"
SLURM_CONF = "/etc/slurm/slurm.conf"
# where Slurm's commands find munge
_MUNGE = "/run/munge"


def is_option(name: str) -> bool:
    """Whether an option is pyxis's: of the step, for sbatch would put the batch script into a container. --container-id
    is Slurm's own."""
    return name.startswith(("container-", "no-container-")) and name != "container-id"


def srun_options(plan: LaunchPlan, environment: Mapping[str, str]) -> list[str]:
    """Options of srun that put the tasks of ``plan`` into its container; none where it has none.

    Args:
        environment: the submitter's; SLURM_CONF is read.

    Raises:
        ConfigError: a path that no mount can name.
    """
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None:
        return []
    more = {name: value for name, value in slurm.options.items() if is_option(name)}
    mounts = [f"{path}:{path}" for path in _needed(plan)]
    # a site whose clients have no slurm.conf, or no munge, has them not: the mount may fail
    for path in (str(PurePosixPath(environment.get("SLURM_CONF") or SLURM_CONF).parent), _MUNGE):
        _require_mountable("SLURM_CONF", path)
        mounts.append(f"{path}:{path}:nofail")
    if said := more.pop("container-mounts", None):
        mounts.append(str(said))
    options = [
        f"--container-image={slurm.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.cluster.cwd}",
    ]
    # packages that lie at home for another Python must not come in
    if "container-mount-home" not in more:
        more["no-container-mount-home"] = True
    return options + [f"--{name}" if value is True else f"--{name}={value}" for name, value in more.items()]


def _needed(plan: LaunchPlan) -> list[str]:
    """The directory of all runs, which has this one with its code in it, and the working directory; of two that lie in
    one another the outer one."""
    runs, cwd = PurePosixPath(plan.run.dir).parent, PurePosixPath(plan.cluster.cwd)
    _require_mountable("run.dir", str(runs))
    _require_mountable("cluster.container (the working directory)", str(cwd))
    if cwd.is_relative_to(runs):
        return [str(runs)]
    return [str(cwd)] if runs.is_relative_to(cwd) else [str(runs), str(cwd)]


def _require_mountable(key: str, path: str) -> None:
    if re.search(r"[,:\s\\]", path) or path == "/":
        raise ConfigError(
            key, path, "cannot be mounted into a container: pyxis writes SRC:DST,SRC:DST.",
            "With cluster.container use a directory below / without comma, colon, backslash or space in its path.",
        )  # fmt: skip


def require_image(image: str | None, options: Mapping[str, object]) -> None:
    """Raises ConfigError for what is no image, and for options of pyxis's without one."""
    if image is not None and not re.fullmatch(r"[^\s\x00]+", image):
        raise ConfigError("cluster.container", repr(image), "must be an image: IMAGE:TAG, or the path of a .sqsh file.")
    for name, value in options.items():
        if name in ("container-workdir", "no-container-workdir"):
            raise ConfigError(f"cluster.sbatch.{name}", value, "is the launcher's own to set.", "Leave it out.")
        if image is None and is_option(name):
            raise ConfigError(
                f"cluster.sbatch.{name}", value, "has no effect without a container.", "Set cluster.container=IMAGE."
            )
