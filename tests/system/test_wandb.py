"""W&B is the mirror of metrics.jsonl: its file read back, and its server out of reach."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from wandb.wandb_agent import Agent

from launcher.plan.run_plan import RunPlan
from launcher.report.tables import summary_table
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import write_text
from tests.conftest import Launch
from tests.helpers import make_plan, patience
from tests.infra import warm
from tests.infra.mirrored import in_wandb, wandb_records
from tests.infra.runs import wait_for
from tests.report.test_tables import shown

pytestmark = pytest.mark.slow
SMALL = (
    "task.width=16", "task.depth=1", "task.heads=1", "task.seq_len=16", "task.eval_samples=32",
    "train.steps=12", "run.calibrate_s=5", "run.name=w", "checkpoint.enabled=false",
)  # fmt: skip
ALONE = ("cluster.workers_per_node=1", "run.calibrate_s=0")
NOWHERE = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sweeps.md"


def read_back(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], list[str]]:
    """Config, history, summary and run ids of every offline file of a run."""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    ids: list[str] = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                ids.append(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            if record.HasField("summary"):
                summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    return config, history, summary, ids


def test_the_offline_file_holds_config_every_step_once_and_the_summary_but_not_the_key(
    launch: Launch, tmp_path: Path
) -> None:
    key = "5ecre7" * 6 + "abcd"
    done = launch("train", *SMALL, env={"WANDB_API_KEY": key})
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "runs").rglob("*"):
        if path.is_file():
            assert key.encode() not in path.read_bytes(), path
    assert "wandb sync" in done.stdout
    run = tmp_path / "runs" / "w"
    plan = json.loads((run / "plan.json").read_text())
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    shown_there = "".join(record.output_logger.line for record in wandb_records(file))
    assert shown_there == (run / "logs" / "rank0.log").read_text()
    config, history, summary, ids = read_back(run)
    assert set(ids) == {plan["run"]["id"]}, "the id is the plan's, made before the start"
    assert {name: config[name] for name in plan} == plan
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == list(range(1, 13))
    for row, record in zip(history, written, strict=True):
        for name, value in record.items():
            assert row[name] == value or math.isclose(row[name], value), name
    final = json.loads((run / "summary.json").read_text())
    assert summary["verdict"] == "done"
    assert summary["eval/loss"] == pytest.approx(final["eval/loss"])
    of_comm = [name for name in final if name.startswith("comm/") and name != "comm/not_measured"]
    assert [summary[name] for name in of_comm] == pytest.approx([final[name] for name in of_comm])


def test_a_server_out_of_reach_is_said_once_and_stops_nothing(launch: Launch, tmp_path: Path) -> None:
    done = launch("train", *SMALL, *ALONE, "wandb.mode=online", env=NOWHERE)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("W&B did not take the run") == 1
    run = tmp_path / "runs" / "w"
    assert json.loads((run / "summary.json").read_text())["verdict"] == "done"
    _, history, summary, _ = read_back(run)
    assert [row["step"] for row in history] == list(range(1, 13)), "nothing is lost: the run is kept offline"
    assert summary["verdict"] == "done"


def test_a_trial_of_wandb_agent_is_a_run_of_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the guide, built and started by W&B's own agent, on this machine and without W&B's server."""
    (text,) = re.findall(r"^# sweep.yaml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    sweep = yaml.safe_load(text)
    slurm = {"task._target_=my_tasks.MyTask", "cluster=slurm", "cluster.nodes=4", "--wait"}
    ours = [word for word in sweep["command"] if word not in slurm]
    assert len(ours) == len(sweep["command"]) - len(slurm)
    values = dict(zip(sweep["parameters"], (0.00123456789, 4), strict=True))
    trial = {
        "type": "run", "run_id": "tr1al0id", "program": "", "args": {name: {"value": values[name]} for name in values}
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with patch.dict(os.environ, {**NOWHERE, "PATH": path, "WANDB_SWEEP_ID": "5weep", "WANDB_PROJECT": "theirs"}):
        agent = Agent(None, None, "5weep")
        agent._sweep_command = [*ours[:-1], *SMALL, *ALONE, "batch.global_size=16", ours[-1]]
        assert "exception" not in agent._process_command(trial)
        assert agent._run_processes["tr1al0id"].wait() == 0
    run = tmp_path / "runs" / "w"
    plan = RunPlan.load(run / "plan.json")
    assert (plan.optimizer.lr, plan.batch.accumulation) == (*values.values(),)
    _, history, summary, ids = read_back(run)
    assert set(ids) == {"tr1al0id"}
    assert len(history) == 12
    assert summary[sweep["metric"]["name"]] > 0
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    found = [record.run for record in wandb_records(file) if record.HasField("run")]
    assert {(each.sweep_id, each.project) for each in found} == {("5weep", "theirs")}


def mirror(run: Path, attempt: str = "0.0") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launcher.trackers.mirror", str(run), attempt, "wandb"]
    return warm.Popen(command, stdin=subprocess.PIPE)


def record_until(plan: RunPlan, step: int) -> None:
    """Write the record of a run that has reached ``step``."""
    lines = [json.dumps({"step": n, "train/loss": 10.0 - n}) + "\n" for n in range(1, step + 1)]
    write_text(plan.paths.metrics, "".join(lines))


def test_a_later_mirror_goes_on_after_the_last_step_that_is_stored(tmp_path: Path) -> None:
    plan = make_plan("wandb.mode=offline", "precision=fp32", run_dir=str(tmp_path))
    plan.save()
    for step in (5, 8):
        record_until(plan, step)
        done = mirror(tmp_path)
        done.communicate()
        assert done.returncode == 0
        assert json.loads(plan.paths.tracker_status("wandb").read_text())["delivered"] == step
    _, history, _, ids = read_back(tmp_path)
    assert [row["step"] for row in history] == [*range(1, 9)]
    record_until(plan, 600)
    killed = mirror(tmp_path)
    wait_for(lambda: len(in_wandb(tmp_path)) > 8, "a part of it in the third mirror's file")
    killed.kill()
    killed.communicate()
    before = len(in_wandb(tmp_path))
    assert before < 600, "W&B's library keeps the last part in memory, and it is lost"
    record_until(plan, 601)
    mirror(tmp_path).communicate()
    _, history, _, ids = read_back(tmp_path)
    assert [row["step"] for row in history] == [*range(1, 602)], "each step is in the files once"
    assert set(ids) == {plan.run.id}
    assert "wandb/offline-run-*" in shown(summary_table(plan, {"verdict": "stopped", "steps": 11}))


def test_a_mirror_whose_run_goes_on_elsewhere_goes_without_a_word(tmp_path: Path) -> None:
    plan = make_plan("wandb.mode=offline", "precision=fp32", run_dir=str(tmp_path))
    plan.save()
    record_until(plan, 3)
    old = mirror(tmp_path)
    wait_for(plan.paths.tracker_status("wandb").exists, "the first mirror to open its run")
    Fence(plan.paths, Incarnation(0, 1)).claim()
    record_until(plan, 8)
    newer = json.dumps({"dir": "the newer one's"})
    write_text(plan.paths.tracker_status("wandb"), newer)
    write_text(plan.paths.summary, json.dumps({"verdict": "done"}))
    assert old.wait(patience(30)) == 0, "it need not be told"
    old.communicate()
    assert plan.paths.tracker_status("wandb").read_text() == newer
    _, history, summary, _ = read_back(tmp_path)
    assert [row["step"] for row in history] in ([], [1, 2, 3])
    assert "verdict" not in summary
    late = mirror(tmp_path)
    late.communicate()
    assert late.returncode == 0
    assert plan.paths.tracker_status("wandb").read_text() == newer
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1, "it opens nothing"
    mirror(tmp_path, "0.1").communicate()
    assert json.loads(plan.paths.tracker_status("wandb").read_text())["delivered"] == 8


def test_disabled_leaves_no_trace(launch: Launch, tmp_path: Path) -> None:
    done = launch("train", *SMALL, *ALONE, "wandb.mode=disabled")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "runs" / "w").glob("wandb*"))
    assert "W&B           disabled" in done.stdout
