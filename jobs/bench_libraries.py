"""Contenders of jobs/bench_peers.py: the same optimizer step in other libraries.

A library is imported by its own contender only, and accumulates as its own documentation shows it first:
docs/explanations/peers.md links these pages. With Accelerate and Fabric that is a mean of each micro-batch; the guide
of Accelerate also has a loop that counts items.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_contenders import BUCKET_MB, CLIP_NORM, MEAN_OF_EACH, Batch, Contender, Job, adamw, loss_sum, mean_loss
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset


class AccelerateState:
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


def select_fsdp(accelerator: Any, plugin: Any) -> None:
    """Set Accelerate's state to FSDP2: it chooses FSDP on GPUs only, and what it then does runs on CPUs as well."""
    from accelerate import DistributedType
    from accelerate.state import PartialState

    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


class AccelerateDdp(Contender):
    name, loss = "Accelerate DDP", MEAN_OF_EACH

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._state = AccelerateState()
        with self._state.active():
            self.accelerator = self.make_accelerator(job)
            self.model, self.optimizer = self.accelerator.prepare(self.raw, adamw(self.raw.parameters()))

    def make_accelerator(self, job: Job) -> Any:
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
    name, family, reshards = "Accelerate FSDP2", "fsdp", True

    def make_accelerator(self, job: Job) -> Any:
        from accelerate import FullyShardedDataParallelPlugin

        accelerator = super().make_accelerator(job)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False, mixed_precision_policy=job.policy(), state_dict_type="SHARDED_STATE_DICT",
            reshard_after_forward=self.reshards,
        )  # fmt: skip
        select_fsdp(accelerator, plugin)
        return accelerator


class AccelerateFsdpGathered(AccelerateFsdp):
    name, reshards = "Accelerate FSDP2, kept gathered", False


class FabricDdp(Contender):
    name, loss = "Lightning Fabric DDP", MEAN_OF_EACH

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
    name, family, reshards = "Lightning Fabric FSDP2", "fsdp", True

    def strategy(self) -> Any:
        from lightning_fabric.strategies import ModelParallelStrategy

        def shard(model: Any, mesh: Any) -> Any:
            for module in (*model.blocks, model):
                # None is torch's default: the root, whose backward pass starts at once, stays gathered
                fully_shard(module, mesh=mesh["data_parallel"], reshard_after_forward=None if self.reshards else False)
            return model

        return ModelParallelStrategy(shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


class FabricFsdpGathered(FabricFsdp):
    name, reshards = "Lightning Fabric FSDP2, kept gathered", False


class TrainerDdp(Contender):
    """transformers' Trainer owns its loop: it runs in a thread, which a callback pauses after each optimizer step."""

    name = "transformers Trainer, DDP"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._state, self._turn, self._paused = AccelerateState(), threading.Semaphore(0), threading.Semaphore(0)
        self._batches: list[Batch] = []
        self._counting, self._closing = ExitStack(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._counter: AbstractContextManager[Any] = nullcontext()
        # with FSDP, it sets variables that would select FSDP for the next contender, too
        with self._state.active(), mock.patch.dict(os.environ):
            self.trainer = self._trainer()
            self._thread.start()
            self._wait()

    def _trainer(self) -> Any:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        peer, job = self, self.job

        class GivenBatches(IterableDataset[dict[str, Tensor]]):
            def __iter__(self) -> Iterator[dict[str, Tensor]]:
                while True:
                    for tokens, targets in peer._batches:
                        yield {"tokens": tokens, "labels": targets}

        class PauseAfterStep(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
                peer._pause()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
                peer._pause()
                control.should_training_stop = peer._closing

        class TrainerOfGivenBatches(Trainer):
            def get_train_dataloader(self) -> DataLoader[Any]:
                return DataLoader(GivenBatches(), batch_size=None)

            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                peer.select_strategy(self)

            def create_optimizer(self, model: Any = None) -> Any:  # noqa: ARG002
                self.optimizer = adamw(peer.raw.parameters())
                return self.optimizer

        def loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
            return loss_sum(logits, labels) / num_items_in_batch

        arguments = TrainingArguments(
            tempfile.gettempdir(), use_cpu=True, bf16=job.bf16, ddp_backend="gloo", max_steps=10**6,
            per_device_train_batch_size=job.micro_size, gradient_accumulation_steps=job.accumulation,
            max_grad_norm=CLIP_NORM, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no",
            report_to="none", disable_tqdm=True, **self.strategy(),
        )  # fmt: skip
        trainer = TrainerOfGivenBatches(
            self.raw, arguments, train_dataset=GivenBatches(), callbacks=[PauseAfterStep()], compute_loss_func=loss
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def strategy(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that choose how it synchronises."""
        return {"ddp_bucket_cap_mb": BUCKET_MB, "ddp_find_unused_parameters": False}

    def select_strategy(self, trainer: Any) -> None:
        """Correct what the Trainer has derived from these arguments; nothing for DDP."""

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
        self._counter = counter  # active in the thread of the Trainer
        self.run(batches)

    def run(self, batches: list[Batch]) -> None:
        self._batches = batches
        with self._state.active():
            self._turn.release()
            self._wait()

    def close(self) -> None:
        self._closing = True
        self.window([], nullcontext())
        self._thread.join()


class TrainerFsdp(TrainerDdp):
    name, family, reshards = "transformers Trainer, FSDP2", "fsdp", True

    def strategy(self) -> dict[str, Any]:
        config = {
            "version": 2, "transformer_layer_cls_to_wrap": ["Block"], "reshard_after_forward": self.reshards,
            "state_dict_type": "SHARDED_STATE_DICT",
        }  # fmt: skip
        return {"fsdp": True, "fsdp_config": config}

    def select_strategy(self, trainer: Any) -> None:
        from accelerate import FullyShardedDataParallelPlugin

        arguments = trainer.args.fsdp_plugin_args
        plugin = FullyShardedDataParallelPlugin(**arguments, mixed_precision_policy=self.job.policy())
        select_fsdp(trainer.accelerator, plugin)
        trainer.is_fsdp_enabled = True


class TrainerFsdpGathered(TrainerFsdp):
    name, reshards = "transformers Trainer, FSDP2, kept gathered", False


class TorchTitan(Contender):
    """torchtitan's ``Trainer.train_step`` and ``apply_fsdp_to_decoder``. Its constructor builds models of its own for
    GPUs: what the step needs is set here instead."""

    name, family, reshards = "torchtitan", "fsdp", "default"

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
        apply_fsdp_to_decoder(
            raw, dims.get_mesh("fsdp"), dtype, torch.float32, pp_enabled=False,
            reshard_after_forward_policy=self.reshards,
        )  # fmt: skip
        for module in (*raw.blocks, raw.bytes, raw.norm, raw):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other one with a factor of 1
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


class TorchTitanGathered(TorchTitan):
    name, reshards = "torchtitan, kept gathered", "never"


class _Absent(ModuleType):
    """Module of names that nothing uses."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


LIBRARIES: list[type[Contender]] = [
    AccelerateDdp, FabricDdp, TrainerDdp, AccelerateFsdp, AccelerateFsdpGathered, FabricFsdp, FabricFsdpGathered,
    TrainerFsdp, TrainerFsdpGathered, TorchTitan, TorchTitanGathered,
]  # fmt: skip
