"""Which sample stands at a position of an epoch: a permutation that needs no memory, whatever the dataset's size."""

from __future__ import annotations

import hashlib
import math

_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """A bijection of [0, n) fixed by (seed, epoch), computed one position at a time in O(1) time and memory.

    A Feistel network over a grid of about sqrt(n) x sqrt(n) cells, and walking on while the result lies outside n
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3.2 and 3.3). The round
    function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._rows = max(1, math.isqrt(n - 1) + 1)
        self._columns = -(-n // self._rows)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(key[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} is not in [0, {self.n})")
        rows, columns = self._rows, self._columns
        value = position
        while True:
            left, right = divmod(value, columns)
            for turn, key in enumerate(self._keys):
                if turn % 2 == 0:
                    left = (left + _mix(right ^ key)) % rows
                else:
                    right = (right + _mix(left ^ key)) % columns
            value = left * columns + right
            if value < self.n:
                return value


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
