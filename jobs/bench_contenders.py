"""Contenders of jobs/bench_peers.py: the same optimizer step in this launcher's engine, by hand, and in other libraries.

Each one is built from the same initial values, is handed the same micro-batches, and accumulates as its own documentation
recommends; docs/explanations/peers.md links these pages. A library is imported by its own contender only.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from launcher import Engine, make_plan
from launcher.plan.windows import share_of_window
from launcher.tasks.bytes_gpt import BytesGPT

LEARNING_RATE, CLIP_NORM, IGNORED = 1e-3, 1.0, -100
BUCKET_MB = 1  # of DDP: the model has 7.6 MB, and several buckets are needed for overlap
Batch = tuple[Tensor, Tensor]  # tokens and targets, int64 [samples, time]


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, LEARNING_RATE, fused=True)


@dataclass(frozen=True)
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

    def plan(self, strategy: str) -> Any:
        options = [
            f"strategy={strategy}", f"batch.micro_size={self.micro_size}", f"batch.accumulation={self.accumulation}",
            f"precision={'bf16' if self.bf16 else 'fp32'}", "cluster.device=cpu", "train.loader_workers=0",
            f"train.steps={10**6}", f"train.clip_norm={CLIP_NORM}", "train.shuffle=false", "schedule=constant",
            "schedule.warmup_steps=0", "run.calibrate_s=0",
        ]  # fmt: skip
        options += [f"strategy.bucket_mb={BUCKET_MB}"] if strategy == "ddp" else ["strategy.sync=gather_once"]
        return make_plan(options, samples=len(self.data))

    def micro_batches(self, window: int, rank: int) -> list[Batch]:
        """Return the micro-batches of a window, the same ones that the engine reads."""
        batch = self.plan("ddp").batch
        first = window * batch.global_size % (len(self.data) // batch.global_size * batch.global_size)
        return [
            self.data[first + share.start : first + share.stop]
            for share in share_of_window(batch.global_size, batch, rank)
        ]

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in self.SMALL:
            where, factor = self.PAYLOAD[name]
            tensors = args[where] if isinstance(args[where], list) else [args[where]]
            payload, size = sum(tensor.nbytes for tensor in tensors), dist.get_world_size()
            self.bytes += payload if factor is None else factor * payload * (size - 1) // size
        return func(*args, **(kwargs or {}))


class Contender:
    """One way to train. ``raw`` is the plain model, whose parameters are trained in place."""

    name: ClassVar[str]
    family: ClassVar[str] = "ddp"

    def __init__(self, job: Job) -> None:
        self.job, self.raw = job, job.model()

    def window(self, batches: list[Batch], counter: AbstractContextManager[Any]) -> None:
        """Take one optimizer step, on this rank's micro-batches."""
        with counter:
            self.run(batches)

    def run(self, batches: list[Batch]) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class LauncherDdp(Contender):
    """This project's engine. It reads the micro-batches itself, and counts, checks and measures as in `launch train`."""

    name = "launcher DDP"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.engine = Engine(self.raw, adamw, job.plan(self.family))
        self._windows = self.engine.windows(job.data)

    def run(self, batches: list[Batch]) -> None:  # noqa: ARG002
        for tokens, targets in next(self._windows):
            self.engine.backward(loss_sum(self.engine.model(tokens), targets), (targets != IGNORED).sum())
        self.engine.step()

    def close(self) -> None:
        self._windows.close()  # pyright: ignore[reportAttributeAccessIssue]


class LauncherFsdp(LauncherDdp):
    name, family = "launcher FSDP2, gather_once", "fsdp"


