"""Random numbers as a function of a seed: nothing is remembered, nothing is asked of a generator.

Where a function is applied record by record, or compiled, it cannot draw. What it can do is count,
and mix the bits of each count with those of a seed until nothing of either shows. The same seed
gives the same numbers, on every device but for the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = 2
"""Words of 32 bits in a seed, each in an int64: products then stay in range."""
_LOW = 2**32 - 1
_STREAM = 0x3C6EF372
"""What one stream is apart from the next before its last mixing."""


def mixed(words: Tensor) -> Tensor:
    """Mix the bits of 32-bit words: two multiplications, a shift before, between and after."""
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _LOW
    words = ((words ^ (words >> 15)) * 0x735A2D97) & _LOW
    return words ^ (words >> 15)


def seed_of(values: Tensor, key: Tensor) -> Tensor:
    """Return the seed (WORDS,) of whole numbers below 2**24, of any shape, under a key (WORDS,).

    Other numbers, other places of the same numbers, or another key: another seed.
    """
    values = values.flatten()
    at = torch.arange(len(values), device=values.device)
    inner = mixed((values + 0x9E3779B1 * (at + 1)) & _LOW)[:, None]
    return mixed((mixed(inner ^ key).sum(0) + len(values)) & _LOW)


def uniforms(seed: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return numbers in (0, 1], float32; other streams of a seed are independent."""
    count = torch.arange(math.prod(shape), device=seed.device)
    words = mixed(count ^ seed[0])
    words = mixed((words + seed[1] + stream * _STREAM) & _LOW)
    return ((words.float() + 0.5) / 2**32).reshape(tuple(shape))


def normals(seed: Tensor, shape: Sequence[int], *, stream: int) -> Tensor:
    """Return standard normal numbers, float32 (Box and Muller: two of two uniform ones)."""
    count = math.prod(shape)
    radius, angle = uniforms(seed, (2, -(-count // 2)), stream=stream)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    both = torch.cat([radius * angle.cos(), radius * angle.sin()])
    return both[:count].reshape(tuple(shape))
