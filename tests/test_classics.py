"""jobs/classics.py as a user starts it, and the properties that its numbers must show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT, launch

JOB = ROOT / "jobs" / "classics.py"


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w.])", line)]


@pytest.mark.slow
def test_the_classic_examples_show_their_point(tmp_path: Path) -> None:
    done = launch("run", "cluster.workers_per_node=1", "--", str(JOB), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    classifier, dot_product, short = done.stdout.strip().split("\n\n")
    documented = (ROOT / "docs" / "explanations" / "classics.md").read_text().replace("\n    ", "\n")
    assert dot_product in documented
    assert short in documented

    _, _, *curve, weights = classifier.splitlines()
    assert len(curve) == 7
    for _, one, four, apart in map(numbers, curve):
        assert apart == pytest.approx(abs(one - four), abs=2e-7)
        assert four == pytest.approx(one, rel=1e-6), "one loss curve"
    assert numbers(curve[-1])[1] < 0.1 * numbers(curve[0])[1], "that learns"
    apart, _, largest = numbers(weights)
    assert apart < 1e-6 * largest < 1e-5

    lines = {line.partition(":")[0].strip(): numbers(line.partition("[")[2]) for line in dot_product.splitlines()[1:]}
    by_hand = [sum(range(first, 19, 3)) / 6 for first in (1, 2, 3)]
    assert by_hand == [8.5, 9.5, 10.5]
    assert lines["one batch of 6"] == lines["3 of 2, normalised by 3"] == by_hand
    assert lines["3 of 2, not normalised"][:3] == [3 * value for value in by_hand]
    # though the model still had the gradients of the lines above it when the engine took it
    assert lines["3 of 2, the engine"] == by_hand

    _, _, *windows = map(numbers, short.splitlines())
    assert [window[1] for window in windows] == [8, 8, 4]
    assert sum(samples * mean for _, samples, mean, *_ in windows) == sum(range(1, 21)), "each sample once"
    for number, _, mean, engine, divided in windows:
        assert engine == mean, "each window by the samples that it has"
        assert divided == (mean / 2 if number == 2 else mean), "by the accumulation, the last one counts half"
