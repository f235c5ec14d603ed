"""State to be restored after passes that do not train: random numbers, buffers, and attributes of Python objects."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from launcher.errors import TaskError
from launcher.train.randomness import live_random_state, restore_live_random_state

# More than this is not copied: of tensors beyond it, a change is an error.
MAX_COPY_BYTES = 256 * 2**20
# Objects that are looked at, nearest first: a list of a million samples is no state.
MAX_OBJECTS = 10_000
# Torch's own bookkeeping of a module: parameters, buffers, hooks. Buffers are those of Kept.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_ATOMS = (int, float, complex, str, bytes, type(None), type, range, FunctionType, BuiltinFunctionType, ModuleType)
_FOREIGN = frozenset({"torch", "launcher", "numpy"}) | sys.stdlib_module_names


class Kept:
    """Random state and buffers, saved to be restored after passes that do not train.

    Args:
        only: names of the buffers whose values are saved; default: all.
    """

    def __init__(self, module: nn.Module, device: torch.device, only: Collection[str] | None = None) -> None:
        self._device, self._random = device, live_random_state(device)
        # a forward pass may put a new tensor in a buffer's place, or register a buffer
        self._buffers = [
            (part, [(name, buffer, buffer.detach().clone() if buffer is not None and
                     (only is None or f"{prefix}.{name}".removeprefix(".") in only) else None)
                    for name, buffer in part._buffers.items()])
            for prefix, part in module.named_modules()
        ]  # fmt: skip

    @torch.no_grad()
    def put_back(self) -> None:
        restore_live_random_state(self._random, self._device)
        for part, buffers in self._buffers:
            if [*map(id, part._buffers.values())] != [id(buffer) for _, buffer, _ in buffers]:
                part._buffers.clear()
                part._buffers.update((name, buffer) for name, buffer, _ in buffers)
            for _, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)


class KeptAttributes:
    """Attributes of the user's objects, saved to be restored in place, with what they refer to.

    Follows attributes, lists, dicts, sets, deques and tuples. Restores tensors that are neither parameters nor buffers,
    NumPy arrays, and random generators of torch, NumPy and Python. Of data sets, and of objects whose class is not the
    user's, it restores the reference only.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._seen: dict[int, object] = {}  # holds the objects, so that no other one gets the same id
        self._undo: list[Callable[[], object]] = []
        self._copied_bytes = 0
        waiting = deque(roots)
        while waiting and len(self._seen) < MAX_OBJECTS:
            value = waiting.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting.extend(itertools.islice(self._save(value), MAX_OBJECTS))

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all.

        Raises:
            TaskError: a tensor has changed of which there is no copy.
        """
        for undo in self._undo:
            undo()

    def _save(self, value: Any) -> Iterable[object]:
        """Save ``value``; return what it refers to."""
        numpy: Any = sys.modules.get("numpy")
        match value:
            case nn.Parameter():
                pass
            case Tensor():
                self._save_tensor(value)
            case torch.Generator():
                self._keep(value.set_state, value.get_state())
            case random.Random():
                self._keep(value.setstate, value.getstate())
            case list():
                self._keep(lambda items: value.__setitem__(slice(None), items), [*value])
                return value
            case dict():
                self._keep(lambda items: (value.clear(), value.update(items)), {**value})
                return value.values()
            case set():
                self._keep(lambda items: (value.clear(), value.update(items)), {*value})
            case deque():
                self._keep(lambda items: (value.clear(), value.extend(items)), [*value])
                return value
            case tuple() | frozenset():
                return value
            case MethodType():
                return [value.__self__]
            case _ if numpy and isinstance(value, numpy.ndarray):
                self._save_array(value)
            case _ if numpy and isinstance(value, numpy.random.Generator):
                self._keep(lambda state: setattr(value.bit_generator, "state", state), value.bit_generator.state)
            case _ if numpy and isinstance(value, numpy.random.RandomState):
                self._keep(value.set_state, value.get_state(legacy=False))
            case _:
                return self._save_object(value)
        return ()

    def _save_object(self, value: Any) -> Iterable[object]:
        if isinstance(value, nn.Module):  # FSDP's classes of the user's modules are torch's
            parts, hidden = [*value._modules.values()], _OF_TORCH
            own = not type(value).__module__.startswith("torch._")
        else:
            parts, hidden = [], frozenset[str]()
            own = type(value).__module__.split(".")[0] not in _FOREIGN and not isinstance(value, Dataset)
        if not own or not hasattr(value, "__dict__"):
            return parts

        def restore(saved: dict[str, Any]) -> None:
            held = vars(value)
            for name in held.keys() - saved.keys() - hidden:
                del held[name]
            held.update(saved)

        attributes = {name: held for name, held in vars(value).items() if name not in hidden}
        self._keep(restore, attributes)
        return [*attributes.values(), *parts]

    def _save_tensor(self, value: Tensor) -> None:
        if value.grad_fn is not None or value.layout is not torch.strided or value.is_inference():
            return  # nothing changes these in place
        if self._has_room(value.nbytes):
            # most are unchanged, and one that is expanded takes no copy
            self._keep(lambda old: torch.equal(value, old) or value.copy_(old), value.detach().clone())
            return

        def require_unchanged(version: int) -> None:
            if value._version != version:
                raise TaskError(
                    f"A forward pass changes a tensor of shape {(*value.shape,)} that is neither a parameter nor a "
                    "buffer, and too large to be copied and restored after a pass that does not train.\n"
                    "  Make it a buffer of the model (register_buffer), or allow no such passes: run.calibrate_s=0."
                )

        self._keep(require_unchanged, value._version)

    def _save_array(self, value: Any) -> None:
        numpy = sys.modules["numpy"]
        if not value.dtype.hasobject and self._has_room(value.nbytes):
            self._keep(lambda old: numpy.array_equal(value, old) or numpy.copyto(value, old), value.copy())

    def _has_room(self, size: int) -> bool:
        fits = self._copied_bytes + size <= MAX_COPY_BYTES
        self._copied_bytes += size if fits else 0
        return fits

    def _keep(self, restore: Callable[[Any], object], saved: Any) -> None:
        self._undo.append(lambda: restore(saved))
