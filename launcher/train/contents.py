"""What a checkpoint holds: tensors by name, and state.json for all else."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict

from launcher.train.engine import Engine
from launcher.train.randomness import random_state

STATE = "state.json"


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


def strategy_key(engine: Engine) -> str:
    return f"strategy_rank{engine.world.rank}"


def random_key(engine: Engine) -> str:
    return f"random_rank{engine.world.rank}"
