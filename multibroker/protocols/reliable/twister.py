"""The Mersenne twister's first output for a seed, as the npm package mersenne-twister gives it.

Each message's value is the first output of a twister seeded with the value before (reliable.md,
Random number generation). Of the 624 state words that needs only words 0, 1 and 397, but word 397
is reached step by step: pure Python takes some 30 microseconds per draw, numpy's twister, which
makes all 624 words twice over, little more than one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

# One draw after another: (seed, how many) -> values, each the seed of the next.
Draws = Callable[[int, int], list[int]]

_INIT = 1812433253
_WORD = 0xFFFFFFFF
_UPPER, _LOWER = 0x80000000, 0x7FFFFFFF
_MATRIX = 0x9908B0DF
_MIDDLE = 397

# What an accelerated twister must answer before we believe it.
_PROOF = ((0, 2357136044), (1, 1791095845), (5489, 3499211612), (0xFFFFFFFF, 419326371))


def first_output(seed: int) -> int:
    """The first 32-bit output of a twister seeded with `seed`, in pure Python."""
    factor, mask = _INIT, _WORD  # locals: the loop below is nearly all the time there is
    seed &= mask
    second = word = (factor * (seed ^ (seed >> 30)) + 1) & mask
    for index in range(2, _MIDDLE + 1):
        word = factor * (word ^ word >> 30) + index & mask
    mixed = (seed & _UPPER) | (second & _LOWER)
    output = word ^ (mixed >> 1) ^ (_MATRIX if mixed & 1 else 0)
    output ^= output >> 11
    output ^= (output << 7) & 0x9D2C5680
    output ^= (output << 15) & 0xEFC60000
    return output ^ (output >> 18)


def pure_draws(seed: int, count: int) -> list[int]:
    values = []
    for _ in range(count):
        seed = first_output(seed)
        values.append(seed)
    return values


def numpy_draws() -> Draws | None:
    """Draws with numpy's twister; None without numpy, or if it does not prove itself."""
    try:
        from numpy.random import MT19937
    except ImportError:
        return None
    twister: Any = MT19937(0)
    # Not part of numpy's documented surface, hence the proof below.
    reseed = getattr(twister, "_legacy_seeding", None)
    output = twister.random_raw
    if reseed is None:
        return None

    def draws(seed: int, count: int) -> list[int]:
        # reseed gives None, and output(None) is output(): one expression per draw.
        return [seed := output(reseed(seed)) for _ in range(count)]

    return draws if all(draws(seed, 1) == [first] for seed, first in _PROOF) else None


def update_crc(crc: int, values: Sequence[int]) -> int:
    """The rolling CRC-32 of the values as big-endian 32-bit words."""
    return crc32(struct.pack(f">{len(values)}I", *values), crc)
