"""PowerSGD for DDP: gradients are sent as low-rank factors; each rank adds its residue (the part not sent) to its next
gradient.

torch's hook does the arithmetic (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019). It keeps its state by
bucket, but DDP changes its bucket layout after the first window of each process. This module assigns the state to
parameters, so that it survives that, and a checkpoint can hold it.

Invariant: the sum of the gradients applied so far is the sum of those computed, minus the current residue.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from launcher.errors import SiteError
from launcher.extensions.compression.powersgd_keys import PowersgdConfig
from launcher.plan.run_plan import RunPlan
from launcher.train.measure.comm_meter import Meter


class PowerSgd:
    """Compression of DDP's buckets.

    Args:
        model: the model whose gradients the buckets hold.
        plan: with the keys of the group ``powersgd``.
        meter: records the time spent waiting.
    """

    can_sum = False  # torch's hook averages

    def __init__(self, model: nn.Module, plan: RunPlan, meter: Meter) -> None:
        keys = plan.extension(PowersgdConfig)
        try:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
        except ImportError as error:
            raise SiteError(
                f"strategy.compress=powersgd: torch's PowerSGD needs numpy: {error}.\n  pip install numpy"
            ) from None
        self._hook, self._rank, self._start = power.powerSGD_hook, keys.rank, keys.start
        self._meter = meter
        self._state = power.PowerSGDState(None, matrix_approximation_rank=keys.rank, start_powerSGD_iter=keys.start)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layout: dict[int, list[nn.Parameter]] = {}
        # state of the parameters that no bucket of torch's hook holds now
        self._residue: dict[nn.Parameter, Tensor] = {}
        self._factors: dict[nn.Parameter, Tensor] = {}
        self._items = 0.0

    def reduce(self, bucket: dist.GradBucket, averaged_over: int) -> tuple[Future[Tensor], int, int]:  # noqa: ARG002
        self._assign_state(bucket.index(), cast("list[nn.Parameter]", bucket.parameters()))
        gradients = bucket.buffer()
        compresses = self._state.iter >= self._start
        before = self._state.total_numel_after_compression
        reduced = self._hook(self._state, bucket)
        if gradients.device.type == "cpu":
            # the hook starts its second and third collective from callbacks: with another bucket in progress, gloo
            # could match them with the wrong collectives of another rank
            with self._meter.waiting():
                reduced.wait()
        numbers = self._state.total_numel_after_compression - before if compresses else gradients.numel()
        return reduced, numbers * gradients.element_size(), 3 if compresses else 1

    def before_reduction(self, items: Callable[[], float]) -> None:
        """Rescale the residue: it is part of a sum that was divided by the last window's items, and this step divides
        by this window's."""
        number = items()
        if self._items:
            for error in (*self._state.error_dict.values(), *self._residue.values()):
                error.mul_(number / self._items)
        self._items = number

    def begin_trial(self) -> None:
        """Compress from now on, regardless of the number of synchronisations so far."""
        self._state.iter = max(self._state.iter, self._start)

    def _assign_state(self, index: int, parameters: list[nn.Parameter]) -> None:
        """Give bucket ``index`` the state of ``parameters``, unless it holds exactly these already."""
        layout = self._layout.get(index)
        if layout is not None and len(layout) == len(parameters) and all(map(operator.is_, layout, parameters)):
            return
        self._release_state({index, *self._holding(parameters)})
        # if the parameters have no state yet, torch's hook creates the bucket's state itself
        self._layout[index] = parameters
        if all(parameter in self._residue for parameter in parameters):
            pieces = [self._residue.pop(parameter).flatten() for parameter in parameters]
            self._state.error_dict[index] = torch.cat(pieces)
            compressed = self._compressed(parameters)
            if all(parameter in self._factors for parameter in compressed):
                factors = [self._factors.pop(parameter) for parameter in compressed]
                like = pieces[0]
                self._state.q_memory_dict[index] = torch.cat([f.flatten() for f in factors]) if factors else like[:0]
                rows = sum(parameter.shape[0] * self._width(parameter) for parameter in compressed)
                self._state.p_memory_dict[index] = like.new_zeros(rows)

    def _holding(self, parameters: list[nn.Parameter]) -> list[int]:
        wanted = set(parameters)
        return [index for index, held in self._layout.items() if not wanted.isdisjoint(held)]

    def _release_state(self, buckets: Iterable[int]) -> None:
        """Move the state of ``buckets`` back to their parameters."""
        for index in [index for index in buckets if index in self._layout]:
            parameters = self._layout.pop(index)
            if parameters[0].device.type == "cuda":
                torch.cuda.synchronize(parameters[0].device)  # torch's hook writes the state on a stream of its own
            error = self._state.error_dict.pop(index, None)
            if error is not None:
                pieces = error.split([parameter.numel() for parameter in parameters])
                self._residue.update(zip(parameters, (piece.clone() for piece in pieces), strict=True))
            factors = self._state.q_memory_dict.pop(index, None)
            self._state.p_memory_dict.pop(index, None)
            if factors is not None:
                compressed = self._compressed(parameters)
                sizes = [parameter[0].numel() * self._width(parameter) for parameter in compressed]
                self._factors.update(zip(compressed, (f.clone() for f in factors.split(sizes)), strict=True))

    def _compressed(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the hook compresses, in its order: grouped by shape, in order of appearance."""
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.ndim > 1:
                n, m = parameter.shape[0], parameter[0].numel()
                if (n + m) * self._rank * self._state.min_compression_rate < n * m:
                    by_shape.setdefault((n, m), []).append(parameter)
        return [parameter for same in by_shape.values() for parameter in same]

    def _width(self, parameter: nn.Parameter) -> int:
        return min(parameter.shape[0], parameter[0].numel(), self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return residue and factors by the parameter's name, and the counters that they depend on."""
        self._release_state(list(self._layout))
        return {
            "synchronisations": self._state.iter,
            "items": self._items,
            "residue": {self._names[parameter]: tensor for parameter, tensor in self._residue.items()},
            "factors": {self._names[parameter]: tensor for parameter, tensor in self._factors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._release_state(list(self._layout))
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._state.iter = int(state["synchronisations"])
        self._items = float(state["items"])
        self._residue = {parameters[name]: tensor for name, tensor in state.get("residue", {}).items()}
        factors = {parameters[name]: tensor for name, tensor in state.get("factors", {}).items()}
        # factors of another powersgd.rank cannot be used: the hook then creates new ones
        self._factors = {
            parameter: tensor
            for parameter, tensor in factors.items()
            if self._compressed([parameter]) and tensor.numel() == parameter[0].numel() * self._width(parameter)
        }
