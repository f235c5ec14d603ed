"""Random numbers: the state of the global generators, the random numbers of a sample, and an epoch's permutation.

The generators are torch's (on the CPU and on this rank's GPU), Python's, and NumPy's if it has been imported.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from launcher.task import seed_for

T = TypeVar("T")
Seed = Callable[[int, int], None]  # (epoch, position of the sample in it)


# states of torch's, Python's and NumPy's global generators; the last is None if NumPy is not imported
States = tuple[Tensor, Any, Any]


def _states() -> States:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(legacy=False)


def as_tensors(states: States) -> dict[str, Tensor]:
    """Return the generators' states as tensors, so that a checkpoint can hold them without pickled objects."""
    torch_state, (_, words, gauss), numpy = states
    state = {
        "torch": torch_state,
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    # if the user has replaced NumPy's generator, its state is the user's responsibility
    if numpy is not None and numpy["bit_generator"] == "MT19937":
        words = [*numpy["state"]["key"].tolist(), int(numpy["state"]["pos"]), int(numpy["has_gauss"])]
        state["numpy"] = torch.tensor(words)
        state["numpy_gauss"] = torch.tensor([float(numpy["gauss"])], dtype=torch.float64)
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the generators' state as tensors, with that of a GPU if ``device`` is one."""
    state = as_tensors(_states())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore a state that ``random_state`` has returned, in this or an earlier process."""
    torch.set_rng_state(state["torch"].cpu())
    gauss: list[float] = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    if "cuda" in state and device.type == "cuda":  # a run from GPUs may be resumed on CPUs
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if "numpy" in state:
        import numpy as np

        *key, position, has_gauss = state["numpy"].tolist()
        legacy = ("MT19937", np.array(key, np.uint32), position, has_gauss, state["numpy_gauss"].item())
        np.random.set_state(legacy)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Context manager that restores the generators' state at its end."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(state, device)


def _words_of_python() -> tuple[Any, Any]:
    """Return Python's global generator and a view of its memory, which every draw and every seed changes: far faster
    than ``random.getstate``. The number cached by ``gauss`` is not part of it."""
    generator = cast("Any", random.random).__self__
    head, end = object.__basicsize__, _random.Random.__basicsize__  # bounds of the C struct's own fields
    return generator, (ctypes.c_char * (end - head)).from_address(id(generator) + head)


class _NumpyGenerator:
    """Replacement generator for NumPy's global functions.

    Installing it takes a hundredth of the time that NumPy needs to return its state.

    Attributes:
        words: memory of the replacement, which changes with every draw and every seed.
    """

    def __init__(self, numpy: Any) -> None:
        self._random, self._legacy = numpy.random, numpy.random.MT19937
        self._inner, self._outer = self._legacy(0), self._random.get_bit_generator()
        self.words, self._outer_words = self._words_of(self._inner), self._words_of(self._outer)
        self._state_after = b""
        self._outer_state: Any = None

    def _words_of(self, generator: Any) -> Any:
        """Return a view of the memory that holds its 624 words and its position; empty for a user's own generator of
        another kind."""
        size = 625 * 4 if isinstance(generator, self._legacy) else 0
        return (ctypes.c_char * size).from_address(generator.ctypes.state_address)

    def install(self) -> None:
        if (outer := self._random.get_bit_generator()) is not self._outer:
            self._outer, self._outer_words, self._state_after = outer, self._words_of(outer), b""
        # replacing the generator loses the second number of a pair of normal draws, which NumPy caches
        if isinstance(outer, self._legacy) and self._outer_words.raw != self._state_after:
            self._outer_state = self._random.get_state(legacy=False)
        self._random.set_bit_generator(self._inner)

    def uninstall(self) -> None:
        self._random.set_bit_generator(self._outer)
        if self._outer_state is not None and self._outer_state["has_gauss"]:
            self._random.set_state(self._outer_state)
        else:
            self._state_after = self._outer_words.raw
        self._outer_state = None


def _cuda_state() -> Tensor | None:
    """Return the GPU generator's state, which torch.manual_seed() in a dataset sets too; None without a GPU in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore_cuda(state: Tensor | None) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state)


class _Watch:
    """Context that detects whether the code in it uses a random number generator, and restores all generators if so.

    Looking at a seed or a state counts as use: torch.random's functions, such as initial_seed(), find this object in
    place of the default generator, and two functions are wrapped. ``torch.default_generator`` itself is not replaced: a
    dataset may keep a reference, which must be a real generator.

    Args:
        install_numpy: replaces NumPy's generator, and returns the replacement; None if NumPy has not been imported.
        used: result of the latest use of the context. If true, an exception of the code in it is suppressed.
    """

    def __init__(self, install_numpy: Callable[[], _NumpyGenerator | None]) -> None:
        self._generator, self._install_numpy = torch.default_generator, install_numpy
        self._python, self._words = _words_of_python()
        self.used = False

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self._generator, name)

    def __enter__(self) -> None:
        self._numpy, self._cuda_state = self._install_numpy(), None
        if torch.cuda.is_initialized():  # for each micro-batch that is read here: without a GPU no call more
            self._cuda_state = _cuda_state()
        self._before = self._states()
        numpy = sys.modules.get("numpy")
        self._functions: list[tuple[Any, str, Any]] = [(random, "getstate", random.getstate)]
        if numpy is not None:
            self._functions.append((numpy.random, "get_state", numpy.random.get_state))
        for module, name, function in self._functions:
            setattr(module, name, functools.partial(self._call, function))
        torch.random.default_generator = self  # pyright: ignore[reportAttributeAccessIssue]
        self.used = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        torch.random.default_generator = self._generator
        for module, name, function in self._functions:
            setattr(module, name, function)
        interrupted = kind is not None and not issubclass(kind, Exception)
        self.used = self.used or interrupted or self._states() != self._before
        if self._numpy is not None:
            self._numpy.uninstall()
        if self.used:
            _restore_cuda(self._cuda_state)
            torch_state, self._words.raw, self._python.gauss_next, _ = self._before
            self._generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
        return self.used and not interrupted

    def _states(self) -> tuple[Any, ...]:
        state = self._generator.get_state()
        # the code in the context may be the first to import NumPy, and draw from it
        numpy_state = "numpy" in sys.modules if self._numpy is None else self._numpy.words.raw
        # bytes, because torch.equal takes longer than reading a small sample
        torch_state = ctypes.string_at(state.data_ptr(), state.nbytes)
        return torch_state, self._words.raw, self._python.gauss_next, numpy_state

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.used = True
        return function(*args, **kwargs)


