"""The meter against the kernel: what the run says it sent is what its loopback has carried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import CORPUS, launch_command, patience
from tests.infra import warm
from tests.infra.netns import inside, needs_root, network_namespace, sent_bytes

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]


def run(tmp_path: Path, name: str, *overrides: str) -> tuple[int, list[dict[str, Any]]]:
    """Bytes that crossed the namespace's loopback in a run, and the run's records."""
    with network_namespace() as namespace:
        command = launch_command("train", *overrides, f"run.name={name}")
        done = warm.run(command, patience(240), cwd=tmp_path, preexec_fn=inside(namespace))
        assert done.returncode == 0, done.stdout + done.stderr
        carried = sent_bytes(namespace)
    return carried, [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_payload_is_an_eighth_and_the_wire_agrees(tmp_path: Path) -> None:
    job = (
        CORPUS, "task.width=256", "task.depth=2", "task.heads=4", "task.seq_len=16", "task.eval_samples=32",
        "batch.global_size=16", "batch.micro_size=1", "precision=fp32", "wandb.mode=disabled", "run.calibrate_s=0",
        "checkpoint.enabled=false",
    )  # fmt: skip
    # two lengths: what starting and ending a job sends drops out of the difference
    short, few = run(tmp_path, "short", *job, "strategy.sync=boundary", "train.steps=3")
    long, many = run(tmp_path, "long", *job, "strategy.sync=boundary", "train.steps=9")
    every, each = run(tmp_path, "every", *job, "strategy.sync=every", "train.steps=3")
    for carried, records in ((long, many), (every, each)):
        assert [record["batch/accumulation"] for record in records] == [8] * len(records)
        more = sum(record["comm/wire_bytes"] for record in records) - sum(record["comm/wire_bytes"] for record in few)
        assert carried - short == pytest.approx(2 * more, rel=0.03)  # both ranks send over the one loopback
    assert each[-1]["comm/payload_bytes"] == 8 * many[-1]["comm/payload_bytes"]
