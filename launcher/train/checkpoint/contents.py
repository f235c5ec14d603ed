"""Contents of a checkpoint: its tensors, the share of each rank, and copies in host memory."""

from __future__ import annotations

import copy
import inspect
import mmap
import traceback
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, keystr, tree_leaves, tree_leaves_with_path, tree_map_with_path

from launcher.errors import TaskError
from launcher.quantities import first_names
from launcher.train.callback_set import Keys, nested_tensors, without_tensors
from launcher.train.checkpoint.file_format import RANDOM_KEY, STRATEGY_KEY, STREAM_KEY, pickled, unpickled
from launcher.train.checkpoint.optimizer_parts import named_parameters, optimizer_state
from launcher.train.data.randomness import random_state
from launcher.train.engine.engine import Engine
from launcher.train.optimizers import evaluation_values, has_modes, members_of
from launcher.train.parallel.base import local
from launcher.train.schedules import schedule_state
from launcher.train.world import World


def checkpoint_tensors(
    engine: Engine, changing_buffers: list[str], *, create_optimizer_state: bool = False
) -> dict[str, Any]:
    """Return the checkpoint's tensors (and the optimizer's options) by name.

    Args:
        changing_buffers: names of the buffers that training changes.
        create_optimizer_state: let an optimizer that has no state yet create it, to be filled from a checkpoint. It
            takes a step, so parameters must be loaded afterwards.
    """
    if create_optimizer_state:
        for member in members_of(engine.optimizer):
            _init_optim_state(member)
    module, rank, training = engine.parallel.module, engine.world.rank, dict[str, Tensor]()
    evaluated = evaluated_tensors(engine, changing_buffers)
    if has_modes(engine.optimizer):  # the checkpoint is used for evaluation and export, and to resume
        training = {name: p.detach() for name, p in named_parameters(module) if p.requires_grad}
        with evaluation_values(engine.optimizer):
            evaluated["model"] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in evaluated["model"].items()
            }
    return {
        **evaluated,
        **({"training": training} if training else {}),
        "optimizer": optimizer_state(engine),
        f"{RANDOM_KEY}{rank}": random_state(engine.device),
        f"{STRATEGY_KEY}{rank}": engine.parallel.state_dict(),
        f"{STREAM_KEY}{rank}": engine.stream.state_dict(),
    }


def evaluated_tensors(engine: Engine, changing_buffers: list[str]) -> dict[str, Any]:
    """Return the entries of ``checkpoint_tensors`` that an evaluation needs: model, buffers and state of callbacks."""
    module = engine.parallel.module
    model = {name: _stored(name, value) for name, value in get_model_state_dict(module).items()}
    buffers = dict(module.named_buffers())
    callbacks, _ = engine.callbacks.state_dict()
    return {
        **({"callbacks": callbacks} if callbacks else {}),
        "model": model,
        # buffers that training changes and the model's state_dict leaves out (persistent=False)
        "buffers": {name: buffers[name] for name in changing_buffers if name not in model},
    }


def require_restorable(engine: Engine) -> None:
    """Check before the first step that the state of model and schedule can be restored from a checkpoint: the model's
    own ``load_state_dict`` loads a state that has all parameters.

    Raises:
        TaskError: they cannot.
    """
    module = engine.parallel.module
    problem, state = None, dict[str, Any]()
    try:
        state = get_model_state_dict(module)
        left_out = [name for name, p in named_parameters(module) if p.requires_grad and name not in state]
        if left_out:
            problem = f"state_dict() leaves out trained parameters: {first_names(left_out)}"
        elif type(module).load_state_dict is not nn.Module.load_state_dict:
            with _any_signature(module):
                set_model_state_dict(module, state, options=StateDictOptions(strict=False))
    except Exception as error:  # of the user's methods, or of torch on what they return
        problem = f"{_submodule(error)}{type(error).__name__}: {error}"
    if problem is not None:
        raise TaskError(
            f"The state of {type(module).__name__} cannot be restored from a checkpoint: {problem}.\n  "
            "Let its state_dict() return all parameters under their names, and its load_state_dict(state_dict, strict) "
            "load that; or train\n  without checkpoints: checkpoint.enabled=false."
        )
    for name, value in state.items():
        _stored(name, value)
    schedule_state(engine.schedule)


def _submodule(error: Exception) -> str:
    """Return the name of the submodule whose ``state_dict`` raised ``error``, for a message; "" if it was not one's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    prefixes = [frame.f_locals["prefix"] for frame in frames if frame.f_code is nn.Module.state_dict.__code__]
    return f"in {prefixes[-1][:-1]}, " if prefixes and prefixes[-1] else ""


def _stored(name: str, value: Any) -> Tensor | bytes:
    """Return a value of the model's state as a checkpoint stores it: extra state whole, because torch would make texts
    of a dict's keys, and drop an empty dict.

    Raises:
        TaskError: it could not be restored.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):  # pickled without the other ranks' shards
            raise TypeError("it contains a sharded parameter; leave that out, or store its full_tensor()")
        return pickled(value)
    except TypeError as error:
        raise TaskError(
            f"{name} in the model's state_dict(): {error}.\n  Keep tensors, numbers, texts, lists and dicts of them in "
            "it only; or train without checkpoints: checkpoint.enabled=false."
        ) from None


