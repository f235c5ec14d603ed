"""A GPU that is pretended on the CPU: code takes the paths of a GPU, and each read of a number from a tensor is noted,
where the host would wait until a GPU has completed all that was queued before."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
aten = torch.ops.aten


class PretendedGpu(TorchFunctionMode):
    """Mode in which tensors say that they are on a GPU, and what is to be put there stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = HostReads()

    def __enter__(self) -> PretendedGpu:
        self.reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.reads.__exit__(*exception)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy):  # they do not reach the other mode on a CPU
            self.reads.note()
        options = {name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_here, args), **options)


def _here(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class HostReads(TorchDispatchMode):
    """Mode that notes where a number of a tensor is read, or a result's size depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        waits = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2)
        if func.overloadpacket in waits:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the innermost places outside of torch, unless an optimizer reads its count of steps, which is on the
        host."""
        frame, files = sys._getframe(1), list[str]()
        while frame is not None and len(files) < 40:
            files.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        own = [each for each in files if "/torch/" not in each and __file__ not in each]
        if not any("/torch/optim/" in each for each in files[:12]):
            self.places.append(own[0].rpartition("/launcher/")[2] if own else files[0])
