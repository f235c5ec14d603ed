"""What a checkpoint holds: tensors by name, and state.json for all else."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from launcher.paths import STATE as STATE
from launcher.plan import RunPlan
from launcher.train import manifest
from launcher.train.engine import Engine
from launcher.train.randomness import random_state


def tensors(engine: Engine, changing_buffers: list[str]) -> dict[str, Any]:
    """By name. ``changing_buffers``: those that training was seen to change."""
    model, optimizer = get_state_dict(engine.parallel.module, engine.optimizer)
    buffers = dict(engine.parallel.module.named_buffers())
    return {
        "model": model,
        "optimizer": optimizer,
        # those that the model itself leaves out (persistent=False), and that training changes
        "buffers": {name: buffers[name] for name in changing_buffers if name not in model},
        random_key(engine): random_state(engine.device),
        strategy_key(engine): engine.parallel.state_dict(),
    }


def origin(plan: RunPlan) -> dict[str, Any]:
    """Of which run a checkpoint is, and what of its plan decides whether another one can go on from it, as JSON has it.

    ``global_size``, ``micro_size``, ``samples`` (of an epoch; None: a stream), ``ramp`` ([windows, samples] a stage):
    in samples; ``accumulation``: micro-batches; ``steps``: optimizer steps, None for epochs over a stream, and
    ``epochs``: None where steps were given.
    """
    return {
        "format": manifest.FORMAT,
        "run_id": plan.run.id,  # W&B's too
        "launcher_version": plan.run.version,
        "torch_version": torch.__version__,
        "world_size": plan.batch.world_size,
        "strategy": plan.strategy.kind.value,
        "shard_size": plan.strategy.shard_size,
        "global_size": plan.batch.global_size,
        "ramp": [[stage.windows, stage.global_size] for stage in plan.batch.ramp],
        "micro_size": plan.batch.micro_size,
        "accumulation": plan.batch.accumulation,
        "seed": plan.train.seed,
        "steps": plan.train.steps,
        "epochs": plan.train.epochs,
        "task_target": plan.task.target,
        "task_params": plan.task.params,
        "samples": plan.task.samples,
        "short_window": plan.epoch.short_window_policy.value,
        "optimizer": plan.optimizer.kind.value,
        "precision": plan.precision.kind.value,
        "compress": plan.strategy.compress.value,
    }


def strategy_key(engine: Engine) -> str:
    return f"strategy_rank{engine.world.rank}"


def random_key(engine: Engine) -> str:
    return f"random_rank{engine.world.rank}"
