"""Result of `launch drill` in the terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from launcher.extensions.drill.drill_command import drill_parts
from launcher.extensions.drill.verdict import Difference, DrillOutcome, DrillResult, InterruptedRun, Interruption
from tests.helpers import shown


def test_the_drill() -> None:
    same = Difference(tensors=9)
    other = dataclasses.replace(same, differing=2, first="model.w", absolute=1e-3, relative=0.5, norm=0.25)
    drilled = DrillResult(
        job={"task": "a.Task"}, changed=(), windows=32, every=8, cold_start_s=4.0, run_s=6.5, rerun_difference=same,
        outcome=DrillOutcome.damaged, reason="not the undisturbed run",
        interrupted=(
            InterruptedRun(kind=Interruption.preempt, what="SIGUSR2", at_step=23, from_step=23, saving_s=0.5,
                        recovery_s=5.0, difference=same),
            InterruptedRun(kind=Interruption.worker, what="SIGKILL to rank 1", at_step=18, from_step=16, recovery_s=4.0,
                        difference=other),
            InterruptedRun(kind=Interruption.tree, what="SIGKILL", problem="exit status 1", left=("process 7",)),
        ),
    )  # fmt: skip
    text = "\n".join(shown(part) for part in drill_parts(drilled, Path("/nowhere/drill")))
    assert text == (
        "Drill\n"
        "task        a.Task\n"
        "each run    32 windows, saved every 8; undisturbed 6.5 s\n"
        "cold start  4.0 s from the start to the first step\n"
        "files       /nowhere/drill\n"
        "\n"
        "interruption   at step  resumed after  repeated  recovery  of a cold start  result\n"
        "preempt             23             23         0     5.0 s            1.25x  bit-identical\n"
        "kill a worker       18             16         2     4.0 s            1.00x  differs\n"
        "kill the tree                                                               did not recover\n"
        "preempt: SIGUSR2; it saved and ended 0.5 s later.\n"
        "kill a worker: SIGKILL to rank 1.\n"
        "  2 of 9 tensors differ, the first is model.w: at most by 1.0e-03, 5.0e-01 of the tensor; parameters by "
        "2.5e-01 in norm\n"
        "kill the tree: SIGKILL.\n"
        "  exit status 1\n"
        "  left behind: process 7\n"
        "undisturbed run repeated: bit-identical\n"
        "\n"
        "This job does not survive. not the undisturbed run"
    )
