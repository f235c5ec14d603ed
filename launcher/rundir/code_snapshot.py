"""Code snapshot: a copy of the user's code taken at submission, so that later edits do not affect a pending job.

In a git work tree it has the files that git tracks or does not ignore, including uncommitted changes; elsewhere all
small files. Of a symbolic link to a directory, the code behind it is copied. Files of secrets and installed packages
are not copied. `pack` sends the same files to a login node, where the list that came with them takes the place of git.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from launcher.errors import SiteError, without_credentials
from launcher.rundir.files import read_bytes, write_json
from launcher.rundir.paths import RunPaths, SweepPaths

_MOST_FILES, _MOST_BYTES = 20_000, 200 * 2**20
_SMALL_BYTES = 2**20
_CODE = (
    ".py", ".pyi", ".pyx", ".so", ".c", ".h", ".cc", ".cpp", ".cu", ".cuh",
    ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini",
)  # fmt: skip
_NOTES = "code.json"  # written last
_PATIENCE_S = 10.0
_NOT_CODE = {"__pycache__", "node_modules", "wandb", "site-packages", "build", "dist"}
# directory in a project that `pack` sent: names of its files, each ended by a zero byte, and its git commit
SENT = ".launcher"
# files that are left out
_SECRETS = (".env", ".netrc")
_SENT_FILES, _SENT_COMMIT = f"{SENT}/files", f"{SENT}/commit"


def roots_of_task(target: str, cwd: str) -> list[Path]:
    """Return the directories with a task's own modules: the parent of its package, and those on PYTHONPATH.

    Directories of installed packages are excluded.
    """
    origin = _origin(target.partition(".")[0], cwd)
    own = [] if origin is None or not origin.is_dir() or _is_installed(origin) else [origin]
    return list(dict.fromkeys([*own, *roots_of_pythonpath()]))


def roots_of_script(script: Path) -> list[Path]:
    """Return the script's directory and the directories on PYTHONPATH."""
    return list(dict.fromkeys([script.resolve().parent, *roots_of_pythonpath()]))


def _pythonpath() -> list[str]:
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def roots_of_pythonpath() -> list[Path]:
    """Return the directories on PYTHONPATH without installed packages."""
    roots = [Path(place).resolve() for place in _pythonpath()]
    return [root for root in roots if root.is_dir() and not _is_installed(root)]


def moved_pythonpath(roots: Sequence[Path], copies: Sequence[str]) -> str:
    """Return PYTHONPATH with each copied directory replaced by its copy."""
    moved = dict(zip(roots, copies, strict=True))
    return os.pathsep.join(moved.get(Path(place).resolve(), place) for place in _pythonpath())


def _origin(module: str, cwd: str) -> Path | None:
    """Return the directory in which ``module`` is found, without importing it."""
    if (Path(cwd) / f"{module}.py").is_file() or (Path(cwd) / module).is_dir():
        return Path(cwd).resolve()
    spec = importlib.util.find_spec(module)
    if spec is None or (not spec.submodule_search_locations and not spec.origin):
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0] if places else str(spec.origin)).resolve().parent


def _is_installed(root: Path) -> bool:
    """Return whether ``root`` belongs to this Python's packages or to the launcher."""
    installed = [*site.getsitepackages(), sysconfig.get_paths()["stdlib"]]
    ours = Path(__file__).resolve().parents[2]
    return root in (ours, Path(sys.prefix)) or any(root.is_relative_to(Path(place).resolve()) for place in installed)


def copy_code(roots: Sequence[Path], target: Path, leave_out: Path) -> tuple[str, ...]:
    """Copy the code in ``roots`` below ``target``, a new directory in the run's directory.

    Args:
        leave_out: directory to which runs are written, excluded with all its contents. Runs and sweeps elsewhere are
            excluded too.

    Returns:
        The copies, in the order of ``roots``.

    Raises:
        SiteError: far more data than code, or no code.
    """
    copies = _places(roots, target)
    notes: list[dict[str, object]] = []
    for root, copy in zip(roots, copies, strict=True):
        copy.mkdir(parents=True)
        names = _counted(root, _Omitted(root, leave_out, target.parent))
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        notes.append({"from": str(root), "files": len(names), "commit": _commit(root)})
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / _NOTES, notes)
    return tuple(map(str, copies))


