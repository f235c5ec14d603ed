"""Check that replicas are equal bit by bit: parameters, learning rates, frozen parameters, state of callbacks.

DDP and HSDP update each replica by itself, from the same gradients. A callback, a loss or a loop that changes
parameters on one rank, or with random numbers of its own, makes them different models, of which a checkpoint would
store a mixture. Buffers are not compared: training gives all ranks those of rank 0
(launcher/train/parallel/replicas.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.errors import CallbackFailed, ReplicasDiffer
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.quantities import count, first_names
from launcher.train.callback_set import called
from launcher.train.engine.engine import Engine
from launcher.train.optimizers import members_of
from launcher.train.parallel.lost_writes import limited_norms
from launcher.train.parallel.replicas import BITS, checksum

_NOTHING = -(1 << 62)  # below each checksum and each negative of one


class ReplicaCheck:
    """Comparison of an engine's replicas. All ranks call it together, between two windows.

    Parameters are compared between the ranks that hold the same part of the model: DDP: all; HSDP: those with the same
    shard; FSDP: none. Everything else is compared between all ranks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._world = engine, engine.world
        # ranks are numbered shard group by shard group, see mesh_of in launcher/train/parallel/fsdp.py
        self._shards = engine.plan.strategy.shard_size
        self._names = [name for name, _ in engine.model.named_parameters()]
        self._stateful = engine.callbacks.stateful

    def require_same(self, *, callbacks: bool = False) -> None:
        """Compare the ranks, in one small all-reduce.

        Args:
            callbacks: compare the state of callbacks, too, before it is saved.

        Raises:
            CallbackFailed: the state of a callback differs. On all ranks.
            ReplicasDiffer: parameters or settings differ. On all ranks.
        """
        if self._world.size == 1:
            return
        settings, states = self._settings(), self._states() if callbacks else {}
        # a sum of 0 for a parameter that is gone: all ranks must send as many numbers
        parameters = dict(self._engine.model.named_parameters()) if self._shards < self._world.size else {}
        own = [checksum(parameters[name]) if name in parameters else torch.zeros((), dtype=torch.int64)
               for name in self._names]  # fmt: skip
        device = self._engine.device
        sums = torch.stack([each.to(device) for each in own]) if own else torch.zeros(0, dtype=torch.int64).to(device)
        digests = torch.tensor([_digest(settings), *(_digest(state) for state in states.values())], device=device)
        with HEARTBEAT.waiting_for(Wait.collective):
            differing = self._differing(sums, digests)
        if not differing:
            return
        everyone = self._world.of_all((settings, sums.tolist(), states, self._engine.callbacks.changes))
        difference = self._different_setting([each[0] for each in everyone])
        difference = difference or self._different_parameters([each[1] for each in everyone])
        if difference is not None:
            raise self._error(difference, [each[3] for each in everyone])
        self._explain_states([each[2] for each in everyone])

    def _differing(self, sums: Tensor, digests: Tensor) -> bool:
        """Return whether a checksum or a digest differs between ranks that must share it."""
        table = torch.full((self._shards, len(sums)), _NOTHING, device=sums.device)
        negative = table.clone()
        shard = self._world.rank % self._shards
        table[shard], negative[shard] = sums, -sums
        together = torch.cat([table.flatten(), digests, negative.flatten(), -digests])
        dist.all_reduce(together, dist.ReduceOp.MAX)
        most, least = together.view(2, -1)
        return bool((most + least).any().item())

    def _settings(self) -> dict[str, Any]:
        """Return what all ranks share beside tensors, by a name for messages."""
        engine = self._engine
        settings: dict[str, Any] = {}
        for number, group in enumerate(engine.optimizer.param_groups):
            numbers = {name: _number(value) for name, value in group.items() if name != "params"}
            of_group = {f"{name} of the optimizer's group {number}": value for name, value in numbers.items()}
            settings |= {name: value for name, value in of_group.items() if value is not None}
        frozen = engine.parallel.frozen
        settings["what is frozen"] = [name for name, p in engine.model.named_parameters() if p in frozen]
        settings["the number of steps of the schedule"] = _number(getattr(engine.schedule, "last_epoch", None))
        if engine.precision.scales:
            settings["the loss scale"] = engine.precision.scaler.get_scale()
        return settings

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each callback that has one, by key: values, and checksums of tensors that all ranks hold
        in full."""
        tensors, values = self._engine.callbacks.state_dict() if self._stateful else ({}, {})
        states = {name: _flat(values.get(name, {})) for name in self._stateful}
        for path, tensor in tensors.items():
            name, _, key = path.partition("/")
            if not isinstance(tensor, DTensor):
                states[name][key] = tuple(tensor.shape), str(tensor.dtype), checksum(tensor).item()
        return states

    def _different_setting(self, everyone: Sequence[Mapping[str, Any]]) -> str | None:
        for name in dict.fromkeys(name for each in everyone for name in each):
            values = [each.get(name) for each in everyone]
            if any(value != values[0] for value in values):
                rank = next(rank for rank, value in enumerate(values) if value != values[0])
                return f"{name} differs: {_shown(values[0])} on rank 0, {_shown(values[rank])} on rank {rank}"
        return None

    def _different_parameters(self, everyone: Sequence[Sequence[int]]) -> str | None:
        ranks, names = set[int](), list[str]()
        for name, *sums in zip(self._names, *everyone, strict=True):
            others = [rank for rank, value in enumerate(sums) if value != sums[rank % self._shards]]
            ranks.update(others)
            names += [name] * bool(others)
        if not names:
            return None
        first = "rank 0" if self._shards == 1 else "the first replica"
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {first_names(list(map(str, sorted(ranks))), 8)}"
        of = count(len(self._names), "parameter")
        return f"{len(names)} of {of} on {who} differ from those of {first}: {first_names(names)}"

    def _explain_states(self, everyone: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        for name, here in everyone[0].items():
            for rank, there in enumerate(each[name] for each in everyone):
                keys = [key for key in dict.fromkeys((*here, *there)) if here.get(key) != there.get(key)]
                if keys:
                    raise CallbackFailed(
                        f"The state of {called(name)} differs between ranks 0 and {rank}: {first_names(keys)}.\n"
                        "  A checkpoint stores one state for all ranks. Let state_dict() return the same on each: "
                        "keep what this rank alone has\n  seen out of it, or share rank 0's: "
                        "engine.world.of_rank_0(value)."
                    )

    def _error(self, difference: str, changes: Sequence[Mapping[str, Sequence[str]]]) -> ReplicasDiffer:
        """Return the error. ``changes``: of each rank, the callbacks that have changed something, with the methods."""
        by_callback: dict[tuple[str, str], list[int]] = {}
        for rank, own in enumerate(changes):
            for name, events in own.items():
                by_callback.setdefault((name, ", ".join(events)), []).append(rank)
        changed: list[str] = []
        for (name, events), ranks in by_callback.items():
            on = "" if len(ranks) == self._world.size else f" on rank {first_names([*map(str, ranks)])}"
            changed.append(f"{name} ({events}{on})")
        own = difference.partition(" of the optimizer's group")
        if own[1] and own[0] not in ("lr", "initial_lr"):
            classes = first_names([type(each).__name__ for each in members_of(self._engine.optimizer)])
            cause = f"The step of {classes} may set {own[0]} from what each rank has alone: use another optimizer then."
        elif changed:
            cause = f"Callbacks that have changed parameters, learning rates or what is frozen: {'; '.join(changed)}."
        else:
            model = self._engine.model
            names = [name for name, _ in model.named_parameters() if name in difference]
            callbacks = self._engine.callbacks.names
            places = f"the callbacks ({first_names(callbacks)}), the loss" if callbacks else "the loss"
            cause = (
                f"The optimizer does not do that: look for code in {places} or your loop that changes them.\n"
                f"  What a forward pass or a loss writes to a parameter{limited_norms(model, names)} depends on its "
                "rank's samples: write it in a\n  callback's on_step instead, the whole parameter, alike on all ranks."
            )
        return ReplicasDiffer(
            f"After step {self._engine.steps} the ranks have different models: {difference}.\n"
            f"  {cause}\n"
            "  Parameters, learning rates and what is frozen must change alike on all ranks: not on one rank only, and "
            "with random\n  numbers from a generator that has the same seed on all of them. Nothing of this step was "
            "saved."
        )


def _number(value: object) -> Any:
    """Return a number, or a list of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        numbers = [_number(each) for each in cast("Sequence[object]", value)]
        return None if None in numbers else numbers
    return value if isinstance(value, int | float) else None


def _shown(value: object) -> str:
    if isinstance(value, list):
        return first_names([str(each) for each in cast("list[object]", value)]) or "nothing"
    return "missing" if value is None else str(value)


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by path, each as a text: 1 and True differ then, and nan equals itself."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(cast("Mapping[str, Any]", value), f"{above}{key}/")
        else:
            found[f"{above}{key}"] = repr(value)
    return found


def _digest(values: Mapping[str, Any]) -> int:
    text = repr(sorted(values.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & BITS
