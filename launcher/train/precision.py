"""Number formats: autocast around the forward pass, and loss scaling where fp16 needs it."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from launcher.config import PrecisionKind
from launcher.errors import ConfigError
from launcher.plan import PrecisionPlan

# of what is computed and sent narrower than it is kept
DTYPES = {PrecisionKind.bf16: torch.bfloat16, PrecisionKind.fp16: torch.float16}


# formats in which parameters do not add up small updates
NARROW_DTYPES = (torch.bfloat16, torch.float16)


def parameters_to_fp32(model: nn.Module, *, frozen: bool, optimizer: Optimizer | None = None) -> int:
    """Turn trained parameters in bf16 or fp16 into fp32, in place, and return how many numbers that were.

    Accumulated gradients and the optimizer's state have the format of their parameter. Frozen parameters have neither,
    and keep their memory. Buffers become fp32 too, except in modules whose own parameters stay narrow.

    Args:
        frozen: also frozen parameters: without autocast, all operands must be of one format.
        optimizer: over the model's parameters; its state becomes fp32 with them.
    """
    wide = {id(p): p for p in model.parameters() if p.dtype in NARROW_DTYPES and (p.requires_grad or frozen)}
    if not wide:
        return 0
    buffers = [
        buffer
        for module in model.modules()
        if all(p.dtype not in NARROW_DTYPES or id(p) in wide for p in module.parameters(recurse=False))
        for buffer in module.buffers(recurse=False)
        if buffer.dtype in NARROW_DTYPES
    ]
    changed = wide.keys() | {id(buffer) for buffer in buffers}
    model._apply(lambda tensor: tensor.float() if id(tensor) in changed else tensor)
    for parameter, state in () if optimizer is None else optimizer.state.items():
        if id(parameter) in wide:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in NARROW_DTYPES:
                    state[name] = value.float()
    return sum(p.numel() for p in wide.values() if p.requires_grad)


def set_tf32(allowed: bool) -> None:
    """Let fp32 matrix products and convolutions on a GPU use TF32, or forbid it to both.

    torch's default forbids it to products and allows it to convolutions. Both of torch's interfaces are set: it refuses
    to read the older one, as torch.compile does, where only the newer one was.
    """
    precision = "tf32" if allowed else "ieee"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch warn of the older interface
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    cudnn: Any = torch.backends.cudnn
    for operations in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
        operations.fp32_precision = precision


class Precision:
    """The arithmetic of forward and backward passes: autocast, loss scaling, and TF32 on or off for the process."""

    def __init__(self, plan: PrecisionPlan, device: torch.device, gradients_on: torch.device | None = None) -> None:
        """Make the formats of ``plan`` available on ``device``.

        Args:
            gradients_on: the device that holds the gradients; default: ``device``.

        Raises:
            ConfigError: ``device`` cannot compute in the format.
        """
        set_tf32(plan.tf32)
        self._device = device.type
        self._dtype = DTYPES.get(plan.kind)
        if self._dtype is not None:
            _require(plan.kind, self._dtype, device)
        fp16 = plan.kind is PrecisionKind.fp16
        self.scaler = torch.amp.GradScaler(
            self._device, init_scale=plan.init_scale, growth_interval=plan.growth_interval, enabled=fp16
        )
        if gradients_on is not None:
            # The scaler keeps its scale on the device of the first tensor that it scales. From a GPU it would copy the
            # scale and the overflow flag to gradients on the host without waiting for the copy to end.
            self.scaler.scale(torch.ones((), device=gradients_on))

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