class HandDdp(Contender):
    name = "DDP by hand"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = self.wrapped()
        self.optimizer = adamw(self.raw.parameters())

    def wrapped(self) -> Any:
        return DistributedDataParallel(self.raw, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()

    def run(self, batches: list[Batch]) -> None:
        for number, (tokens, targets) in enumerate(batches, 1):
            with self.accumulating(last=number == len(batches)):
                with self.job.autocast() if self.family == "ddp" else nullcontext():
                    loss = mean_loss(self.model(tokens), targets) / len(batches)
                loss.backward()
        nn.utils.clip_grad_norm_(self.raw.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


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


class _AccelerateState:
    """The state that Accelerate shares between all its objects in a process, one for each contender."""

    def __init__(self) -> None:
        self._own: list[dict[str, Any]] = [{}, {}, {}]

    @contextmanager
    def active(self) -> Iterator[None]:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        shared = [each._shared_state for each in (PartialState, AcceleratorState, GradientState)]
        for state, own in zip(shared, self._own, strict=True):
            state.clear()
            state.update(own)
        try:
            yield
        finally:
            self._own = [dict(state) for state in shared]


class AccelerateDdp(Contender):
    name = "Accelerate DDP"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._state = _AccelerateState()
        with self._state.active():
            self.accelerator = self.made(job)
            self.model, self.optimizer = self.accelerator.prepare(self.raw, adamw(self.raw.parameters()))

    def made(self, job: Job) -> Any:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        ddp = DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
        return Accelerator(
            cpu=True, gradient_accumulation_steps=job.accumulation, kwargs_handlers=[ddp],
            mixed_precision="bf16" if job.bf16 else "no",
        )  # fmt: skip

    def run(self, batches: list[Batch]) -> None:
        with self._state.active():
            for tokens, targets in batches:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(mean_loss(self.model(tokens), targets))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
                    self.optimizer.step()
                    self.optimizer.zero_grad()


class AccelerateFsdp(AccelerateDdp):
    name, family = "Accelerate FSDP2", "fsdp"

    def made(self, job: Job) -> Any:
        from accelerate import DistributedType, FullyShardedDataParallelPlugin
        from accelerate.state import PartialState

        accelerator = super().made(job)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False, mixed_precision_policy=job.policy(), state_dict_type="SHARDED_STATE_DICT",
        )  # fmt: skip
        # Accelerate chooses FSDP on GPUs only; what it then does runs on CPUs as well
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        return accelerator


class FabricDdp(Contender):
    name = "Lightning Fabric DDP"

    def __init__(self, job: Job) -> None:
        from lightning_fabric import Fabric

        super().__init__(job)
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        self.fabric = Fabric(
            accelerator="cpu", devices=local, num_nodes=dist.get_world_size() // local, strategy=self.strategy(),
            precision="bf16-mixed" if job.bf16 else "32-true",
        )  # fmt: skip
        self.fabric.launch()
        self.model = self.fabric.setup(self.raw)
        self.optimizer = self.fabric.setup_optimizers(adamw(self.model.parameters()))

    def strategy(self) -> Any:
        from lightning_fabric.strategies import DDPStrategy

        return DDPStrategy(bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)

    def run(self, batches: list[Batch]) -> None:
        for number, (tokens, targets) in enumerate(batches, 1):
            with self.fabric.no_backward_sync(self.model, enabled=number < len(batches)):
                self.fabric.backward(mean_loss(self.model(tokens), targets) / len(batches))
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class FabricFsdp(FabricDdp):
    name, family = "Lightning Fabric FSDP2", "fsdp"

    def strategy(self) -> Any:
        from lightning_fabric.strategies import ModelParallelStrategy

        def shard(model: Any, mesh: Any) -> Any:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh["data_parallel"])
            return model

        return ModelParallelStrategy(shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


class TrainerDdp(Contender):
    """transformers' Trainer owns its loop: it runs in a thread, which a callback pauses after each optimizer step."""

    name = "transformers Trainer, DDP"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._state, self._turn, self._paused = _AccelerateState(), threading.Semaphore(0), threading.Semaphore(0)
        self._batches: list[Batch] = []
        self._counting, self._closing = ExitStack(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._counter: AbstractContextManager[Any] = nullcontext()
        with self._state.active():
            self.trainer = self._trainer()
            self._thread.start()
            self._wait()

    def _trainer(self) -> Any:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        peer, job = self, self.job

        class Handed(IterableDataset[dict[str, Tensor]]):
            def __iter__(self) -> Iterator[dict[str, Tensor]]:
                while True:
                    for tokens, targets in peer._batches:
                        yield {"tokens": tokens, "labels": targets}

        class Turns(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
                peer._pause()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
                peer._pause()
                control.should_training_stop = peer._closing

        class OnHanded(Trainer):
            def get_train_dataloader(self) -> DataLoader[Any]:
                return DataLoader(Handed(), batch_size=None)

        def loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
            return loss_sum(logits, labels) / num_items_in_batch

        arguments = TrainingArguments(
            tempfile.gettempdir(), use_cpu=True, bf16=job.bf16, ddp_backend="gloo", max_steps=10**6,
            per_device_train_batch_size=job.micro_size, gradient_accumulation_steps=job.accumulation,
            max_grad_norm=CLIP_NORM, ddp_bucket_cap_mb=BUCKET_MB, ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        optimizer = adamw(self.raw.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = OnHanded(
            self.raw, arguments, train_dataset=Handed(), callbacks=[Turns()], optimizers=(optimizer, schedule),
            compute_loss_func=loss,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _train(self) -> None:
        torch.set_num_threads(1)
        try:
            self.trainer.train()
        except BaseException as error:  # raised again by the turn that waits for this thread
            self._error = error
        self._paused.release()

    def _pause(self) -> None:
        self._counting.close()
        self._paused.release()
        self._turn.acquire()
        self._counting.enter_context(self._counter)

    def _wait(self) -> None:
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def window(self, batches: list[Batch], counter: AbstractContextManager[Any]) -> None:
        self._batches, self._counter = batches, counter  # the counter is active in the thread of the Trainer
        with self._state.active():
            self._turn.release()
            self._wait()

    def close(self) -> None:
        self._closing = True
        self.window([], nullcontext())
        self._thread.join()


class TorchTitan(Contender):
    """torchtitan's ``Trainer.train_step`` and ``apply_fsdp_to_decoder``. Its constructor builds models of its own for
    GPUs: what the step needs is set here instead."""

    name, family = "torchtitan", "fsdp"

    def __init__(self, job: Job) -> None:
        # its expert-parallel kernels import Triton, which a CPU build of torch does not have; nothing here uses them
        kernels = "torchtitan.distributed.minimal_async_ep.kernels"
        sys.modules.setdefault(kernels, _Absent(kernels))
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.config.configs import ParallelismConfig
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
        from torchtitan.trainer import Trainer

        super().__init__(job)
        parallel_dims.device_type = "cpu"
        dims = ParallelDims.from_config(ParallelismConfig(spmd_backend="partial_dtensor"), dist.get_world_size())
        dims.build_mesh()
        raw: Any = self.raw
        # its names of a decoder's parts, beside the model's own; as plain attributes they are no further submodules
        raw.__dict__ |= {
            "tok_embeddings": raw.bytes, "lm_head": raw.head, "layers": dict(enumerate(raw.blocks)),
            "enable_weight_tying": False,
        }  # fmt: skip
        dtype = torch.bfloat16 if job.bf16 else torch.float32
        apply_fsdp_to_decoder(raw, dims.get_mesh("fsdp"), dtype, torch.float32, pp_enabled=False)
        for module in (*raw.blocks, raw.bytes, raw.norm, raw):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with torchtitan's factor of 1
        self.trainer = Trainer.__new__(Trainer)
        vars(self.trainer).update(
            parallel_dims=dims, model_parts=[raw], model_config=None, optimizers=adamw(raw.parameters()),
            loss_fn=CrossEntropyLoss(CrossEntropyLoss.Config()), device=torch.device("cpu"), step=1, ntokens_seen=0,
            gradient_accumulation_steps=job.accumulation, num_pipeline_parallel_microbatches=1,
            train_context=nullcontext, fwd_bwd_fn=self.trainer._forward_backward_body,
            lr_schedulers=SimpleNamespace(get_metrics=dict, step=lambda: None),
            metrics_processor=SimpleNamespace(should_log=lambda _: False),
            checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
            config=SimpleNamespace(
                training=SimpleNamespace(disable_cuda_graphs=True, max_norm=CLIP_NORM),
                parallelism=SimpleNamespace(spmd_backend="partial_dtensor"),
            ),
        )  # fmt: skip

    def run(self, batches: list[Batch]) -> None:
        self.trainer.train_step(({"input": tokens}, targets) for tokens, targets in batches)


class _Absent(ModuleType):
    """Module of names that nothing uses."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


HAND_WRITTEN: list[type[Contender]] = [LauncherDdp, HandDdp, LauncherFsdp, HandFsdp, HandFsdpGathered]
LIBRARIES: list[type[Contender]] = [AccelerateDdp, FabricDdp, TrainerDdp, AccelerateFsdp, FabricFsdp, TorchTitan]
