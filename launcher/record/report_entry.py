"""Entry that a run leaves in its directory when it ends: what a report would read from its other files.

It is valid only while these files are the same, and for a launcher that computes it in the same way. Three lines: a
header with the identity of the files and a checksum of the rest; state, figures and settings; the curves, which a
report of many runs draws few of.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from launcher.plan.launch_plan import PLAN_FORMAT
from launcher.record.measurements import RunData, checked, read_run
from launcher.rundir import history
from launcher.rundir.files import read_bytes, read_json, write_text
from launcher.rundir.paths import RunPaths

# bytes of a record up to which the end of a run waits for its entry, about a second; a report reads larger ones itself
MOST_BYTES = 100_000_000
# modules whose code determines what an entry contains
_SOURCES = (
    "record", "loss.py", "quantities.py", "config/schema.py", "plan/host.py", "plan/windows.py", "rundir/history.py",
)  # fmt: skip


def _version() -> str:
    """Return a text that differs for a launcher that may compute other entries. It is a digest of its
    modules' contents, which are the same on every host and in every container with this version."""
    root, digest = Path(__file__).parents[1], hashlib.sha256(str(PLAN_FORMAT).encode())
    for name in _SOURCES:
        for path in sorted((root / name).glob("*.py")) or [root / name]:
            digest.update(path.read_bytes())
    return digest.hexdigest()


# of the modules that this process has imported: another version may be installed while a run lasts
_VERSION = _version()
_ANY = RunPaths(Path())
_READ = tuple(
    file.name
    for file in (
        _ANY.plan, _ANY.loop_plan, _ANY.config, _ANY.precision, _ANY.metrics, _ANY.summary, _ANY.job,
        _ANY.newest_incarnation,
    )
)  # fmt: skip

Identity = list[list[int] | None]


def identity_of(run: Path) -> Identity:
    """Return number, size and times of each file that measurements and state of a run are read from; None for one that
    does not exist.

    It is determined before any of them is read, so that what was read is never older than the identity says.
    """
    found: Identity = []
    for place in map(f"{run}/".__add__, _READ):
        try:
            status = os.stat(place)  # noqa: PTH116  (half the time of Path.stat)
            found.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
        except OSError:
            found.append(None)
    return found


def leave_entry(paths: RunPaths) -> None:
    """Write the entry of a run that has ended, unless its record is very large.

    Whoever changes one of the files later appends to it or puts another one in its place, so that the change shows in
    size or number even if the clock of the file system is coarse.
    """
    import orjson  # not at module level: `launch runs` works without it

    # OSError: the disk is full, or there is no record; the others: files that another program has changed
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        if paths.metrics.stat().st_size > MOST_BYTES:
            return
        identity, data = identity_of(paths.root), asdict(read_run(paths.root))
        curves = data.pop("curves_json")
        body = b"\n".join([orjson.dumps({"done": _done(paths), "data": data}), curves.encode()])
        header = orjson.dumps([_VERSION, identity, hashlib.sha256(body).hexdigest()])
        write_text(paths.report_entry, b"\n".join([header, body]).decode())


def read_entry(run: Path, identity: Identity) -> tuple[list[str] | None, RunData] | None:
    """Return (name and detail, if the run is done; data) from a run's entry; None if there is no valid one.

    Args:
        identity: of the run's files as they are.
    """
    import orjson

    try:
        header, _, body = read_bytes(f"{run}/{_ANY.report_entry.name}", MOST_BYTES).partition(b"\n")
        version, of_files, checksum = orjson.loads(header)
        if version != _VERSION or of_files != identity or checksum != hashlib.sha256(body).hexdigest():
            return None
        content, _, curves = body.partition(b"\n")
        fields = orjson.loads(content)
        if (done := fields["done"]) is not None:
            name, detail = map(str, done)
            done = [name, detail]
        return done, checked(RunData(**fields["data"], curves_json=curves.decode()))
    except Exception:  # whatever it contains: the other files are read instead
        return None


def _done(paths: RunPaths) -> list[str] | None:
    """Return name and detail of a run that is done, the one state that cannot change while the files stay the same;
    None in any other state."""
    plan, summary, attempt = ((read_json(path) or {}) for path in (paths.plan, paths.summary, paths.newest_incarnation))
    if history.verdict_of(summary, attempt, history.submissions(paths)) != "done":
        return None
    return [plan.get("run", {}).get("name") or paths.root.name, history.early_end(summary)]
