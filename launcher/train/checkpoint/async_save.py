"""When a training run saves: at once, or beside the steps, one checkpoint at a time; and what becomes of a failure."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, cast

import torch.distributed as dist

from launcher.config.schema import OnError
from launcher.errors import CheckpointFailed
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import save
from launcher.train.checkpoint.contents import Staging
from launcher.train.checkpoint.run_totals import Account
from launcher.train.checkpoint.save import Snapshot
from launcher.train.engine.engine import Engine
from launcher.train.metrics import Metrics
from launcher.train.world import patience


class Saver:
    """Of one run, on every rank; all ranks call ``save`` and ``wait``, and there all of them raise, or none does.

    Args:
        trouble: set when a save beside the steps has ended the run: its error is raised by the next ``wait``. For
            ``Engine(stop=...)``, so that all ranks come to it together, after the window.
    """

    def __init__(self, engine: Engine, account: Account, fence: Fence, trouble: threading.Event) -> None:
        self._engine, self._account, self._fence, self._trouble = engine, account, fence, trouble
        self._plan = engine.plan.checkpoint
        # the default group's collectives are the steps': those of another thread must not come between
        beside = self._plan.enabled and self._plan.async_save and engine.world.size > 1
        waits = patience(engine.plan.train.hang_timeout)
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=waits)) if beside else None
        self._staging = Staging(engine.device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written_s: float | None = None
        self._last = False  # whether the checkpoint under way is the run's last one

    @property
    def staged_bytes(self) -> int:
        """Host memory that the copies take."""
        return self._staging.nbytes

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written beside the steps."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, record: dict[str, Any], *, again: str | None) -> None:
        """Once the save before is over. ``record``: of this very step. ``again``: when the next one is due; None: this
        is the last one, and is written before the call returns.

        Raises:
            CheckpointFailed: this one, or the one before, and the plan says to stop then.
            Superseded: a newer incarnation of the run has begun.
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
        """For the save under way. Raises as ``save``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._settle()

    def finish(self) -> None:
        """The same where another error is under way, which is the one to be raised."""
        if self._thread is not None:
            self._thread.join()
            if self._error is not None:
                print(f"The checkpoint that was being written is not there: {self._error}", flush=True)

    def news(self) -> Metrics:
        """For the next record: what has been heard since the last one. It waits for nothing."""
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
        """How it went is known to ``_settle``; a failure that training survives is said at once."""
        try:
            self._account.checkpoint = str(save.write(snapshot, self._group))
        except BaseException as error:  # of a thread, it would be lost
            self._error = error
            if not self._ends_the_run(error) and self._engine.world.rank == 0:
                when = "there is no other one due" if again is None else f"the next one is due {again}"
                print(f"{error}\n  Training goes on (checkpoint.on_error=continue); {when}.", flush=True)

    def _ends_the_run(self, error: BaseException) -> bool:
        if self._last:  # there is no training to go on, and no other one to come
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
