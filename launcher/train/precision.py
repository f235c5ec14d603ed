"""Number formats: autocast around the forward pass, and loss scaling where fp16 needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from launcher.config import PrecisionKind
from launcher.errors import ConfigError
from launcher.plan import PrecisionPlan

# of what is computed and sent narrower than it is kept
DTYPES = {PrecisionKind.bf16: torch.bfloat16, PrecisionKind.fp16: torch.float16}


class Precision:
    """Parameters, gradients and optimizer state stay fp32; only the forward and backward arithmetic is narrow."""

    def __init__(self, plan: PrecisionPlan, device: torch.device) -> None:
        """Raises ConfigError where ``device`` cannot compute in the format."""
        self._device = device.type
        self._dtype = DTYPES.get(plan.kind)
        if self._dtype is not None:
            _require(plan.kind, self._dtype, device)
        fp16 = plan.kind is PrecisionKind.fp16
        self.scaler = torch.amp.GradScaler(
            self._device, init_scale=plan.init_scale, growth_interval=plan.growth_interval, enabled=fp16
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    def no_autocast(self) -> AbstractContextManager[object]:
        """Around the backward pass, which runs in the formats that the forward pass chose."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, enabled=False)

    @property
    def scales(self) -> bool:
        return self.scaler.is_enabled()

    def backward(self, loss: Tensor) -> None:
        with self.no_autocast():
            self.scaled(loss).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """As it goes into the backward pass."""
        return self.scaler.scale(loss) if self.scales else loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, and remember whether one of them overflowed."""
        if self.scales:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer) if self.scales else optimizer.step()

    def update(self) -> None:
        """Let the loss scale grow or fall. Also called when a step was skipped: that is when it falls."""
        if self.scales:
            self.scaler.update()

    def stay(self) -> None:
        """Close a window that says nothing of the loss scale: it stays, and its growth is no nearer."""
        if self.scales:
            self.scaler.update(self.scaler.get_scale())


def _require(kind: PrecisionKind, dtype: torch.dtype, device: torch.device) -> None:
    """Tried, not looked up: what a device can do depends on its generation and on how torch was built."""
    try:
        with torch.autocast(device.type, dtype):
            functional.linear(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    except RuntimeError as error:
        raise ConfigError(
            "precision", kind, f"this device ({device}) cannot compute in it: {error}",
            f"Use precision={'bf16 or fp32' if kind is PrecisionKind.fp16 else 'fp32'}.",
        ) from None  # fmt: skip
