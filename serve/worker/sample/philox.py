"""Stateless noise: a uniform number for every (seed, position), whatever was drawn before.

Philox-4x64-10 is a block cipher used as a random generator: the seed is the key, the position the counter. Nothing
has to be stored, rewound or sent when a request is preempted, batched with others or computed in chunks.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; same constants as numpy's Philox.
"""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1
_MULTIPLIER_0: Final = 0xD2E7470EE14C6C93
_MULTIPLIER_1: Final = 0xCA5A826395121157
_WEYL_0: Final = 0x9E3779B97F4A7C15
_WEYL_1: Final = 0xBB67AE8584CAA73B
_NUM_ROUNDS: Final = 10
_DRAW_KEY: Final = 0x73616D706C65
_TO_UNIT: Final = 2.0**-53


def philox_block(key: tuple[int, int], counter: int) -> tuple[int, int, int, int]:
    """Encrypt a counter below 2**64 to four 64-bit words."""
    key_0, key_1 = key
    c0, c1, c2, c3 = counter, 0, 0, 0
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 64) ^ c1 ^ key_0,
            product_1 & _MASK,
            (product_0 >> 64) ^ c3 ^ key_1,
            product_0 & _MASK,
        )
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Give the number in [0, 1) that belongs to a seed and the index of the token to be drawn.

    seed is any signed or unsigned 64-bit integer.
    """
    word = philox_block((seed & _MASK, _DRAW_KEY), position)[0]
    return (word >> 11) * _TO_UNIT
