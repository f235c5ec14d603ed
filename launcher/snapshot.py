"""The user's code, copied at submission: what a pending job runs does not change when the user goes on editing.

In a git work tree these are the files that git tracks and those that it does not ignore, as they lie there, uncommitted
changes and all; elsewhere everything small. Installed packages are not copied.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import SiteError
from launcher.paths import write_json

_MOST_FILES, _MOST_BYTES = 20_000, 200 * 2**20
_SMALL_BYTES = 2**20
_NOT_CODE = {"__pycache__", "node_modules", "wandb", "site-packages", "build", "dist"}


def roots_of_task(target: str, cwd: str) -> list[Path]:
    """The directories that hold a task's own modules: the one in which its package is found, and those that PYTHONPATH
    names. None of them is where packages are installed."""
    top = target.partition(".")[0]
    found = [_origin(top, cwd)]
    found += [Path(place).resolve() for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    roots: list[Path] = []
    for root in found:
        if root is not None and root.is_dir() and not _is_installed(root) and root not in roots:
            roots.append(root)
    return roots


def _origin(module: str, cwd: str) -> Path | None:
    """The directory in which ``module`` is found; it is not imported."""
    if (Path(cwd) / f"{module}.py").is_file() or (Path(cwd) / module).is_dir():
        return Path(cwd).resolve()
    spec = importlib.util.find_spec(module)
    if spec is None or (not spec.submodule_search_locations and not spec.origin):
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0] if places else str(spec.origin)).resolve().parent


def _is_installed(root: Path) -> bool:
    """Packages of this Python, and the launcher's own."""
    installed = [*site.getsitepackages(), sysconfig.get_paths()["stdlib"]]
    ours = Path(__file__).resolve().parent.parent
    return root in (ours, Path(sys.prefix)) or any(root.is_relative_to(Path(place).resolve()) for place in installed)


def take(roots: Sequence[Path], target: Path, leave_out: Path) -> tuple[str, ...]:
    """Copy the code in ``roots`` below ``target``.

    Args:
        leave_out: a directory that is not copied, whatever lies in it: where runs are written.

    Returns:
        The copies, in the order of ``roots``.

    Raises:
        SiteError: there is far more than code.
    """
    copies: list[str] = []
    notes: list[dict[str, object]] = []
    for number, root in enumerate(roots):
        copy = target / (root.name if number == 0 else f"{root.name}.{number}")
        files = _copy(root, copy, leave_out)
        copies.append(str(copy))
        notes.append({"from": str(root), "files": files, "commit": _git(root, "rev-parse", "HEAD").decode().strip()})
    target.mkdir(exist_ok=True)
    write_json(target / "code.json", notes)
    return tuple(copies)


def _copy(root: Path, copy: Path, leave_out: Path) -> int:
    copy.mkdir(parents=True)
    files = size = 0
    for name in _git_files(root) or _small_files(root, leave_out):
        source = root / name
        if not source.is_file() or source.is_relative_to(leave_out):  # deleted, but not yet in git's index
            continue
        files, size = files + 1, size + source.stat().st_size
        if files > _MOST_FILES or size > _MOST_BYTES:
            raise SiteError(
                f"{root} holds more than {_MOST_FILES:,} files or {_MOST_BYTES >> 20} MiB to be copied as the job's "
                "code.\n  Type the command where little but code lies, or have git ignore the rest."
            )
        place = copy / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
    return files


def _git(root: Path, *command: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(root), *command], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or no work tree
        return b""


def _git_files(root: Path) -> list[str]:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _small_files(root: Path, leave_out: Path) -> Iterator[str]:
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _holds_no_code(Path(place) / name, leave_out)]
        for name in names:
            path = Path(place) / name
            if not name.startswith(".") and path.is_file() and path.stat().st_size <= _SMALL_BYTES:
                yield str(path.relative_to(root))


def _holds_no_code(folder: Path, leave_out: Path) -> bool:
    is_environment = (folder / "pyvenv.cfg").exists()
    return folder.name.startswith(".") or folder.name in _NOT_CODE or folder == leave_out or is_environment
