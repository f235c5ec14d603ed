"""Order of an epoch's samples: random, that of the dataset, or one of the user's own; the same on all ranks.

A window's samples are found by their positions in this order, so any order gives the same windows in every world size,
and a resume needs no more than the number of the next window.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from launcher.errors import DataError
from launcher.task import seed_for
from launcher.train.data.randomness import Permutation, SampleRandom

# (epoch, seed) -> indices of the epoch's samples, in order
Order = Callable[[int, int], Iterable[int]]
# positions of the permutation that are computed at once
POSITIONS_AHEAD = 4096


class ArrangedData(Dataset[Any]):
    """Map-style dataset with an order of its own, or with the lengths of its samples, for a training loop of your own.

    A task has the methods ``order`` and ``lengths`` instead.

    Args:
        dataset: the samples.
        order: (epoch, seed) -> indices of the epoch's samples in order. A sample may occur several times, or not at
            all; all epochs have equally many. ``seed`` follows from train.seed and the epoch; the global generators
            are seeded with it during the call. None: train.shuffle decides.
        lengths: number for each sample, such as its tokens, for ``batch.balance=length``.
        micro_batch_tokens: (lengths of a micro-batch's samples, longest first) -> its tokens, for
            ``batch.micro_tokens``. None: those of collate if that is a ``Packing``, else it pads to the longest.

    Raises:
        DataError: the lengths are not one finite number of at least 0 for each sample.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order | None = None,
        lengths: Sequence[float] | Tensor | None = None,
        micro_batch_tokens: Callable[[Sequence[float]], float] | None = None,
    ) -> None:
        self.dataset, self.order, self.micro_batch_tokens = dataset, order, micro_batch_tokens
        self.lengths = None if lengths is None else checked_lengths(lengths, len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def first(self, count: int) -> ArrangedData:
        """Return the first ``count`` samples, without an order of their own."""
        lengths = None if self.lengths is None else self.lengths[:count]
        return ArrangedData(Subset(self.dataset, range(count)), None, lengths, self.micro_batch_tokens)

    def digests(self, seed: int) -> str:
        """Return hashes of the first epoch's order and of the lengths, by which ranks compare them."""
        parts = {"order": None if self.order is None else indices_of(self, 0, seed), "lengths": self.lengths}
        return "".join(f", {name} {_digest(values)}" for name, values in parts.items() if values is not None)


def _digest(values: Tensor) -> str:
    content = values.contiguous()
    return hashlib.blake2b(ctypes.string_at(content.data_ptr(), content.nbytes), digest_size=4).hexdigest()


def checked_lengths(lengths: Sequence[float] | Tensor, samples: int) -> Tensor:
    """Return ``lengths`` as a tensor.

    Raises:
        DataError: they are not one finite number of at least 0 for each of ``samples`` samples.
    """
    try:
        values = torch.as_tensor(lengths if isinstance(lengths, Tensor) else list(lengths))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The lengths of the samples are no numbers: {error}.\n  {_LENGTHS}") from None
    if values.shape != (samples,):
        raise DataError(f"There are {list(values.shape)} lengths for {samples} samples.\n  {_LENGTHS}")
    if len(bad := (~(values >= 0) | (values == torch.inf)).nonzero()):
        index = int(bad[0])
        raise DataError(f"The length of sample {index} is {values[index].item()}.\n  {_LENGTHS}")
    return values.cpu()


_LENGTHS = "Give one number of at least 0 for each sample of the training data, in the data's order."


def indices_of(data: ArrangedData, epoch: int, seed: int) -> Tensor:
    """Return the indices of an epoch in the data's own order.

    Args:
        seed: the job's, train.seed.

    Raises:
        DataError: they are not indices of the data.
    """
    assert data.order is not None
    own = seed_for(seed, f"order/{epoch}")
    random = SampleRandom(own)
    try:
        with random.own():  # a sampler draws when it is iterated
            random.seed(epoch, 0)
            indices = data.order(epoch, own)
            values = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"order({epoch}, seed) returned no indices: {error}.\n  {_INDICES}") from error
    kind = "whole numbers" if values.numel() == 0 else str(values.dtype).removeprefix("torch.")
    if values.ndim != 1 or values.numel() == 0 or values.dtype is torch.bool or values.is_floating_point():
        raise DataError(f"order({epoch}, seed) returned {list(values.shape)} indices of {kind}.\n  {_INDICES}")
    if len(bad := ((values < 0) | (values >= len(data))).nonzero()):
        place = int(bad[0])
        raise DataError(
            f"order({epoch}, seed) returned the index {int(values[place])} at position {place}, and the training data "
            f"has {len(data)} samples.\n  {_INDICES}"
        )
    return values.cpu()


_INDICES = (
    "Return the indices of the epoch's samples as whole numbers from 0: a list, a tensor, or a sampler of torch's."
)


def samples_per_epoch(data: Any, seed: int) -> int:
    """Return the number of samples in each epoch of map-style data.

    Raises:
        DataError: the data's own order is no function of epoch and seed.
    """
    if not isinstance(data, ArrangedData) or data.order is None:
        return len(data)
    indices = indices_of(data, 0, seed)
    if not torch.equal(indices, indices_of(data, 0, seed)):
        raise DataError(
            "order(0, seed) returned other indices when it was called again.\n  Let the indices follow from epoch and "
            "seed only: draw from torch's, Python's or NumPy's global generators, which are seeded for the call."
        )
    return len(indices)


class SampleOrder:
    """The indices of the samples at any positions of any epoch.

    Args:
        data: map-style.
        samples: number in each epoch.
        seed: the job's.
        shuffle: random order, unless the data has its own; if false, that of the dataset.
    """

    def __init__(self, data: Any, samples: int, seed: int, *, shuffle: bool) -> None:
        self._data, self._samples, self._seed, self._shuffle = data, samples, seed, shuffle
        self._epoch, self._first = -1, 0
        self._indices: Sequence[int] = ()
        self._own_indices = torch.tensor([])

    def take(self, epoch: int, first: int, count: int) -> Sequence[int]:
        """Return the indices at positions [first, first + count) of an epoch.

        Raises:
            DataError: the data's own order has not as many samples as in the plan.
        """
        if isinstance(self._data, ArrangedData) and self._data.order is not None:
            return self._own(self._data, epoch)[first : first + count].tolist()
        if not self._shuffle:
            return range(first, first + count)
        start = first - self._first
        if epoch != self._epoch or start < 0 or start + count > len(self._indices):
            # further positions are computed and kept, because computing many costs little more than computing one
            ahead = min(max(count, POSITIONS_AHEAD), self._samples - first)
            self._indices = Permutation(self._samples, self._seed, epoch).take(first, ahead)
            self._epoch, self._first, start = epoch, first, 0
        return self._indices[start : start + count]

    def _own(self, data: ArrangedData, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._own_indices, self._epoch = indices_of(data, epoch, self._seed), epoch
            if len(self._own_indices) != self._samples:
                raise DataError(
                    f"order({epoch}, seed) returned {len(self._own_indices)} indices, and the plan was made for "
                    f"{self._samples} in each epoch.\n  Return equally many in all epochs."
                )
        return self._own_indices
