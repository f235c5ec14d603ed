"""precision=auto where the workers run: one format on all ranks, kept for the run; and what an emulated one costs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from launcher.config.schema import PrecisionKind
from launcher.errors import ConfigError
from launcher.train.precision import is_native, resolve_precision
from launcher.train.world import World
from tests.conftest import Launch
from tests.helpers import make_plan, torchrun
from tests.infra.runs import OWN, PROJECT, summary

CPU = torch.device("cpu")
# a CPU without arithmetic units for bf16 and fp16, as far as oneDNN is concerned
OLD_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.slow
def test_ranks_agree_and_later_starts_keep_it(tmp_path: Path) -> None:
    printed = torchrun(Path(__file__).parent / "number_formats_worker.py", [str(tmp_path)], 2, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    native, emulated = "auto: every worker's device computes bf16 natively", "auto: the device of rank 1 emulates bf16"
    assert ranks[0] == {
        "all native": ["bf16", native, "bf16", native],
        "one emulates": ["fp32", emulated, "fp32", emulated],
        "without a record": ["bf16", native, "auto", ""],
        "joined": ["bf16", "auto: decided earlier", "bf16", "auto: decided earlier"],
        "explicit": ["fp16", "", "fp16", ""],
        "fp32": ["fp32", "", "fp32", ""],
        "own loop": ["fp32", "torch.float32"],
    }
    cases = dict(case.split("\n", 1) for case in printed.split("case ")[1:])
    warned = {name for name, text in cases.items() if "Warning: precision=" in text}
    assert warned == {"joined", "explicit"}
    assert "precision=bf16: this device (cpu) emulates it" in cases["joined"]
    assert "precision=fp16: this device of rank 1 (cpu) emulates it" in cases["explicit"]


def test_formats_of_this_cpu() -> None:
    assert is_native(PrecisionKind.fp32, CPU)
    onednn = torch.ops.mkldnn
    assert is_native(PrecisionKind.bf16, CPU) <= onednn._is_mkldnn_bf16_supported()


def test_workers_without_float8_units_refuse_it() -> None:
    """The workers check the device if only they know it, as on Slurm."""
    plan, alone = make_plan("precision=float8", "float8.emulate=true"), World(rank=0, size=1, local_rank=0)
    assert resolve_precision(plan, alone, CPU) == plan
    plan = dataclasses.replace(plan, added={})
    with pytest.raises(ConfigError, match="precision=float8: the device of rank 0 has no float8 units"):
        resolve_precision(plan, alone, CPU)


@pytest.mark.slow
def test_a_run_keeps_its_precision_on_another_machine(launch: Launch, tmp_path: Path) -> None:
    """Begun on a CPU without bf16, which the default becomes fp32 for; resumed on this one. And the other way round, as
    far as an explicit format goes: it is kept, with a warning."""
    run = tmp_path / "runs" / "kept"
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    common = [*OWN, "precision=auto"]
    done = launch("train", *common, "train.steps=2", "run.name=kept", env=OLD_CPU)
    assert done.returncode == 0, done.stderr
    assert "precision     fp32 (auto: this machine emulates bf16)" in done.stdout
    assert summary(run)["precision"] == "fp32"
    again = launch("resume", "kept", "train.steps=4")
    assert again.returncode == 0, again.stderr
    assert "precision     fp32 (auto: this machine emulates bf16)" in again.stdout
    assert summary(run)["precision"] == "fp32"
    assert json.loads(launch("status", "kept", "--json").stdout)["precision"] == "fp32"

    narrow = launch("resume", "kept", "train.steps=5", "precision=bf16", env=OLD_CPU)
    assert narrow.returncode == 0, narrow.stderr
    assert re.search(r"note +precision=bf16: this machine emulates it", narrow.stdout)
    assert "Warning: precision=bf16: this device (cpu) emulates it" in narrow.stdout
    assert summary(run)["precision"] == "bf16"
