"""The studies of exactness under jobs/, cut short."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import Launch
from tests.helpers import CORPUS, ROOT, patience
from tests.infra import warm

pytestmark = pytest.mark.slow


def test_one_loss_curve_for_every_shape() -> None:
    job = [sys.executable, "-m", "jobs.invariance", "--within", "1e-6"]
    small = [CORPUS, "train.steps=20", "task.width=32", "task.depth=1", "task.heads=2", "task.seq_len=16"]
    command = [*job, "--shapes", "1x8", "4x1, micro-batch x2", "--", *small]
    done = warm.run(command, patience(240), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) after 20 steps", done.stdout)]
    assert len(losses) == 2
    assert max(losses) < 5.0, "it has learned something that could have differed"


def test_accumulation_holds_one_micro_batch_and_the_gradients(launch: Launch) -> None:
    job = ["--", str(ROOT / "jobs" / "memory.py"), "--width", "48", "--depth", "2", "--strategies", "fsdp"]
    done = launch("run", "cluster.workers_per_node=2", *job)
    assert done.returncode == 0, done.stderr
    peaks = r"fsdp: peak of 1 micro-batch (\S+) MB; 8 micro-batches (\S+) MB; .* large (\S+) MB; gradients (\S+) MB"
    found = re.search(peaks, done.stdout)
    assert found is not None, done.stdout
    one, eight, large, gradients = map(float, found.groups())
    assert one < eight <= one + gradients + 0.02
    assert large > 3 * eight, "or there was nothing to save"