# odd, so that no two samples of an epoch have the same seed, even in the lower 32 bits, which is all that torch and
# NumPy use
_STRIDE, _LIMIT = 0x9E3779B97F4A7C15, 2**64


class SampleRandom:
    """Random numbers for reading samples, seeded for each sample.

    An augmented sample is then the same after a resume, in every loader process and for every world size. If the rank's
    own process reads the dataset, it does not draw from the random numbers that dropout uses.

    Attributes:
        stream_state: state of the random numbers of ``continued``; None before its first use.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch, self._base = 0, seed_for(seed, "samples/0")
        self._drawn = False
        self._watch = _Watch(self._install_numpy)
        self._numpy: _NumpyGenerator | None = None
        self.stream_state: States | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Return a context for reads, each preceded by ``seed``. The generators' state is restored at its end."""
        torch_state, python_state, numpy = torch.get_rng_state(), random.getstate(), self._install_numpy()
        cuda_state = _cuda_state()
        try:
            yield
        finally:
            _restore_cuda(cuda_state)
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            if numpy is not None:
                numpy.uninstall()

    def _install_numpy(self) -> _NumpyGenerator | None:
        if self._numpy is None and (numpy := sys.modules.get("numpy")) is not None:
            self._numpy = _NumpyGenerator(numpy)
        if self._numpy is not None:
            self._numpy.install()
        return self._numpy

    def read(self, read: Callable[[Seed | None], T]) -> T:
        """Return the result of ``read``, which must call the function ``seed`` before each sample, unless it is None.

        Seeding the generators takes longer than reading a small sample, and most data sets draw no random numbers. So
        ``seed`` is None until a read has drawn random numbers; that read is repeated with seeds.
        """
        if not self._drawn:
            value: Any = None
            with self._watch:
                value = read(None)
            if not self._watch.used:
                return value
            self._drawn = True
        with self.own():
            return read(self.seed)

    def seed(self, epoch: int, position: int) -> None:
        """Seed the generators for the sample at ``position`` of the epoch. Call it within ``own``."""
        if epoch != self._epoch:
            self._epoch, self._base = epoch, seed_for(self._seed, f"samples/{epoch}")
        seed = (self._base + position * _STRIDE) % _LIMIT
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)

    @contextmanager
    def continued(self, epoch: int) -> Iterator[None]:
        """Return a context for a read whose random numbers continue those of the previous one. A stream then draws the
        same numbers, regardless of how it is divided into reads."""
        with self.own():
            if self.stream_state is None:
                self.seed(epoch, -1)
            else:
                torch.set_rng_state(self.stream_state[0])
                random.setstate(self.stream_state[1])
                if self.stream_state[2] is not None:
                    sys.modules["numpy"].random.set_state(self.stream_state[2])
            try:
                yield
            finally:
                # NumPy's too: to change its generator drops the second of two normal numbers
                self.stream_state = _states()

    def continue_from(self, state: dict[str, Tensor]) -> None:
        """Let ``continued`` continue from ``stream_state`` of an earlier process, as tensors."""
        with self.own():
            restore_random_state(state, torch.device("cpu"))
            self.stream_state = _states()


_ROUNDS = 4
# SplitMix64's multipliers, as the signed numbers that int64 tensors hold
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Permutation:
    """A bijection of [0, n) determined by (seed, epoch), evaluated at any position in O(1) memory.

    It is a Feistel network over a grid of about sqrt(n) x sqrt(n) cells, applied again while the result is not below n
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3.2, 3.3), with four rounds (Luby
    and Rackoff, 1988) that use the multiplications of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._rows = math.isqrt(n - 1) + 1
        self._columns = -(-n // self._rows)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(key[8 * i : 8 * i + 8], "little", signed=True) for i in range(_ROUNDS)]

    def take(self, first: int, count: int) -> list[int]:
        """Return elements [first, first + count) of the permutation.

        Raises:
            IndexError: a position is outside [0, n).
        """
        if first < 0 or first + count > self.n:
            raise IndexError(f"positions {first} to {first + count} are not in [0, {self.n})")
        values = self._walk(torch.arange(first, first + count))
        while (outside := values >= self.n).any():
            values[outside] = self._walk(values[outside])
        return values.tolist()

    def _walk(self, values: Tensor) -> Tensor:
        """Apply the network once: a bijection of the grid."""
        left, right = values // self._columns, values % self._columns
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                left = _mix(right, key).add_(left).remainder_(self._rows)
            else:
                right = _mix(left, key).add_(right).remainder_(self._columns)
        return left * self._columns + right


def _mix(x: Tensor, key: int) -> Tensor:
    """Return the round function of ``x``: 31 well mixed bits and a sign, which the remainder removes. Products wrap
    around, as intended."""
    x = (x + key).mul_(_FIRST)
    return x.bitwise_xor_(x >> 30).mul_(_SECOND).bitwise_right_shift_(33)
