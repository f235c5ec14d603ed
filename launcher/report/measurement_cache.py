"""Data of a report's runs: from the entry that each has left, from a cache, or from its files.

The cache is one file for each directory of runs, in the user's cache directory. It has what was read of runs without an
entry (``launcher.record.report_entry``): those that are not over, were killed, or are of another version. It is valid
while the files that were read are the same. The content is a checksum and JSON: nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from launcher.plan.forecast_cache import user_cache, versions
from launcher.process import die_with_parent
from launcher.record.measurements import FIGURES, RunData, read_run
from launcher.record.report_entry import Identity, identity_of, read_entry
from launcher.rundir.files import write_text
from launcher.rundir.paths import RunPaths
from launcher.runs.status import Run, RunState, statuses_of

# file systems with times of whole seconds may show two versions of a file with the same time
_SETTLED_S = 2.0
MOST_FILES = 20
# below this number of runs, reading them is as fast
_FEWEST = 50
_PLAIN = (
    "problem", "resumed_after", "damaged_lines", "without_clock", "metrics", "minima", "trackers",
    "curves_json",
)  # fmt: skip
# below this many bytes of records, starting processes takes longer than reading; a run's other files take as long as
# 5 kB of them
_ALONE_BYTES, _CONFIG_BYTES = 30_000_000, 5_000


def read_all(runs: Sequence[Path]) -> dict[Path, RunData]:
    """Return the data of each directory in ``runs``, read from its files."""
    sizes = {run: _CONFIG_BYTES + _size(run) for run in runs}
    cores = min(len(os.sched_getaffinity(0)), len(sizes))
    if cores < 2 or sum(sizes.values()) < _ALONE_BYTES:
        return {run: read_run(run) for run in sizes}
    largest_first = sorted(sizes, key=lambda run: -sizes[run])
    # spawn: a forked process would inherit locks that another thread of this one may hold
    # initializer: without it a worker would outlive this process, because it holds both ends of its own queue
    context, end = multiprocessing.get_context("spawn"), partial(die_with_parent, os.getpid())
    with ProcessPoolExecutor(cores, mp_context=context, initializer=end) as pool:
        return dict(zip(largest_first, pool.map(read_run, largest_first, chunksize=1 + len(sizes) // 200), strict=True))


def _size(run: Path) -> int:
    try:
        return RunPaths(run).metrics.stat().st_size
    except OSError:
        return 0


class MeasurementCache:
    """Measurements of a report's runs.

    Args:
        read: reads the measurements of runs.
        fewest: directories with fewer of the runs are not cached.
    """

    def __init__(
        self, read: Callable[[Sequence[Path]], dict[Path, RunData]] = read_all, *, fewest: int = _FEWEST
    ) -> None:
        self._read, self._fewest = read, fewest
        self._directories: dict[Path, _Directory] = {}

    def statuses(self, runs: Iterable[RunPaths]) -> list[Run]:
        """Return name, directory, state and detail of each run.

        Only "done" is taken from entries and cache. It is the one state that cannot change while the files stay the
        same.
        """
        runs = [*runs]
        known: dict[Path, Run] = {}
        for directory, inside in self._by_directory(run.root for run in runs):
            known |= directory.done(inside)
        rest = [run for run in dict.fromkeys(runs) if run.root not in known]
        read = {Path(run.dir): run for run in statuses_of(rest, brief=True)}
        for directory, inside in self._by_directory(read):
            directory.note_states([read[run] for run in inside])
        return [known.get(run.root) or read[run.root] for run in runs]

    def measurements(self, runs: Iterable[Path]) -> dict[Path, RunData]:
        """Return the data of ``runs``."""
        runs = list(dict.fromkeys(runs))
        found: dict[Path, RunData] = {}
        for directory, inside in self._by_directory(runs):
            found |= directory.measurements(inside, self._read)
        if missing := [run for run in runs if run not in found]:
            found |= self._read(missing)
        return {run: found[run] for run in runs}

    def _by_directory(self, runs: Iterable[Path]) -> list[tuple[_Directory, list[Path]]]:
        """Return the directories with enough of the runs to be cached."""
        by_place: dict[Path, list[Path]] = {}
        for run in runs:
            by_place.setdefault(run.parent, []).append(run)
        for place, inside in by_place.items():
            if place not in self._directories and len(inside) >= self._fewest:
                self._directories[place] = _Directory(place)
        return [(self._directories[place], inside) for place, inside in by_place.items() if place in self._directories]


class _Directory:
    """Entries of the runs in one directory, and its cache file.

    The identity of a run's files is determined before any of them is read, so that what is cached is never newer than
    its identity.
    """

    def __init__(self, place: Path) -> None:
        self._file = user_cache() / "reports" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"
        self._pairs, self._cached = _load(self._file)
        self._opened_ns = time.time_ns()
        self._identities: dict[Path, Identity] = {}
        self._entries: dict[Path, RunData] = {}
        self._done: dict[Path, list[str]] = {}

    def done(self, runs: Iterable[Path]) -> dict[Path, Run]:
        """Return the runs that are known as done."""
        found: dict[Path, Run] = {}
        for run in runs:
            self._look_at(run)
            if (cached := self._in_cache(run)) is not None and cached["done"] is not None:
                self._done[run] = cached["done"]
            if run in self._done:
                name, detail = self._done[run]
                found[run] = Run(name=name, dir=str(run), state=RunState.done, detail=detail)
        return found

    def note_states(self, runs: Iterable[Run]) -> None:
        """Keep the states that were read, for the cache."""
        self._done |= {Path(run.dir): [run.name, run.detail] for run in runs if run.state is RunState.done}

    def measurements(
        self, runs: Sequence[Path], read: Callable[[Sequence[Path]], dict[Path, RunData]]
    ) -> dict[Path, RunData]:
        known: dict[Path, RunData] = {}
        for run in runs:
            self._look_at(run)
            if run in self._entries:
                known[run] = self._entries[run]
            elif (cached := self._in_cache(run)) is not None:
                known[run] = _decoded(cached, self._pairs)
        missing = [run for run in runs if run not in known]
        if not missing:
            return known
        found = known | read(missing)
        # a file that was changed a moment ago may change again without another time or size
        settled = [
            run
            for run in runs
            if run not in self._entries and _newest(self._identities[run]) < self._opened_ns - _SETTLED_S * 1e9
        ]
        if any(run not in known for run in settled):
            self._store({run: found[run] for run in settled})
        return found

    def _look_at(self, run: Path) -> None:
        """Determine the identity of a run's files, and read the entry that it has left, once."""
        if run in self._identities:
            return
        identity = self._identities[run] = identity_of(run)
        if (entry := read_entry(run, identity)) is not None:
            done, self._entries[run] = entry
            if done is not None:
                self._done[run] = done

    def _in_cache(self, run: Path) -> dict[str, Any] | None:
        """Return what is cached of a run; None unless it is of the files as they are."""
        cached = self._cached.get(run.name)
        return cached if cached is not None and cached["identity"] == self._identities[run] else None

    def _store(self, data: Mapping[Path, RunData]) -> None:
        import orjson

        pairs: dict[tuple[str, str], int] = {}  # most settings are the same in many runs
        cached = {
            run.name: {"identity": self._identities[run], "done": self._done.get(run), **_encoded(each, pairs)}
            for run, each in data.items()
        }
        with suppress(OSError, TypeError):  # TypeError: a number that JSON of 64 bits lacks
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = orjson.dumps({"versions": versions(), "settings": [*pairs], "runs": cached})
            write_text(self._file, f"{hashlib.sha256(content).hexdigest()}\n{content.decode()}")
            others = sorted(self._file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in others[:-MOST_FILES]:
                path.unlink(missing_ok=True)


def _newest(identity: Identity) -> int:
    return max((max(each[2:]) for each in identity if each is not None), default=0)


def _load(file: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the settings and the runs of a cache file; none if it is missing, damaged or of another version."""
    import orjson

    with suppress(OSError):
        digest, _, body = file.read_bytes().partition(b"\n")
        if digest.decode(errors="replace") == hashlib.sha256(body).hexdigest():
            content = orjson.loads(body)
            if content["versions"] == versions():
                return [(key, value) for key, value in content["settings"]], content["runs"]
    return [], {}


def _encoded(data: RunData, pairs: dict[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "figures": [data.figures[name] for name in FIGURES],
        "settings": [pairs.setdefault(pair, len(pairs)) for pair in data.settings.items()],
        **{name: getattr(data, name) for name in _PLAIN},
    }


def _decoded(entry: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> RunData:
    return RunData(
        figures=dict(zip(FIGURES, entry["figures"], strict=True)),
        settings=dict(map(pairs.__getitem__, entry["settings"])),
        **{name: entry[name] for name in _PLAIN},
    )
