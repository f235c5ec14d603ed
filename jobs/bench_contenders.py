"""Contenders of jobs/bench_peers.py: the optimizer step in this launcher's engine and in hand-written loops.

All contenders are built from the same initial values and are handed the same micro-batches. jobs/bench_libraries.py has
those in other libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset, default_collate

from launcher import Engine, make_plan
from launcher.extensions.forecast.fake_model import AllocationLog
from launcher.plan.windows import share_of_window
from launcher.tasks.bytes_gpt import BytesGPT

LEARNING_RATE, CLIP_NORM, IGNORED = 1e-3, 1.0, -100
BUCKET_MB = 1  # of DDP: the model has 7.6 MB, and several buckets are needed for overlap
ITEMS_COUNTED, MEAN_OF_EACH = "sum over the window's items", "usual mean of each micro-batch"
Batch = tuple[Tensor, Tensor]  # tokens and targets, int64 [samples, time]


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, LEARNING_RATE, fused=True)


@dataclass
class Job:
    """Model, data and batch that all contenders share."""

    task: BytesGPT
    data: TensorDataset
    accumulation: int
    micro_size: int
    bf16: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.task.model()

    def plan(self, strategy: str, sync: str) -> Any:
        options = [
            f"strategy={strategy}", f"batch.micro_size={self.micro_size}", f"batch.accumulation={self.accumulation}",
            "batch.short_window=drop", f"precision={'bf16' if self.bf16 else 'fp32'}", "cluster.device=cpu",
            "train.loader_workers=0", f"train.steps={10**6}", f"train.clip_norm={CLIP_NORM}", "train.shuffle=false",
            "schedule=constant", "schedule.warmup_steps=0", "run.calibrate_s=0",
        ]  # fmt: skip
        options += [f"strategy.sync={sync}"]
        options += [f"strategy.bucket_mb={BUCKET_MB}"] if strategy == "ddp" else []
        return make_plan(options, samples=len(self.data))

    def micro_batches(self, window: int, rank: int) -> list[Batch]:
        """Return the micro-batches of a window, the same ones that the engine reads, as torch's DataLoader collates
        them."""
        batch, samples = self.batch, len(self.data)
        first = window * batch.global_size % (samples // batch.global_size * batch.global_size)
        return [
            default_collate([self.data[first + offset] for offset in share])
            for share in share_of_window(batch.global_size, batch, rank)
        ]

    @cached_property
    def batch(self) -> Any:
        return self.plan("ddp", "boundary").batch

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()

    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()


class SentBytes(TorchDispatchMode):
    """Counter of the bytes that this rank's collectives have to send, by the lower limit of each algorithm: (W-1)/W of
    the payload for an all-gather or a reduce-scatter, twice that for an all-reduce, all of it for a send.

    Every collective of the process is dispatched as an operator, whichever library calls it.
    """

    # position of the tensors among the operator's arguments, and how many times (W-1)/W of them is sent; None: all
    PAYLOAD: ClassVar[dict[str, tuple[int, int | None]]] = {
        "allreduce_": (0, 2), "all_reduce": (0, 2), "allreduce_coalesced_": (0, 2), "send": (0, None),
        "_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1),
    }  # fmt: skip
    # nothing, or the few numbers of a broadcast of DDP's bucket layout and a gather of item counts
    SMALL = ("recv_", "barrier", "broadcast_", "allgather_", "wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in self.SMALL:
            where, factor = self.PAYLOAD[name]
            tensors = args[where] if isinstance(args[where], list) else [args[where]]
            payload, size = sum(tensor.nbytes for tensor in tensors), dist.get_world_size()
            self.bytes += payload if factor is None else factor * payload * (size - 1) // size
        return func(*args, **(kwargs or {}))


class PeakMemory(AllocationLog):
    """Log of the tensors that a window has in memory on this rank: parameters, gradients, optimizer state, activations,
    micro-batches, and buffers of collectives, whichever library holds them.

    A storage that an operator uses and none has allocated within the window was there before. Operators' own working
    memory, and that of gloo, are not tensors.

    Args:
        data: the data set, which all contenders share: it is not counted.

    Attributes:
        before: bytes of the storages that were there before the window, and that it uses.
    """

    def __init__(self, data: TensorDataset) -> None:
        super().__init__(torch.device("cpu"))
        self.add(data.tensors)
        self.events.clear()
        self.before = 0

    @property
    def peak(self) -> int:
        return self.before + max(accumulate(self.events, initial=0))

    def _first_use(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._storages:
            self._count(storage)
            if storage.size():
                self.events.pop()  # it was not allocated now
                self.before += storage.size()

    def __enter__(self) -> PeakMemory:
        super().__enter__()
        resize = torch.UntypedStorage.resize_

        def resize_known(storage: torch.UntypedStorage, size: int) -> None:
            self._first_use(storage)
            resize(storage, size)

        torch.UntypedStorage.resize_ = resize_known  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(kind is DTensor for kind in types):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._first_use(leaf.untyped_storage())
        return super().__torch_dispatch__(func, types, args, kwargs)


class Contender(ABC):
    """One way to train. ``raw`` is the plain model, whose parameters are trained in place.

    Attributes:
        loss: what the contender is given to average: this decides about unequal numbers of items.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "ddp"
    loss: ClassVar[str] = ITEMS_COUNTED
    reads_itself: ClassVar[bool] = False  # its windows are the job's, read by its own loader

    def __init__(self, job: Job) -> None:
        self.job, self.raw = job, job.model()

    def step(self, window: int, counter: AbstractContextManager[Any]) -> None:
        """Read this rank's micro-batches of a window, and take one optimizer step on them."""
        self.window([] if self.reads_itself else self.job.micro_batches(window, dist.get_rank()), counter)

    def window(self, batches: list[Batch], counter: AbstractContextManager[Any]) -> None:
        with counter:
            self.run(batches)

    @abstractmethod
    def run(self, batches: list[Batch]) -> None:
        """Take one optimizer step on a window's micro-batches."""

    def close(self) -> None:  # noqa: B027
        """Release what the next contenders could need; nothing by default."""