def pack(roots: Mapping[str, Path], leave_out: Path) -> tuple[bytes, int]:
    """Return a compressed tar archive of the code in ``roots`` for another machine, and its number of files.

    Args:
        roots: directories by their names in the archive, each with a slash at its end; "" is the project itself.
        leave_out: as in ``copy_code``.

    Raises:
        SiteError: far more data than code.
    """
    files: dict[str, Path] = {}
    for place, root in roots.items():
        names = _counted(root, _Omitted(root, leave_out, leave_out), empty=True)
        files |= {place + name: root / name for name in names}
    encoded = sorted(map(os.fsencode, files))
    notes = {_SENT_FILES: b"".join(name + b"\0" for name in encoded), _SENT_COMMIT: (_commit(roots[""]) or "").encode()}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6, dereference=True) as archive:
        for name in map(os.fsdecode, encoded):
            archive.add(files[name], name)
        for name, content in notes.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue(), len(encoded)


def take_once(roots: Sequence[Path], target: Path, leave_out: Path) -> tuple[str, ...]:
    """Copy the code like ``copy_code``, unless the copies exist."""
    if (target / _NOTES).is_file():
        return tuple(map(str, _places(roots, target)))
    shutil.rmtree(target, ignore_errors=True)  # an interrupted copy
    return copy_code(roots, target, leave_out)


def commit_of(file: Path, copies: Sequence[str]) -> str | None:
    """Return the git commit of ``file``, with -dirty and a digest of the difference if tracked files were modified.

    For a copy it is the commit of the original work tree. None if unknown: no git, git refuses or is slow, or the file
    belongs to an installed package.

    Args:
        copies: those that ``copy_code`` has made; empty if the code is used in place.
    """
    if copies:
        listed = Path(copies[0]).parent / _NOTES
        notes = cast("list[dict[str, str | None]]", json.loads(read_bytes(listed)) if listed.exists() else [])
        commits = (note["commit"] or None for note, copy in zip(notes, copies, strict=False) if _is_below(file, copy))
        return next(commits, None)
    installed = (Path(__file__).parents[1], *site.getsitepackages(), sysconfig.get_paths()["stdlib"])
    return None if any(_is_below(file, place) for place in installed) else _commit(file.parent)


def remote_of(directory: Path) -> str | None:
    """Return the address of git's remote "origin" for the work tree of ``directory``, without credentials."""
    try:
        address = _git(directory, "remote", "get-url", "origin", within_s=_PATIENCE_S).decode().strip()
    except subprocess.TimeoutExpired:
        return None
    return without_credentials(address) or None


def _is_below(file: Path, place: str | Path) -> bool:
    return file.resolve().is_relative_to(Path(place).resolve())


def digests(roots: Sequence[Path], leave_out: Path, this_run: Path) -> tuple[str, str]:
    """Return two digests: of all files that ``copy_code`` would copy, and of only the code and settings among them.

    The second is stable although logs and tables beside the code change with every command.

    Raises:
        SiteError: as ``copy_code``.
    """
    everything, code = hashlib.sha256(), hashlib.sha256()
    for number, root in enumerate(roots):
        for name in _counted(root, _Omitted(root, leave_out, this_run)):
            line = f"{number}/{name}\0".encode(errors="surrogateescape")
            line += hashlib.sha256((root / name).read_bytes()).digest()
            everything.update(line)
            if name.endswith(_CODE):
                code.update(line)
    return everything.hexdigest()[:16], code.hexdigest()[:16]


def _places(roots: Sequence[Path], target: Path) -> list[Path]:
    return [target / (root.name if number == 0 else f"{root.name}.{number}") for number, root in enumerate(roots)]


def _files(root: Path, omitted: _Omitted) -> Iterator[str]:
    """Yield the names of the files to copy."""
    for name in _sent_files(root) or _git_files(root) or _small_files(root, omitted):
        source = root / name
        if source.is_symlink() and source.is_dir():
            yield from _linked_files(root, name, omitted)
        elif source.is_file() and source.parent not in omitted and source.name not in _SECRETS:
            yield name  # git's index may list deleted files


def _linked_files(root: Path, link: str, omitted: _Omitted, above: tuple[Path, ...] = ()) -> Iterator[str]:
    """Yield the names of the code behind a symbolic link to a directory, below the link; none if it has no Python
    files: it is a link to data. ``above``: the directories of the links that ``link`` is in."""
    target = (root / link).resolve()
    if target in above or target in omitted or root.resolve().is_relative_to(target):
        return
    names = list(itertools.islice(_git_files(target) or _small_files(target, omitted), _MOST_FILES))
    has_code = any(name.endswith(".py") for name in names)
    for name in (f"{link}/{name}" for name in names):
        source = root / name
        if source.is_symlink() and source.is_dir():
            yield from _linked_files(root, name, omitted, (*above, target))
        elif has_code and name.endswith(_CODE) and source.is_file() and source.stat().st_size <= _SMALL_BYTES:
            yield name


