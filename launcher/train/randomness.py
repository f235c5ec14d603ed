"""Random numbers: seeds, their state, kept and put back, and those of a sample, which depend on its place only.

All of them: torch's (on the CPU and on this rank's GPU), Python's, and NumPy's where it is in use.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def seed_for(seed: int, part: str) -> int:
    """Return the seed of ``part``, so that what one part draws does not depend on how many numbers another drew."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=7).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and, where it is in use, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def live_random_state(device: torch.device) -> dict[str, Any]:
    """Return the generators' state as they have it: for this process, at the least cost."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    # a generator that the user has put in its place is the user's to keep
    if numpy is not None and (legacy := numpy.random.get_state(legacy=False))["bit_generator"] == "MT19937":
        state["numpy"] = legacy
    return state


def restore_live_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the generators' state as tensors, which a checkpoint holds without pickling anything."""
    live = live_random_state(device)
    _, words, gauss = live.pop("python")
    legacy = live.pop("numpy", None)
    state: dict[str, Tensor] = {
        **live,
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if legacy is not None:
        words = [*legacy["state"]["key"].tolist(), int(legacy["state"]["pos"]), int(legacy["has_gauss"])]
        state["numpy"] = torch.tensor(words)
        state["numpy_gauss"] = torch.tensor([float(legacy["gauss"])], dtype=torch.float64)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    gauss: list[float] = state["python_gauss"].tolist()
    live: dict[str, Any] = {
        "torch": state["torch"].cpu(),
        "python": (3, tuple(state["python"].tolist()), gauss[0] if gauss else None),
    }
    if "cuda" in state and device.type == "cuda":  # the run may have come from GPUs to where there are none
        live["cuda"] = state["cuda"].cpu()
    if "numpy" in state:
        import numpy as np

        *key, position, has_gauss = state["numpy"].tolist()
        live["numpy"] = ("MT19937", np.array(key, np.uint32), position, has_gauss, state["numpy_gauss"].item())
    restore_live_random_state(live, device)


def _host_state() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators at the least cost; equal states are ``_same``."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    mine, others = one[1], other[1]
    if isinstance(mine, tuple) and isinstance(others, tuple):  # MT19937: its words are an array
        (_, words, *mine), (_, other_words, *others) = mine, others
        if not (words == other_words).all():
            return False
    return one[0] == other[0] and mine == others


class SampleRandom:
    """The random numbers that reading samples draws.

    A dataset that augments then gives the same samples after a resume, in every loader process and in every world; one
    that is read in the step's own process draws nothing from the stream of dropout.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = self._lean = False
        self._numpy: Any = None
        self._left: tuple[Tensor, Any] | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Around reads, each after a ``seed``: what they draw is nobody else's."""
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        outer: Any = None
        if numpy is not None:
            # to change the generator takes a thirtieth of the time that its state takes to read and write
            self._numpy = self._numpy or numpy.random.MT19937(0)
            outer = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_bit_generator(outer)

    def around(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``, which calls ``seed`` before each sample.

        To seed Python's and NumPy's generators takes longer than to read a small sample, and most data sets draw from
        neither. So ``seed`` leaves these two out until a read has changed one: that read is repeated.
        """
        if not self._drawn:
            torch_state = torch.get_rng_state()
            before = python_state, numpy_state = _host_state()
            self._lean = True
            try:
                value = read()
            except Exception:
                if _same(before, _host_state()):
                    raise
            else:
                if _same(before, _host_state()):
                    return value
            finally:
                self._lean = False
                torch.set_rng_state(torch_state)
            self._drawn = True
            random.setstate(python_state)
            if numpy_state is not None:
                sys.modules["numpy"].random.set_state(numpy_state)
        with self.own():
            return read()

    def seed(self, epoch: int, place: int) -> None:
        """Within ``own``. ``place``: of a sample in the epoch."""
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{place}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.default_generator.manual_seed(seed)
        if self._lean:
            return
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)

    @contextmanager
    def going_on(self, epoch: int) -> Iterator[None]:
        """Around a read that goes on where the last one left the numbers: a stream draws alike however it is cut."""
        with self.own():
            if self._left is None:
                self.seed(epoch, -1)
            else:
                torch.set_rng_state(self._left[0])
                random.setstate(self._left[1])
            try:
                yield
            finally:
                self._left = torch.get_rng_state(), random.getstate()