class LauncherDdp(Contender):
    """This project's engine. It reads its micro-batches itself, and counts and measures as in `launch train`."""

    name, reads_itself = "launcher DDP", True
    sync: ClassVar[str] = "boundary"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.engine = Engine(self.raw, adamw, job.plan(self.family, self.sync))
        self._windows = self.engine.windows(job.data)

    def run(self, batches: list[Batch]) -> None:  # noqa: ARG002
        for tokens, targets in next(self._windows):
            self.engine.backward(loss_sum(self.engine.model(tokens), targets), (targets != IGNORED).sum())
        self.engine.step()

    def close(self) -> None:
        self._windows.close()  # pyright: ignore[reportAttributeAccessIssue]


class LauncherFsdp(LauncherDdp):
    name, family, sync = "launcher FSDP2, gather_once", "fsdp", "gather_once"


class LauncherFsdpBoundary(LauncherDdp):
    """The policy that keeps no full parameters between passes: the memory of FSDP2's default mode."""

    name, family = "launcher FSDP2, boundary", "fsdp"


class HandDdp(Contender):
    name, loss = "DDP by hand", MEAN_OF_EACH

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = self.wrapped()
        self.optimizer = adamw(self.raw.parameters())

    def wrapped(self) -> Any:
        return DistributedDataParallel(self.raw, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()

    def part_of_loss(self, logits: Tensor, targets: Tensor, batches: list[Batch]) -> Tensor:
        return mean_loss(logits, targets) / len(batches)

    def run(self, batches: list[Batch]) -> None:
        for number, (tokens, targets) in enumerate(batches, 1):
            with self.accumulating(last=number == len(batches)):
                with self.job.autocast() if self.family == "ddp" else nullcontext():
                    logits = self.model(tokens)
                loss = self.part_of_loss(logits, targets, batches)
                del logits  # no backward pass needs them: they would add to the peak
                loss.backward()
        nn.utils.clip_grad_norm_(self.raw.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class HandDdpCounting(HandDdp):
    """Also counts the window's items on all ranks before the first micro-batch, as the guide of Accelerate does."""

    name, loss = "DDP by hand, counting items", ITEMS_COUNTED

    def run(self, batches: list[Batch]) -> None:
        self.items = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum()
        dist.all_reduce(self.items)
        super().run(batches)

    def part_of_loss(self, logits: Tensor, targets: Tensor, batches: list[Batch]) -> Tensor:  # noqa: ARG002
        return loss_sum(logits, targets) * (dist.get_world_size() / self.items)  # DDP averages over the ranks


class HandFsdp(HandDdp):
    name, family = "FSDP2 by hand", "fsdp"

    def wrapped(self) -> Any:
        for module in (*self.raw.blocks, self.raw):  # type: ignore[misc]
            fully_shard(module, mp_policy=self.job.policy())
        return self.raw

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return nullcontext()


class HandFsdpGathered(HandFsdp):
    """Also keeps the parameters between forward and backward: the collectives and the memory of gather_once."""

    name = "FSDP2 by hand, kept gathered"

    def wrapped(self) -> Any:
        model = super().wrapped()
        model.set_reshard_after_forward(False)
        return model


HAND_WRITTEN: list[type[Contender]] = [
    LauncherDdp, HandDdp, HandDdpCounting, LauncherFsdp, LauncherFsdpBoundary, HandFsdp, HandFsdpGathered,
]  # fmt: skip