class _Omitted:
    """Directories below ``root`` that contain runs. ``this_run`` is given because it has no plan yet."""

    def __init__(self, root: Path, leave_out: Path, this_run: Path) -> None:
        self._root = root
        self._known = {place: True for place in (leave_out, this_run) if place != root and place.is_relative_to(root)}

    def __contains__(self, folder: Path) -> bool:
        if folder == self._root or not folder.is_relative_to(self._root):
            return False
        if folder not in self._known:
            paths = RunPaths(folder)  # plan.json alone may be a user's own file
            is_run = paths.plan.is_file() and paths.config.is_file()
            self._known[folder] = is_run or SweepPaths(folder).manifest.is_file() or folder.parent in self
        return self._known[folder]


def _counted(root: Path, omitted: _Omitted, *, empty: bool = False) -> list[str]:
    """Return the sorted names of the files to copy.

    Raises:
        SiteError: far more data than code, or no code and not ``empty``.
    """
    names: list[str] = []
    size = 0
    for name in _files(root, omitted):
        names.append(name)
        size += (root / name).stat().st_size
        if len(names) > _MOST_FILES or size > _MOST_BYTES:
            raise SiteError(
                f"{root} contains more than {_MOST_FILES:,} files or {_MOST_BYTES >> 20} MiB to copy as the job's "
                "code.\n  Run the command in a directory with little but code, or have git ignore the rest."
            )
    if not names and not empty:
        raise SiteError(
            f"{root} contains no code to copy for the job: no file that git tracks or does not ignore; without git, no "
            f"file up to {_SMALL_BYTES >> 20} MiB outside of hidden directories and of runs.\n"
            "  Put the code there, or remove the directory from PYTHONPATH; use a run.dir without code, such as runs."
        )
    return sorted(names)


def _commit(root: Path) -> str | None:
    """Return the commit of ``root``, with a time limit for slow disks and without refreshing git's index."""
    if (sent := _sent_project(root)) is not None:
        return (sent / _SENT_COMMIT).read_text(encoding="utf-8") or None
    look = ("--no-optional-locks", "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    try:
        head = _git(root, "rev-parse", "--verify", "HEAD", within_s=_PATIENCE_S).decode().strip()
        changes = _git(root, *look, within_s=_PATIENCE_S) if head else b""
    except subprocess.TimeoutExpired:
        return None
    return f"{head}-dirty.{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head or None


def _git(root: Path, *command: str, within_s: float | None = None) -> bytes:
    """Return git's output; empty without git or a work tree.

    Raises:
        TimeoutExpired: git took longer than ``within_s`` seconds.
    """
    line = ["git", "-C", str(root), *command]
    try:
        return subprocess.run(line, capture_output=True, check=True, timeout=within_s).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or no work tree
        return b""


def _sent_project(root: Path) -> Path | None:
    """Return the project of ``pack`` that ``root`` belongs to, on the machine to which it was sent."""
    for place in (root, *root.parents):
        if (place / _SENT_FILES).is_file():
            return place
        if (place / ".git").exists():  # a project of its own in a directory of the other
            return None
    return None


def _sent_files(root: Path) -> list[str]:
    project = _sent_project(root)
    if project is None:
        return []
    names = [os.fsdecode(name) for name in (project / _SENT_FILES).read_bytes().split(b"\0")[:-1]]
    if root == project:
        return [name for name in names if not name.startswith(f"{SENT}/")]
    place = f"{root.relative_to(project)}/"
    return [name.removeprefix(place) for name in names if name.startswith(place)]


def _git_files(root: Path) -> list[str]:
    """Return the files of the work tree and of nested ones, such as submodules, which git lists as directories."""
    files: list[str] = []
    for entry in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0"):
        name = os.fsdecode(entry).rstrip("/")
        if name and (root / name / ".git").exists() and not (root / name).is_symlink():
            files += [f"{name}/{inner}" for inner in _git_files(root / name)]
        elif name:
            files.append(name)
    return files


def _small_files(root: Path, omitted: _Omitted) -> Iterator[str]:
    for top, folders, names in os.walk(root):
        place = Path(top)
        folders[:] = [
            name
            for name in folders
            if not (name.startswith(".") or name in _NOT_CODE or (place / name / "pyvenv.cfg").exists())
            and place / name not in omitted
        ]
        for name in folders:
            if (place / name).is_symlink():
                yield str((place / name).relative_to(root))
        for name in names:
            path = place / name
            if not name.startswith(".") and path.is_file() and path.stat().st_size <= _SMALL_BYTES:
                yield str(path.relative_to(root))
