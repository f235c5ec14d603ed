"""Precision: autocast, loss scaling, fp32 parameters, and the choice for precision=auto on the workers' devices.

`launcher.launch.planner` also runs the module as a separate process before the start: it reads a JSON request from
standard input, and writes its answer to the file named on the command line.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from launcher.config.schema import Device, PrecisionKind
from launcher.errors import ConfigError
from launcher.plan import host
from launcher.plan.float_format import float_format
from launcher.plan.run_plan import PrecisionPlan, RunPlan
from launcher.process import die_with_parent, exit_at_once
from launcher.rundir.files import write_json
from launcher.train.world import World

# dtypes in which autocast computes, and in which FSDP gathers; bf16 with a format of an installed package
DTYPES: dict[str, torch.dtype] = {
    kind: torch.float16 if kind is PrecisionKind.fp16 else torch.bfloat16
    for kind in PrecisionKind
    if kind not in ("auto", "fp32")
}


# dtypes in which small updates of a parameter are lost to rounding
NARROW_DTYPES = (torch.bfloat16, torch.float16)


def parameters_to_fp32(model: nn.Module, *, frozen: bool, optimizer: Optimizer | None) -> int:
    """Convert trained parameters in bf16 or fp16 to fp32, in place, and return the number of their elements.

    Accumulated gradients and the optimizer's state have the dtype of their parameter. Frozen parameters have neither,
    and stay narrow to save memory. Buffers become fp32 too, except in modules whose own parameters stay narrow.

    Args:
        frozen: also convert frozen parameters: without autocast, all operands must have one dtype.
        optimizer: optimizer of the model's parameters, whose state is converted with them.
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
    """Allow or forbid TF32 in fp32 matrix products and convolutions on a GPU.

    torch's default forbids it in products and allows it in convolutions.
    """
    _set_fp32_precisions(["tf32" if allowed else "ieee"] * 3)


@contextmanager
def kept_tf32() -> Iterator[None]:
    """Context at whose end TF32 is allowed where it was before."""
    before = [each.fp32_precision for each in _fp32_operations()]
    try:
        yield
    finally:
        _set_fp32_precisions(before)


def _fp32_operations() -> tuple[Any, Any, Any]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def _set_fp32_precisions(precisions: Sequence[str]) -> None:
    """Set both of torch's interfaces: if only the newer one was set, reading the older one, as torch.compile does,
    raises an error."""
    products, convolutions, _ = precisions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch warn of the older interface
        torch.backends.cuda.matmul.allow_tf32 = products == "tf32"
        torch.backends.cudnn.allow_tf32 = convolutions == "tf32"
    for operations, precision in zip(_fp32_operations(), precisions, strict=True):
        operations.fp32_precision = precision


