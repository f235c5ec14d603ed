"""Cache of what `launch report` has read of runs, so that a further report of the same runs reads only what changed.

One file for each directory of runs, in the user's cache directory. A run's entry is valid while the files that were
read for it are the same. The content is JSON: nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.plan.forecast_cache import user_cache, versions
from launcher.report.measurements import FIGURES, Point, RunData
from launcher.rundir.files import write_text
from launcher.rundir.paths import RunPaths

# file systems with times of whole seconds may show two versions of a file with the same time
_SETTLED_S = 2.0
MOST_FILES = 20
# below this number of runs, reading them is as fast
_FEWEST = 50
_PLAIN = ("problem", "resumed_after", "damaged_lines", "without_clock", "metrics", "curves")

Identity = list[list[int] | None]


def read_cached(
    runs: Sequence[Path], read: Callable[[Sequence[Path]], dict[Path, RunData]], *, fewest: int = _FEWEST
) -> dict[Path, RunData]:
    """Return the data of ``runs``, from the cache where they have not changed; otherwise call ``read``.

    Args:
        fewest: directories with fewer of ``runs`` are not cached.
    """
    by_directory: dict[Path, list[Path]] = {}
    for run in dict.fromkeys(runs):
        by_directory.setdefault(run.parent, []).append(run)
    found: dict[Path, RunData] = {}
    for directory, inside in by_directory.items():
        found |= _read_directory(directory, inside, read) if len(inside) >= fewest else read(inside)
    return {run: found[run] for run in runs}


def _read_directory(
    directory: Path, runs: Sequence[Path], read: Callable[[Sequence[Path]], dict[Path, RunData]]
) -> dict[Path, RunData]:
    file = user_cache() / "reports" / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()[:32]}.json"
    now, identities = time.time_ns(), {run: _identity(run) for run in runs}
    known = _load(file, identities)
    missing = [run for run in runs if run not in known]
    if not missing:
        return known
    found = known | read(missing)
    # a file that was changed a moment ago may change again without another time or size
    settled = [run for run in runs if _newest(identities[run]) < now - _SETTLED_S * 1e9]
    if any(run not in known for run in settled):
        _store(file, {run: found[run] for run in settled}, identities)
    return found


def _identity(run: Path) -> Identity:
    """Return device, number, size and times of each file that is read for a run; None for one that does not exist."""
    paths = RunPaths(run)
    found: Identity = []
    for file in (paths.plan, paths.loop_plan, paths.config, paths.precision, paths.metrics):
        try:
            status = os.stat(file)  # noqa: PTH116  (half the time of Path.stat)
            found.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
        except OSError:
            found.append(None)
    return found


def _newest(identity: Identity) -> int:
    return max((max(each[2:]) for each in identity if each is not None), default=0)


def _load(file: Path, identities: Mapping[Path, Identity]) -> dict[Path, RunData]:
    """Return the entries of ``file`` whose runs have these identities; none if it is missing or damaged."""
    import orjson

    try:
        content = orjson.loads(file.read_bytes())
        if content["versions"] != versions():
            return {}
        pairs, entries = [tuple(pair) for pair in content["settings"]], content["runs"]
        return {
            run: _decoded(entry, pairs)
            for run, identity in identities.items()
            if (entry := entries.get(run.name)) is not None and entry["identity"] == identity
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _store(file: Path, data: Mapping[Path, RunData], identities: Mapping[Path, Identity]) -> None:
    import orjson

    pairs: dict[tuple[str, str], int] = {}  # most settings are the same in many runs
    entries = {run.name: {"identity": identities[run], **_encoded(each, pairs)} for run, each in data.items()}
    with suppress(OSError, TypeError):  # TypeError: a number that JSON of 64 bits lacks
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = orjson.dumps({"versions": versions(), "settings": [*pairs], "runs": entries})
        write_text(file, content.decode())
        others = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in others[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _encoded(data: RunData, pairs: dict[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "figures": [data.figures[name] for name in FIGURES],
        "settings": [pairs.setdefault(pair, len(pairs)) for pair in data.settings.items()],
        "minima": [*zip(*data.minima, strict=True)],
        **{name: getattr(data, name) for name in _PLAIN},
    }


def _decoded(entry: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> RunData:
    return RunData(
        figures=dict(zip(FIGURES, entry["figures"], strict=True)),
        settings=dict(map(pairs.__getitem__, entry["settings"])),
        minima=[*map(Point, *entry["minima"])] if entry["minima"] else [],
        **{name: entry[name] for name in _PLAIN},
    )
