"""Which sample stands at a position of an epoch: a permutation that needs no memory, whatever the dataset's size."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_ROUNDS = 4
# SplitMix64's multipliers, as the signed numbers that int64 tensors hold
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Permutation:
    """A bijection of [0, n) fixed by (seed, epoch), computed where it is asked for, in O(1) memory.

    A Feistel network over a grid of about sqrt(n) x sqrt(n) cells, and walking on while the result lies outside n
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3.2, 3.3), with four
    rounds (Luby and Rackoff, 1988) of the multiplications of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._rows = math.isqrt(n - 1) + 1
        self._columns = -(-n // self._rows)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(key[8 * i : 8 * i + 8], "little", signed=True) for i in range(_ROUNDS)]

    def take(self, first: int, count: int) -> list[int]:
        """What stands at positions [first, first + count).

        Raises:
            IndexError: a position outside [0, n).
        """
        if first < 0 or first + count > self.n:
            raise IndexError(f"positions {first} to {first + count} are not in [0, {self.n})")
        values = self._walk(torch.arange(first, first + count))
        while (outside := values >= self.n).any():
            values[outside] = self._walk(values[outside])
        return values.tolist()

    def _walk(self, values: Tensor) -> Tensor:
        """One pass through the network: a bijection of the grid."""
        left, right = values // self._columns, values % self._columns
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                left = _mix(right, key).add_(left).remainder_(self._rows)
            else:
                right = _mix(left, key).add_(right).remainder_(self._columns)
        return left * self._columns + right


def _mix(x: Tensor, key: int) -> Tensor:
    """The round function: 31 well mixed bits and a sign, which the modulus takes away. Products wrap, as wanted."""
    x = (x + key).mul_(_FIRST)
    return x.bitwise_xor_(x >> 30).mul_(_SECOND).bitwise_right_shift_(33)
