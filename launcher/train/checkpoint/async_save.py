"""Saving during training: synchronously or in a background thread, one checkpoint at a time, with handling of
failures."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, cast

import torch.distributed as dist

from launcher.config.schema import OnError
from launcher.errors import CheckpointFailed
from launcher.heartbeat import PULSE, Role
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import save
from launcher.train.checkpoint.contents import Staging
from launcher.train.checkpoint.run_totals import Account
from launcher.train.checkpoint.save import Snapshot
from launcher.train.engine.engine import Engine
from launcher.train.metrics import Metrics
from launcher.train.world import patience


class Saver:
    """Saver of one run's checkpoints, on every rank. All ranks call ``save`` and ``wait``; either all raise, or none.

    Args:
        trouble: set when a background save fails and the run must stop; the next ``wait`` raises its error. Passed to
            ``Engine(stop=...)``, so that all ranks stop after the same window.
    """

    def __init__(self, engine: Engine, account: Account, fence: Fence, trouble: threading.Event) -> None:
        self._engine, self._account, self._fence, self._trouble = engine, account, fence, trouble
        self._plan = engine.plan.checkpoint
        # a group of its own: the thread's collectives must not be mixed with those of the steps in the default group
        beside = self._plan.enabled and self._plan.async_save and engine.world.size > 1
        waits = patience(engine.plan.train.hang_timeout)
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=waits)) if beside else None
        self._staging = Staging(engine.device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written_s: float | None = None
        self._last = False  # the checkpoint in progress is the run's last one

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory used by copies of the tensors."""
        return self._staging.nbytes

    @property
    def under_way(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, record: dict[str, Any], *, again: str | None) -> None:
        """Wait for the previous save, then start one.

        Args:
            record: metrics record of this step.
            again: when the next checkpoint is due, for messages; None: this is the last one, and is written before the
                call returns.

        Raises:
            CheckpointFailed: this save or the previous one failed, and the plan says to stop.
            Superseded: a newer attempt of the run has started.
        """
        self.wait()
        self._last = again is None
        run = {"account": self._account.state_dict(), "record": record}
        snapshot = save.take_snapshot(self._engine, self._fence, self._plan.keep, run)
        if again is None or not self._plan.async_save:
            self._write(snapshot, again)
            self._settle()
            return
        snapshot = dataclasses.replace(snapshot, tensors=self._staging.copy(snapshot.tensors), staged=True)
        self._thread = threading.Thread(target=self._write_beside, args=(snapshot, again), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress. Raises the same errors as ``save``."""
        if self._thread is not None:
            with PULSE.doing(Role.io, self._thread.ident or 0):
                self._thread.join()
            self._thread = None
            self._settle()

    def finish(self) -> None:
        """Wait for the save in progress while another error is being raised; print its failure, if any."""
        if self._thread is not None:
            with PULSE.doing(Role.io, self._thread.ident or 0):
                self._thread.join()
            if self._error is not None:
                print(f"The checkpoint that was being written is not there: {self._error}", flush=True)

    def news(self) -> Metrics:
        """Return metrics of saves completed since the last call, for the next record. Does not block."""
        metrics: Metrics = {}
        if not self.under_way and not self._trouble.is_set():
            self.wait()
        if self._written_s is not None:
            metrics["time/checkpoint_write_s"] = self._written_s
            self._written_s = None
        if self._account.failed_saves:
            metrics["checkpoint/failed"] = self._account.failed_saves
        return metrics

    def _write_beside(self, snapshot: Snapshot, again: str) -> None:
        began = time.perf_counter()
        self._write(snapshot, again)
        if self._error is None:
            self._written_s = time.perf_counter() - began
        elif self._ends_the_run(self._error):
            self._trouble.set()

    def _write(self, snapshot: Snapshot, again: str | None) -> None:
        """Write the snapshot, and keep an error for ``_settle``; one that training survives is printed at once."""
        try:
            self._account.checkpoint = str(save.write(snapshot, self._group))
        except BaseException as error:  # an exception in a thread would be lost
            self._error = error
            if not self._ends_the_run(error) and self._engine.world.rank == 0:
                when = "there is no other one due" if again is None else f"the next one is due {again}"
                print(f"{error}\n  Training goes on (checkpoint.on_error=continue); {when}.", flush=True)

    def _ends_the_run(self, error: BaseException) -> bool:
        if self._last:  # neither training nor another checkpoint follows
            return True
        return not isinstance(error, CheckpointFailed) or self._plan.on_error is OnError.stop

    def _settle(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, CheckpointFailed):
            self._account.failed_saves += 1
        if error is None or not self._ends_the_run(error):
            return
        if isinstance(error, CheckpointFailed):
            raise CheckpointFailed(
                f"{error}\n  Make room, and `launch resume {self._engine.plan.run.name}` goes on from there; or let "
                "training go on without: checkpoint.on_error=continue."
            ) from None
        raise error