def load_model(module: nn.Module, values: Mapping[str, Tensor | bytes]) -> None:
    """Give a model the values that a checkpoint has stored. Their names must have been compared."""
    state = {name: unpickled(value) if isinstance(value, bytes) else value for name, value in values.items()}
    with _any_signature(module):
        set_model_state_dict(module, state, options=StateDictOptions(strict=False))


@torch.no_grad()
def take_training_values(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Set the parameters to the values for training, where a checkpoint has them beside those for evaluation."""
    for name, parameter in named_parameters(engine.parallel.module):
        if name in values:
            local(parameter).copy_(local(values[name]))


@contextmanager
def _any_signature(module: nn.Module) -> Iterator[nn.Module]:
    """Context manager in which torch's functions can load a model whose own ``load_state_dict`` lacks the argument
    ``assign``, or ``strict``, of newer versions, or has another name for the first one."""
    load = module.load_state_dict
    known = inspect.signature(load).parameters
    if {"assign", "state_dict"} <= known.keys() or any(each.kind is each.VAR_KEYWORD for each in known.values()):
        yield module
        return

    def load_any(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ARG001
        return load(state_dict, **({"strict": strict} if "strict" in known else {}))

    own = vars(module).get("load_state_dict")
    module.load_state_dict = load_any
    try:
        yield module
    finally:
        if own is None:
            del module.load_state_dict
        else:
            module.load_state_dict = own


# parts that are the same on all ranks, except for shards
_REPLICATED = ("model", "training", "optimizer", "buffers", "callbacks")


def own_share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Return ``state`` with only this rank's share of the unsharded tensors that all ranks hold: about the same number
    of bytes on each rank. Shards, state of this rank alone, and values other than tensors are kept; of modules' extra
    state, which may differ between ranks, that of rank 0.

    torch removes duplicates, too, but only after everything was copied.
    """
    replicated = [
        (-tensor.nbytes, keys)
        for keys, tensor in nested_tensors(state)
        if keys[0] in _REPLICATED and not isinstance(tensor, DTensor)
    ]
    bytes_of_rank, of_others = [0] * world.size, set[Keys]()
    for negative, keys in sorted(replicated):
        rank = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[rank] += max(1, -negative)
        if rank != world.rank:
            of_others.add(keys)
    share = without_tensors(state, of_others)
    if world.rank:
        share["model"] = {name: value for name, value in share["model"].items() if not isinstance(value, bytes)}
    return share


class Staging:
    """Copies of tensors in host memory, at most one of each: a save reuses the memory of the previous one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}  # by the tensor's path in the state
        self._refused = False

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its tensors copied to host memory. No save may still be reading the previous copy."""
        sources: dict[Hashable, tuple[str, Tensor]] = {}  # tied tensors have two paths
        for path, leaf in tree_leaves_with_path(state):
            if isinstance(leaf, Tensor):
                source = local(leaf).detach()
                sources.setdefault(_identity(keystr(path), source), (keystr(path), source))
        self._reserve(dict(sources.values()))
        for path, source in sources.values():
            self._buffers[path].copy_(source, non_blocking=True)

        def copied(path: KeyPath, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            buffer = self._buffers[sources[_identity(keystr(path), local(leaf).detach())][0]]
            if isinstance(leaf, DTensor):
                # from_local would move the buffer back to the device
                return DTensor(buffer, leaf._spec, requires_grad=False)  # pyright: ignore
            return buffer

        copies = tree_map_with_path(copied, state)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def _reserve(self, sources: dict[str, Tensor]) -> None:
        """Provide one buffer for each of ``sources``: that of the previous copy if its shape and dtype fit. Others are
        released first, so that old and new memory are not held at the same time."""
        for path in list(self._buffers):
            buffer, source = self._buffers[path], sources.get(path)
            if source is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                del self._buffers[path], buffer
        for path, source in sources.items():
            if path not in self._buffers:
                self._buffers[path] = (
                    self._allocate_page_locked(source)
                    if _is_on_device(source)
                    else torch.empty(source.shape, dtype=source.dtype)
                )

    def _allocate_page_locked(self, source: Tensor) -> Tensor:
        """Return an uninitialised tensor in page-locked host memory, to which a GPU can copy asynchronously.

        ``torch.empty(pin_memory=True)`` rounds its size up to a power of two, which may take twice the memory; this
        rounds up to a page. The mapping is shared, because a page-locked page must not be copied on write when loader
        processes are forked. If the driver refuses, the memory stays pageable: copies are slower.
        """
        memory = mmap.mmap(-1, source.numel() * source.dtype.itemsize)
        buffer = torch.frombuffer(memory, dtype=source.dtype).reshape(source.shape)
        cudart = cast("Any", torch.cuda.cudart())
        if int(cudart.cudaHostRegister(buffer.data_ptr(), len(memory), _PORTABLE)) == 0:
            # while it is still mapped: later its address may belong to other memory
            weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr())
            return buffer
        with suppress(RuntimeError):  # CUDA reports the refusal at the next kernel, as if that one were out of memory
            torch.zeros(1, device=self._device)
        if not self._refused:
            self._refused = True
            print("The memory for copies of checkpoints cannot be page-locked: each save delays the steps for longer.")
        return buffer


_PORTABLE = 1  # cudaHostRegisterPortable


def _identity(path: str, source: Tensor) -> Hashable:
    """Return a key that is the same for two paths of one tensor."""
    return (source.data_ptr(), source.dtype, source.shape, source.stride()) if source.numel() else path


def _is_on_device(source: Tensor) -> bool:
    return source.is_cuda and source.numel() > 0