class Precision:
    """Arithmetic of forward and backward passes: autocast, loss scaling, and TF32 on or off for the process.

    The scaler is disabled except in fp16; its methods then have no effect, and its ``step`` is the optimizer's.

    Attributes:
        scales: the loss is scaled, as in fp16.
        autocast: returns the context for the forward pass and the loss.
        no_autocast: that for the backward pass, which uses the dtypes that the forward pass has chosen.
    """

    def __init__(self, plan: PrecisionPlan, device: torch.device, gradients_on: torch.device | None = None) -> None:
        """Set up the precision of ``plan`` on ``device``.

        Args:
            gradients_on: the device that holds the gradients; default: ``device``.

        Raises:
            ConfigError: ``device`` does not support the precision.
        """
        set_tf32(plan.tf32)
        self._device = device.type
        self._dtype = DTYPES.get(plan.kind)
        if self._dtype is not None:
            _require(plan.kind, self._dtype, device)
        self.autocast = self.no_autocast = cast("Callable[[], AbstractContextManager[object]]", nullcontext)
        if self._dtype is not None:
            self.autocast = functools.partial(torch.autocast, self._device, self._dtype)
            self.no_autocast = functools.partial(torch.autocast, self._device, enabled=False)
        self.scales = fp16 = plan.kind is PrecisionKind.fp16
        self._scale: float | None = None  # of this window, once it was read
        self.scaler = torch.amp.GradScaler(
            self._device, init_scale=plan.init_scale, growth_interval=plan.growth_interval, enabled=fp16
        )
        if gradients_on is not None:
            # The scaler keeps its scale on the device of the first tensor that it scales. If that is a GPU and the
            # gradients are on the host, it copies scale and overflow flag without waiting for the copy to complete.
            self.scaler.scale(torch.ones((), device=gradients_on))

    def backward(self, loss: Tensor) -> None:
        if self._dtype is None:
            loss.backward()
            return
        with self.no_autocast():
            self.scaler.scale(loss).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the loss scale, for the backward pass."""
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, and remember whether one of them overflowed."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)

    @property
    def scale(self) -> float | None:
        """Loss scale of this window; None in other precisions. The host waits for the device once a window."""
        if self.scales and self._scale is None:
            self._scale = self.scaler.get_scale()
        return self._scale

    def update(self) -> None:
        """Update the loss scale. Also called after a skipped step, which makes it smaller."""
        self.scaler.update()
        self._scale = None

    def keep_scale(self) -> None:
        """Keep the loss scale after a window that does not count, and do not advance its growth interval."""
        self.scaler.update(self.scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        self.scaler.load_state_dict(state)
        self._scale = None


def _require(kind: PrecisionKind, dtype: torch.dtype, device: torch.device) -> None:
    """Check that ``device`` supports ``dtype``, by trying: support depends on the device's generation and on torch's
    build.

    Raises:
        ConfigError: it does not.
    """
    try:
        with torch.autocast(device.type, dtype):
            functional.linear(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    except RuntimeError as error:
        raise ConfigError(
            "precision", kind, f"this device ({device}) cannot compute in it: {error}",
            f"Use precision={'bf16 or fp32' if kind is PrecisionKind.fp16 else 'fp32'}.",
        ) from None  # fmt: skip


_warned: set[PrecisionKind] = set()


def is_native(kind: PrecisionKind, device: torch.device) -> bool:
    """Return whether ``device`` computes in ``kind`` without emulation."""
    if kind not in DTYPES:
        return True
    if device.type == "cuda":
        return kind is PrecisionKind.fp16 or torch.cuda.is_bf16_supported(including_emulation=False)
    onednn = torch.ops.mkldnn
    supports = onednn._is_mkldnn_bf16_supported if kind is PrecisionKind.bf16 else onednn._is_mkldnn_fp16_supported
    # oneDNN supports bf16 on every AVX-512 CPU, even without hardware units, where it is slower than fp32
    has_units = platform.machine() != "x86_64" or host.has_units(kind)
    return bool(supports()) and has_units


def resolve_precision(plan: RunPlan, world: World, device: torch.device, record: Path | None = None) -> RunPlan:
    """Return ``plan`` with a precision other than auto, the same on all ranks. All ranks call it.

    auto becomes bf16 if every rank's device computes it natively, otherwise fp32. A precision that some device emulates
    is kept if the user or an earlier attempt of the run chose it, with a warning.

    Args:
        record: file that stores the decision for later attempts of the run. ``RunPlan.load`` reads it.

    Raises:
        ConfigError: the device of a rank has no units for the format of an installed package.
    """
    # a host that joined the run later, and has a run directory of its own, lacks the record of the decision
    plans = world.of_all((plan.precision.kind, plan.precision.reason))
    if any(kind is PrecisionKind.auto for kind, _ in plans):
        earlier = [(kind, reason) for kind, reason in plans if kind is not PrecisionKind.auto]
        kind, reason = earlier[0] if earlier else _decide(world, device)
        if record is not None and world.local_rank == 0:
            write_json(record, {"kind": kind.value, "reason": reason})
        plan = plan.with_precision(kind, reason)
        if world.rank == 0:
            print(f"Precision: {kind.value} ({reason}).", flush=True)
    if (added := float_format(plan)) is not None:
        natives = world.of_all(added.computes(device))
        if not all(natives):
            raise added.no_units(f"the device of rank {natives.index(False)}")
    elif plan.precision.kind in DTYPES and plan.precision.kind not in _warned:
        _warned.add(plan.precision.kind)
        _warn_of_emulation(plan.precision.kind, world, device)
    return plan


def _decide(world: World, device: torch.device) -> tuple[PrecisionKind, str]:
    natives = world.of_all(is_native(PrecisionKind.bf16, device))
    if all(natives):
        return PrecisionKind.bf16, host.emulation_reason(PrecisionKind.bf16, "every worker's device")
    return PrecisionKind.fp32, host.emulation_reason(PrecisionKind.fp32, f"the device of rank {natives.index(False)}")


def _warn_of_emulation(kind: PrecisionKind, world: World, device: torch.device) -> None:
    natives = world.of_all(is_native(kind, device))
    if all(natives):
        return
    if world.rank == 0:
        device_name = f"this device{f' of rank {natives.index(False)}' if any(natives) else ''} ({device.type})"
        print(f"Warning: {host.emulation_warning(kind, device_name)}", flush=True)


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    request: dict[str, Any] = json.load(sys.stdin)
    kind = PrecisionKind(request["kind"])
    device = torch.device(Device(request["device"]).value)
    answer: dict[str, Any] = {"native": is_native(kind, device)}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
    exit_at_once()  # threads that the task has started may never end
