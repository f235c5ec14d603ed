"""The studies under jobs/, cut short."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.tasks.digits import Digits
from tests.conftest import Launch
from tests.helpers import CORPUS, ROOT, patience
from tests.infra import warm
from tests.infra.netns import needs_root

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
    job = ["--", str(ROOT / "jobs" / "memory.py"), "--width", "24", "--depth", "1", "--strategies", "fsdp"]
    done = launch("run", "cluster.workers_per_node=2", *job)
    assert done.returncode == 0, done.stderr
    peaks = r"fsdp: peak of 1 micro-batch (\S+) MB; 8 micro-batches (\S+) MB; .* large (\S+) MB; gradients (\S+) MB"
    found = re.search(peaks, done.stdout)
    assert found is not None, done.stdout
    one, eight, large, gradients = map(float, found.groups())
    assert one < eight <= one + gradients + 0.02
    assert large > 3 * eight, "or there was nothing to save"


def outer(out: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Return the figures of jobs/outer.py, by way. It must print a row for each."""
    job = [sys.executable, "-m", "jobs.outer", "--tasks", "digits", "--out", str(out), *words]
    job += ["train.steps=20", "schedule=constant", "schedule.warmup_steps=0", "outer.every=10"]
    done = warm.run(job, patience(240), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {each["way"]: each for each in map(json.loads, out.read_text().splitlines())}
    for way, each in results.items():
        assert re.search(rf"\| {way} \| {each['eval/loss']:.4f} \|", done.stdout)
    return results


@pytest.mark.nightly
def test_outer_steps_beside_the_synchronous_job(tmp_path: Path) -> None:
    results = outer(tmp_path / "out.jsonl", "--ways", "synchronous", "diloco", "--")
    synchronous, diloco = results["synchronous"], results["diloco"]
    assert synchronous["samples"] == diloco["samples"] == 20 * 64
    assert synchronous["eval/loss"] != diloco["eval/loss"]
    parameters, averages, steps = Digits().facts()["parameters"], 2, 19  # the first step is not counted
    buffers = 8 * 2 * (16 + 32)  # mean and variance of two BatchNorms, in fp64
    sent = averages * (4 * parameters + buffers) / steps
    assert sent < diloco["sent_bytes"] < sent + 8 + averages * 500 / steps, "and flags, and the names of buffers"
    assert synchronous["sent_bytes"] == pytest.approx(4 * parameters, rel=0.05), "and buffers"


@needs_root
@pytest.mark.nightly
def test_bytes_of_outer_steps_are_those_on_the_link(tmp_path: Path) -> None:
    result = outer(tmp_path / "out.jsonl", "--ways", "diloco", "--rates", "1gbit", "--")["diloco"]
    assert result["sent_bytes"] < result["link_bytes"] < 1.5 * result["sent_bytes"], "headers, flags, heartbeats"
