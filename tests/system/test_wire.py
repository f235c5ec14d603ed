"""The meter against the kernel: what the run says it sent is what its loopback has carried."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch_command, patience
from tests.infra.netns import needs_root, network_namespace, sent_bytes

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]


def run(tmp_path: Path, name: str, *overrides: str) -> tuple[int, list[dict[str, Any]]]:
    """Bytes that crossed the namespace's loopback in a run, and the run's records."""
    with network_namespace() as namespace:
        command = ["ip", "netns", "exec", namespace, *launch_command("train", *overrides, f"run.name={name}")]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=patience(240), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        carried = sent_bytes(namespace)
    return carried, [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_payload_is_an_eighth_and_the_wire_agrees(tmp_path: Path) -> None:
    job = (
        "task.width=256", "task.depth=2", "task.heads=4", "task.seq_len=16", "task.eval_samples=32",
        "batch.global_size=16", "batch.micro_size=1", "precision=fp32", "wandb.mode=disabled", "run.calibrate_s=0",
        "checkpoint.enabled=false",
    )  # fmt: skip
    payload: dict[str, int] = {}
    for sync in ("boundary", "every"):
        # two lengths: what starting and ending a job sends drops out of the difference
        short, _ = run(tmp_path, f"{sync}-short", *job, f"strategy.sync={sync}", "train.steps=4")
        long, records = run(tmp_path, f"{sync}-long", *job, f"strategy.sync={sync}", "train.steps=24")
        assert [record["batch/accumulation"] for record in records] == [8] * 24
        payload[sync] = records[-1]["comm/payload_bytes"]
        claimed = 2 * sum(record["comm/wire_bytes"] for record in records[4:])  # both ranks send over the one loopback
        assert long - short == pytest.approx(claimed, rel=0.03)
    assert payload["every"] == 8 * payload["boundary"]
