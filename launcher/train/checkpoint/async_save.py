"""Saving during training: synchronously or in a background thread, one checkpoint at a time, with handling of
failures."""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist

from launcher.config.schema import OnError
from launcher.errors import CheckpointFailed
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.rundir.fencing import Fence
from launcher.tracebacks import lost_connection
from launcher.train.checkpoint import save
from launcher.train.checkpoint.contents import Staging
from launcher.train.checkpoint.run_totals import RunTotals
from launcher.train.checkpoint.save import Snapshot
from launcher.train.engine.engine import Engine
from launcher.train.metrics import Metrics
from launcher.train.world import patience


class Saver:
    """Saver of one run's checkpoints, on every rank. All ranks call ``save`` and ``wait``; either all raise, or none.

    Args:
        parts: further engines of this process, which are saved in the same checkpoints.
        failed: set when a background save fails and the run must stop; the next ``wait`` raises its error. Passed to
            ``Engine(stop=...)``, so that all ranks stop after the same window.
    """

    def __init__(
        self,
        engine: Engine,
        totals: RunTotals,
        fence: Fence,
        failed: threading.Event,
        parts: Mapping[str, Engine] | None = None,
    ) -> None:
        self.parts = dict(parts or {})
        self._engine, self._totals, self._fence, self._failed = engine, totals, fence, failed
        self._plan = engine.plan.checkpoint
        # a group of its own: the thread's collectives must not be mixed with those of the steps in the default group
        separate = self._plan.enabled and self._plan.async_save and engine.world.size > 1
        timeout = patience(engine.plan.train.hang_timeout)
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout)) if separate else None
        self._staging = Staging(engine.device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._write_s: float | None = None
        self._last = False  # the checkpoint in progress is the run's last one

    def save(self, record: dict[str, Any], *, next_due: str | None, extra: dict[str, Any] | None = None) -> None:
        """Wait for the previous save, then start one.

        Args:
            record: metrics record of this step.
            next_due: when the next checkpoint is due, for messages; None: this is the last one, and is written before
                the call returns.
            extra: JSON data of the user's own loop; rank 0's is stored.

        Raises:
            CheckpointFailed: this save or the previous one failed, and the plan says to stop.
            Superseded: a newer attempt of the run has started.
        """
        self.wait()
        self._last = next_due is None
        run = {"account": self._totals.state_dict(), "record": record, **({} if extra is None else {"extra": extra})}
        snapshot = save.take_snapshot(self._engine, self._fence, self._totals.best.retention(), run, self.parts)
        if next_due is None or not self._plan.async_save:
            self._write(snapshot, next_due)
            self._handle_failure()
            return
        copies = self._staging.copy(
            {"": snapshot.tensors, **{name: part.tensors for name, part in snapshot.parts.items()}}
        )
        parts = {
            name: dataclasses.replace(part, tensors=copies[name], staged=True) for name, part in snapshot.parts.items()
        }
        snapshot = dataclasses.replace(snapshot, tensors=copies[""], staged=True, parts=parts)
        self._thread = threading.Thread(target=self._write_in_background, args=(snapshot, next_due), daemon=True)
        atexit.register(self.finish)  # a script of the user's may end at any point of its loop
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress. Raises the same errors as ``save``."""
        if self._thread is not None:
            self.join()
            self._thread = None
            self._handle_failure()

    def join(self) -> None:
        """Wait for the save in progress; its errors are raised by the next ``wait``."""
        if self._thread is not None and self._thread.is_alive():  # it may be called while the interpreter shuts down
            with HEARTBEAT.waiting_for(Wait.io, self._thread.ident or 0):
                self._thread.join()

    def finish(self) -> None:
        """Wait for the save in progress at the end of training; print its failure, if any."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            why = lost_connection(str(error))
            print(f"The checkpoint in progress was not written: {f'this rank {why}' if why else error}", flush=True)

    def take_metrics(self) -> Metrics:
        """Return metrics of saves completed since the last call, for the next record. Does not block."""
        metrics: Metrics = {}
        if self._thread is not None and not self._thread.is_alive() and not self._failed.is_set():
            self.wait()
        if self._write_s is not None:
            metrics["time/checkpoint_write_s"] = self._write_s
            self._write_s = None
        if self._totals.failed_saves:
            metrics["checkpoint/failed"] = self._totals.failed_saves
        return metrics

    def _write_in_background(self, snapshot: Snapshot, next_due: str) -> None:
        started = time.perf_counter()
        self._write(snapshot, next_due)
        if self._error is None:
            self._write_s = time.perf_counter() - started
            atexit.unregister(self.finish)
        elif self._ends_the_run(self._error):
            self._failed.set()

    def _write(self, snapshot: Snapshot, next_due: str | None) -> None:
        """Write the snapshot; store an error for ``_handle_failure``, and print it at once if training survives it."""
        try:
            self._totals.checkpoint = str(save.write(snapshot, self._group))
        except BaseException as error:  # an exception in a thread would be lost
            self._error = error
            if not self._ends_the_run(error) and self._engine.world.rank == 0:
                print(
                    f"{error}\n  Training continues (checkpoint.on_error=continue); the next checkpoint is due "
                    f"{next_due}.",
                    flush=True,
                )

    def _ends_the_run(self, error: BaseException) -> bool:
        if self._last:  # neither training nor another checkpoint follows
            return True
        return not isinstance(error, CheckpointFailed) or self._plan.on_error is OnError.stop

    def _handle_failure(self) -> None:
        """Count a failed save, and raise its error if it ends the run."""
        error, self._error = self._error, None
        atexit.unregister(self.finish)
        if isinstance(error, CheckpointFailed):
            self._totals.failed_saves += 1
        if error is None or not self._ends_the_run(error):
            return
        if isinstance(error, CheckpointFailed):
            raise CheckpointFailed(
                f"{error}\n  Once it can be written, resume: `launch resume {self._engine.plan.run.name}`. To let "
                "training continue after a failed save: checkpoint.on_error=continue."
            ) from None
        raise error
