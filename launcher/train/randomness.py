"""Random numbers: their state, kept and put back, and those of a micro-batch's samples, which depend on its place only.

All of them: torch's (on the CPU and on this rank's GPU), Python's, and NumPy's where it is in use.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """As tensors, which a checkpoint holds without pickling anything."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    # a generator that the user has put in its place is the user's to keep
    if numpy is not None and (legacy := numpy.random.get_state(legacy=False))["bit_generator"] == "MT19937":
        words = [*legacy["state"]["key"].tolist(), int(legacy["state"]["pos"]), int(legacy["has_gauss"])]
        state["numpy"] = torch.tensor(words)
        state["numpy_gauss"] = torch.tensor([float(legacy["gauss"])], dtype=torch.float64)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and device.type == "cuda":  # the run may have come from GPUs to where there are none
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    gauss: list[float] = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    if "numpy" in state:
        import numpy as np

        *key, position, has_gauss = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, state["numpy_gauss"].item()))


class SampleRandom:
    """The random numbers that reading samples draws.

    A dataset that augments then gives the same samples after a resume, in every loader process and in every world; one
    that is read in the step's own process draws nothing from the stream of dropout.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
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

    def seed(self, epoch: int, place: int) -> None:
        """Within ``own``. ``place``: of a sample in the epoch."""
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{place}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.default_generator.manual_seed(seed)
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
