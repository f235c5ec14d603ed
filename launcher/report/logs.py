"""What a run's processes printed: one source out of the files of all its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from launcher.paths import RunPaths, SweepPaths
from launcher.runstate import Run
from launcher.tail import Tail, last_lines

_LAST = 15


@dataclass
class Source:
    """Files in the order in which they are begun, and what they have gained. ``what``: whose words these are."""

    what: str
    paths: RunPaths
    rank: int | None
    node: int
    _read: dict[Path, Tail] = field(default_factory=dict[Path, Tail])

    def _files(self) -> list[Path]:
        if self.rank is None:
            files = [self.paths.node_log(self.node)]
        else:
            files = [self.paths.rank_log(self.rank, attempt) for attempt in range(self.paths.next_attempt())]
        return [file for file in files if file.exists()]

    def exists(self) -> bool:
        return bool(self._files())

    def lines(self, *, over: bool = False) -> list[str]:
        """What was added since the last look; a file that follows another one is announced.

        ``over``: no look follows, and so a last line without an end is shown too. Of all files but the newest it
        always is: who wrote those is gone.
        """
        found: list[str] = []
        files = self._files()
        for file in files:
            if file not in self._read:
                if self._read:
                    found.append(f"--- {file.name} ---")
                self._read[file] = Tail(file)
            found += self._read[file].lines(over=over or file != files[-1])
        return found

    def missing(self) -> str:
        there = sorted(path.name for path in self.paths.logs.glob("*.log"))
        return f"{self.what} has no log yet.\n  There are: {', '.join(there) or 'none, the run has not begun'}."


def of_rank(paths: RunPaths, rank: int) -> Source:
    return Source(f"rank {rank}", paths, rank, 0)


def of_node(paths: RunPaths, node: int) -> Source:
    return Source(f"node {node}", paths, None, node)


class Following:
    """Prints a source's lines as they come."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def refresh(self, *, over: bool = False) -> None:
        for line in self._source.lines(over=over):
            print(line, flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        self.refresh(over=True)


def last_words(paths: RunPaths, run: Run) -> list[str]:
    """The end of what Slurm's own script, or the first node, has left of a run that says nothing more."""
    of_array = SweepPaths(paths.root.parent).slurm
    files = [folder / f"{run.job}_0_log.out" for folder in (paths.slurm, of_array)]
    files.append(paths.node_log(0))
    for file in files:
        if lines := last_lines(file, _LAST):
            return ["", *lines, f"  From: {file}"]
    if run.job is None:
        return []
    return ["", f"Nothing was written to {paths.root}: do the nodes see that directory?", "  `launch doctor` looks."]
