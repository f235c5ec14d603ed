"""What varies between runs, and which of them belong on one line of a plot. Nothing is averaged over runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.report.comparison.facts import Facts
from launcher.report.comparison.figures import Figures

Key = tuple[tuple[str, str], ...]

WORKERS = frozenset({"cluster.nodes", "cluster.workers_per_node"})
_ACCUMULATION = frozenset({"batch.accumulation", "batch.micro_size"})
_GLOBAL = "batch.global_size"
# how long a run goes on, and what it does between steps: no step takes longer or shorter for it
_BETWEEN_STEPS = ("train.steps", "train.epochs", "train.eval_every", "train.log_every", "checkpoint.")


def varying(facts: Iterable[Facts]) -> tuple[str, ...]:
    """The settings that are not the same in all of these runs; one that some runs do not know is open there."""
    settings = [each.settings for each in facts]
    keys = dict.fromkeys(key for each in settings for key in each)
    return tuple(key for key in keys if len({each.get(key, "null") for each in settings}) > 1)


def over_workers(facts: Sequence[Facts]) -> list[Key]:
    """Of each run, what tells its line in a plot over the world size from the others."""
    keys = [key for key in varying(facts) if key not in WORKERS and not key.startswith(_BETWEEN_STEPS)]
    return [_key(each, keys) for each in facts]


def over_accumulation(facts: Sequence[Facts]) -> list[Key]:
    """The same for a plot over accumulation. ``batch.global_size`` tells lines apart, unless it follows from the
    accumulation, as where a study holds the micro-batch constant."""
    keys = [key for key in varying(facts) if key not in _ACCUMULATION and not key.startswith(_BETWEEN_STEPS)]
    without = [key for key in keys if key != _GLOBAL]
    sizes: dict[Key, set[tuple[int, int]]] = defaultdict(set)
    for each in facts:
        sizes[_key(each, without)].add((each.accumulation, each.global_size))
    found: list[Key] = []
    for each in facts:
        pairs = sizes[_key(each, without)]
        follows = len({accumulation for accumulation, _ in pairs}) == len(pairs) > 1
        found.append(_key(each, without if follows else keys))
    return found


def _key(facts: Facts, keys: Iterable[str]) -> Key:
    return tuple((key, facts.settings.get(key, "null")) for key in keys)


def said(key: Key) -> str:
    """Return ``accumulation=4 lr=0.001 strategy=fsdp``: settings without their groups, options with their group."""
    return " ".join(f"{name.removesuffix('.kind').rpartition('.')[2]}={value}" for name, value in key)


def natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """To sort by: numbers inside a text as numbers."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return tuple((0, float(part), "") if number % 2 else (1, 0.0, part) for number, part in enumerate(parts) if part)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """``value``: samples/s by what the baseline's would be at this world size. ``baseline``: its world size."""

    value: float
    baseline: int


def samples_per_s(figures: Figures) -> float | None:
    """Of the whole job: the global batch by the median step."""
    if figures.facts is None or figures.measured is None or not figures.measured.step_s:
        return None
    return figures.facts.global_size / figures.measured.step_s


def efficiencies(runs: Sequence[tuple[Facts, float, bool]]) -> list[Efficiency | None]:
    """Of runs of one task, each with its samples/s and whether it is finished; None for one without another world size
    to compare with.

    The baseline is the fastest finished run on the fewest workers of the same line.
    """
    lines = over_workers([facts for facts, *_ in runs])
    worlds: dict[Key, set[int]] = defaultdict(set)
    baselines: dict[Key, tuple[int, float]] = {}
    for line, (facts, speed, done) in zip(lines, runs, strict=True):
        worlds[line].add(facts.world_size)
        known = baselines.get(line, (facts.world_size, 0.0))
        if done and (facts.world_size, -speed) <= (known[0], -known[1]):
            baselines[line] = facts.world_size, speed
    found: list[Efficiency | None] = []
    for line, (facts, speed, _) in zip(lines, runs, strict=True):
        if line not in baselines or len(worlds[line]) == 1:
            found.append(None)
            continue
        smallest, base = baselines[line]
        found.append(Efficiency(value=speed / (facts.world_size / smallest * base), baseline=smallest))
    return found
